"""The reports of commands as HTML pages (:mod:`optdnn.report.page`): what each shows at its head, and which sections it has.

A section without data is left out. ``drawing`` is the engine's network (:func:`optdnn.report.drawing.draw`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optdnn.report import charts, words
from optdnn.report.page import render
from optdnn.runtime.program import Plain

if TYPE_CHECKING:
    from optdnn.report.drawing import Drawing

SHOWN_LAYERS = 50
EMPTY: Mapping[str, Any] = {
    "subtitle": "", "figures": [], "r": None, "sentences": [], "problems": [], "drawing": None, "latency": None,
    "latency_rows": [], "latency_base": None, "latency_parts": "each round", "errors": None, "profile": None, "bars": [],
    "passes": [], "tactics": [], "cliffs": [], "fallbacks": [], "tables": [], "machine": [], "command": None, "footer": "",
}  # fmt: skip

_Report = Mapping[str, Plain]


def page(title: str, drawing: Drawing | None, **view: Any) -> str:
    """The page of a report, with the sections that it has data for."""
    fixed = {"title": title, "drawing": drawing, "duration": words.duration}
    return render("report.html.j2", None if drawing is None else drawing.data, **{**EMPTY, **view, **fixed})


def headline(value: str, text: str, tone: str = "") -> dict[str, str]:
    """A figure at the head of a page; ``tone`` is "good", "bad" or none."""
    return {"value": value, "text": text, "tone": tone}


# ---------------------------------------------------------------- compare


def to_html(report: _Report, drawing: Drawing | None = None) -> str:
    """The report of a comparison."""
    measured = [r for r in report["rows"] if r["quantiles_ms"]]
    subject = report["rows"][0]
    others = ", ".join(r["name"] for r in report["rows"][1:]) or "nothing"
    latency = charts.violins(report["rows"]) if measured else None
    return page(
        report["model"] or report["subject"],
        drawing,
        r=report,
        subtitle=f"{subject['name']} compared with {others}, on {report['machine'].get('cpu')}, "
        f"{words.counted(report['threads'], 'thread')} each",
        figures=_compared(report),
        subject=subject,
        sentences=words.sentences(report),
        problems=words.problems(report),
        speedup_text=words.speedup_text,
        error_cells=lambda row: words.error_cells(row, report),
        latency=latency,
        latency_rows=report["rows"],
        latency_base=_baseline(report, latency),
        errors=charts.error_axis(report) if report["error_reference"] is not None else None,
        profile=charts.error_profile(report["layers"], report["bisect"]["tolerance"]) if report.get("layers") else None,
        histogram=words.HISTOGRAM,
        layer_error=words.layer_error,
        histogram_text=words.histogram_text,
        layers=(report.get("layers") or [])[:SHOWN_LAYERS],
        machine=[
            *_machine(report),
            ("threads of each", report["threads"]),
            *report["versions"].items(),
            ("engine", words.bytes_text(report["engine_bytes"])),
            *_seconds(report["build"]),
        ],
        command=report.get("command"),
        footer=f"{_footer('Measured', report)} Each candidate ran in a separate process, taking turns.",
        **_built(report["build"]),
    )


def _compared(report: _Report) -> list[dict[str, str]]:
    subject = report["rows"][0]
    median = words.milliseconds(subject["median_ms"]) + (" ms" if subject["median_ms"] is not None else "")
    found = [headline(median, f"median latency of {subject['name']}")]
    for v in report["versus"]:
        if v["verdict"] == "unstable":
            low, high = v["range"]
            found.append(headline("not clear", f"if faster than {v['against']}: {low:.2f} to {high:.2f}×"))
        else:
            tone = {"faster": "good", "slower": "bad"}.get(v["verdict"], "")
            found.append(headline(words.times(v["speedup"]), f"as fast as {v['against']}", tone))
    if report["error_reference"] is not None and subject["error"] is None:
        error = words.error_text(subject["max_rel_err"])
        found.append(headline(error, "largest error, relative to the largest output"))
    return [*found, *_counts(report["build"])]


def _baseline(report: _Report, latency: Any) -> float | None:
    """Where the baseline's median lies on the axis of latencies."""
    if latency is None:
        return None
    shapes = zip(report["rows"], latency[1], strict=True)
    return next((s.median for r, s in shapes if s is not None and r["name"] == report["speedup_reference"]), None)


# ---------------------------------------------------------------- build, bench


def build_html(report: _Report, drawing: Drawing, title: str) -> str:
    """The report of a build; ``report`` holds ``bench`` where the engine was measured."""
    bench = report.get("bench")
    error = report.get("error") or {}
    figures = [] if bench is None else _measured(bench)
    if bench is None and drawing.timeline is not None:
        figures = [headline(words.duration(drawing.timeline.total_us), f"a run, {drawing.source}")]
    if (measured := [t for t in report.get("tactics") or () if t.get("median_ms")]) and bench is None:
        best = min(measured, key=lambda t: float(t["median_ms"]))
        figures = [headline(f"{words.milliseconds(best['median_ms'])} ms", f"a run by {best['tactic']}")]
    if "max_rel_err" in error:
        figures.append(
            headline(words.error_text(error["max_rel_err"]), "largest error, relative to the largest output")
        )
    figures += _counts(report)
    figures.append(headline(f"{sum(report['seconds'].values()):.1f} s", "the build took"))
    not_measured = error.get("not_measured")
    said = [f"The error was not measured: {not_measured}."] if not_measured else []
    return page(
        title,
        drawing,
        subtitle=f"{report['options']['target']}, {report.get('precision_text') or report['options']['precision']}",
        figures=figures,
        sentences=said,
        **({} if bench is None else _distributions(bench)),
        machine=[*_machine(report), *report["versions"].items(), *_seconds(report)],
        command=report.get("command"),
        footer=_footer("Built", report),
        **_built(report),
    )


