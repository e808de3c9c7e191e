"""The report as one HTML file: no script, no request to anywhere, readable in the dark and on a phone.

Needs jinja2 (extra ``report``). Every text is escaped by the template engine: names come from models, which are untrusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from optdnn.errors import MissingDependency, printable
from optdnn.report import charts, words
from optdnn.runtime.program import Plain

if TYPE_CHECKING:
    import jinja2

SHOWN_NODES = 200
SHOWN_LAYERS = 50


def require_jinja() -> None:
    """Raise MissingDependency where jinja2 is absent."""
    if find_spec("jinja2") is None:
        raise MissingDependency("jinja2", "report", "to write an HTML report")


def source_of(name: str) -> str:
    """The text of a template of this package."""
    return files("optdnn.report").joinpath(name).read_text(encoding="utf-8")


def template(name: str, **filters: Callable[..., str]) -> jinja2.Template:
    """A template of this package, with these filters. Raises MissingDependency."""
    require_jinja()
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters.update(filters)
    return environment.from_string(source_of(name))


def to_html(report: Mapping[str, Plain]) -> str:
    """The whole report, every section that the report has data for."""
    made = template(
        "report.html.j2",
        ms=words.milliseconds, err=words.error_text, times=words.times, size=words.bytes_text,
        joined=partial(words.first_of, most=SHOWN_NODES),
    )  # fmt: skip
    return made.render(**_view(report))


def _view(report: Mapping[str, Plain]) -> dict[str, Any]:
    """The variables of the template."""
    measured = [r for r in report["rows"] if r["quantiles_ms"]]
    passes = report["build"].get("passes") or []
    before, after = (passes[0]["kinds_before"], passes[-1]["kinds_after"]) if passes else ({}, {})
    return {
        "r": report,
        "title": report["model"] or report["subject"],
        "subject": report["rows"][0],
        "sentences": words.sentences(report),
        "problems": words.problems(report),
        "speedup_text": words.speedup_text,
        "error_cells": lambda row: words.error_cells(row, report),
        "latency": charts.violins(report["rows"]) if measured else None,
        "errors": charts.error_axis(report) if report["error_reference"] is not None else None,
        "profile": charts.error_profile(report["layers"], report["bisect"]["tolerance"])
        if report.get("layers")
        else None,
        "histogram": words.HISTOGRAM,
        "layer_error": words.layer_error,
        "histogram_text": words.histogram_text,
        "layers": (report.get("layers") or [])[:SHOWN_LAYERS],
        "bars": charts.operator_bars(before, after),
        "count_before": sum(before.values()),
        "count_after": sum(after.values()),
        "passes": [_pass(p, max(q["nodes_before"] for q in passes)) for p in passes],
        "tactics": charts.tactic_bars(report["build"].get("tactics") or []),
        "cliffs": [words.cliff_cells(c) for c in report["build"].get("cliffs") or []],
        "cliff_columns": words.CLIFF_COLUMNS,
        "cliffs_title": words.cliffs_title(report["build"].get("cliffs") or []),
        "tactic": (report["build"].get("tactic") or {}).get("name"),
        "seconds": report["build"].get("seconds") or {},
        "fallbacks": [
            (library, f) for library, items in (report["build"].get("fallbacks") or {}).items() for f in items
        ],
        "machine": {k: v for k, v in report["machine"].items() if v is not None},
    }


def _pass(p: Mapping[str, Any], most: int) -> dict[str, Any]:
    """One pass with its rewrites grouped by rule and its refusals by reason; widths in percent of the largest graph."""
    removed = p["nodes_before"] - p["nodes_after"]
    return {
        "name": p["name"],
        "before": p["nodes_before"],
        "after": p["nodes_after"],
        "removed": removed,
        "kept_percent": 100 * min(p["nodes_before"], p["nodes_after"]) / max(most, 1),
        "removed_percent": 100 * max(removed, 0) / max(most, 1),
        "added_percent": 100 * max(-removed, 0) / max(most, 1),
        "fired": words.pass_groups(p["fired"], "reason"),
        "refused": words.pass_groups(p["refused"], "reason"),
        "n_fired": len(p["fired"]),
        "n_refused": len(p["refused"]),
    }
