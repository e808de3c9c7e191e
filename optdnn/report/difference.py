"""The report of ``optdnn diff`` as sentences, as rows and as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from optdnn.report.html import headline, page
from optdnn.report.words import error_text, milliseconds, times

if TYPE_CHECKING:
    from optdnn.report.drawing import Drawing

SHOWN = 500
"""Most rows of a table in HTML."""


def title(report: Mapping[str, Any]) -> str:
    return " and ".join(PurePath(report[side]["file"]).name for side in ("a", "b"))


def sentences(report: Mapping[str, Any]) -> list[str]:
    """The lines next to the tables: A and B, their results and times."""
    lines = [f"A is {report['a']['file']}, B is {report['b']['file']}."]
    if report["same_bytes"]:
        lines.append("The files are the same, byte for byte.")
    elif not report["tables"]:
        lines.append("The files record no difference.")
    if (out := report["outputs"]) is not None:
        same = out["max_abs_err"] == 0
        said = "are equal to the bit" if same else f"differ by {error_text(out['max_rel_err'])} of the largest element"
        lines.append(f"On the same random inputs (seed {out['seed']}), the outputs {said}.")
    if (found := report["race"]) is not None:
        low, high = found["range"]
        lines.append(
            f"A takes {milliseconds(found['a_ms'])} ms and B {milliseconds(found['b_ms'])} ms, in turns: B is "
            f"{times(found['speedup'])} as fast (95 % between {times(low)} and {times(high)}): {found['verdict']}."
        )
    if report["not_run"] is not None:
        lines.append(f"They were not run: {report['not_run']}.")
    return lines


def cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Name, A, B of an entry that differs."""
    a, b = ("–" if row[side] is None else str(row[side]) for side in ("a", "b"))
    return str(row["name"]), a, b


def to_html(report: Mapping[str, Any], names: Mapping[str, str], drawing: Drawing | None = None) -> str:
    """One self-contained file; ``names``: table -> its heading, ``drawing``: the network of B where it is an engine. Needs jinja2
    (extra ``report``)."""
    tables: list[tuple[str, Sequence[tuple[str, str, str]], int]] = [
        (names[name], [cells(row) for row in rows[:SHOWN]], max(0, len(rows) - SHOWN))
        for name, rows in report["tables"].items()
    ]
    return page(
        title(report),
        drawing,
        sentences=sentences(report),
        figures=_figures(report),
        tables=tables,
        footer="optdnn diff",
    )


def _figures(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """How far the outputs and the times are apart."""
    found = []
    if (race := report["race"]) is not None:
        tone = {"faster": "good", "slower": "bad"}.get(race["verdict"], "")
        found.append(headline(times(race["speedup"]), "speedup of B over A", tone))
    if (out := report["outputs"]) is not None:
        found.append(
            headline(
                error_text(out["max_rel_err"]), "largest difference of the outputs, relative to the largest output"
            )
        )
    return found