def bench_html(report: _Report, drawing: Drawing, title: str) -> str:
    """The report of a measurement (``optdnn bench --profile``)."""
    at = ", ".join(f"{name} {list(shape)}" for name, shape in report["inputs"].items())
    unstable = (
        "The machine was too unstable to trust these figures, or too few runs were taken: a longer --duration helps."
    )
    return page(
        title,
        drawing,
        subtitle=f"{report['target']}, {report['precision_text']}; inputs {at}",
        figures=_measured(report),
        problems=[*([] if report["stable"] else [unstable]), *(report.get("gpu") or {}).get("remarks", ())],
        machine=[*_machine(report), *report["versions"].items()],
        command=report.get("command"),
        footer=_footer("Measured", report),
        **_distributions(report),
        **_built({**report.get("build", {}), "cliffs": report.get("cliffs")}),
    )


def _measured(bench: _Report) -> list[dict[str, str]]:
    gpu = bench.get("gpu")
    stats = bench["latency_ms"] if gpu is None else gpu["gpu_compute_ms"]
    where = "of a call" if gpu is None else "of a run on the GPU"
    rate = bench["throughput_per_s"] if gpu is None else gpu["throughput_per_s"]
    return [
        headline(f"{words.milliseconds(stats['median'])} ms", f"median {where}"),
        headline(f"{words.milliseconds(stats['p99'])} ms", f"99th percentile {where}"),
        headline(f"{rate:.1f}", f"{'calls' if gpu is None else 'runs'} per second"),
    ]


DISTRIBUTIONS = {"gpu_compute_ms": "on the GPU", "latency_ms": "with copies", "enqueue_ms": "to enqueue"}


def _distributions(bench: _Report) -> dict[str, Any]:
    """The latencies' distributions as rows of a chart: of calls, or of the parts of a run on a GPU."""
    rows = [_row("a call", bench["latency_ms"], bench["distribution"])]
    gpu = bench.get("gpu")
    if gpu is not None:
        rows += [_row(text, gpu[key], gpu["distributions"][key]) for key, text in DISTRIBUTIONS.items()]
    return {"latency": charts.violins(rows), "latency_rows": rows, "latency_parts": "fifths of the measurement"}


def _row(name: str, stats: Mapping[str, float], distribution: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "median_ms": stats["median"], "p99_ms": stats["p99"], **distribution}


# ---------------------------------------------------------------- parts of several


def _footer(done: str, report: _Report) -> str:
    time = f", {report['time']}" if report.get("time") else ""
    return f"{done} by optdnn {report['versions']['optdnn']}{time}."


def _machine(report: _Report) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in report["machine"].items() if v is not None]


def _seconds(build: _Report) -> list[tuple[str, str]]:
    return [(f"build: {k}", f"{v:.2f} s") for k, v in (build.get("seconds") or {}).items()]


def _kinds(build: _Report) -> tuple[Mapping[str, int], Mapping[str, int]]:
    passes = build.get("passes") or []
    return (passes[0]["kinds_before"], passes[-1]["kinds_after"]) if passes else ({}, {})


def _counts(build: _Report) -> list[dict[str, str]]:
    before, after = _kinds(build)
    counts = f"{sum(before.values())} → {sum(after.values())}"
    return [headline(counts, "operators, model to engine")] if before or after else []


def _built(build: _Report) -> dict[str, Any]:
    """The variables of the sections on a build."""
    passes = build.get("passes") or []
    before, after = _kinds(build)
    cliffs: Sequence[Mapping[str, Any]] = build.get("cliffs") or []
    return {
        "bars": charts.operator_bars(before, after),
        "count_before": sum(before.values()),
        "count_after": sum(after.values()),
        "passes": [_pass(p, max(q["nodes_before"] for q in passes)) for p in passes],
        "tactics": charts.tactic_bars([t for t in build.get("tactics") or [] if "median_ms" in t or "refused" in t]),
        "cliffs": [words.cliff_cells(c) for c in cliffs],
        "cliff_columns": words.CLIFF_COLUMNS,
        "cliffs_title": words.cliffs_title(cliffs),
        "tactic": (build.get("tactic") or {}).get("name"),
        "fallbacks": [(library, f) for library, items in (build.get("fallbacks") or {}).items() for f in items],
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
        "fired": words.pass_groups(p["fired"]),
        "refused": words.pass_groups(p["refused"]),
        "n_fired": len(p["fired"]),
        "n_refused": len(p["refused"]),
    }
