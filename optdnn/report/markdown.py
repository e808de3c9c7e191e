"""The report as Markdown (GitHub's dialect). Names from the model are untrusted text: they are escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optdnn.errors import printable
from optdnn.report.words import (
    CLIFF_COLUMNS,
    HISTOGRAM,
    cliff_cells,
    cliffs_title,
    error_cells,
    error_text,
    figure,
    first_of,
    histogram_text,
    layer_error,
    milliseconds,
    pass_groups,
    problems,
    sentences,
    speedup_text,
)
from optdnn.runtime.program import Plain

SHOWN_LAYERS = 30
SHOWN_NODES = 20


def to_markdown(report: Mapping[str, Plain]) -> str:
    """The whole report, every section that the report has data for."""
    title = escape(report["model"] or report["subject"])
    parts = [f"# optdnn compared: {title}", _rows(report)]
    parts.append("\n".join(f"- {escape(s)}" for s in (*sentences(report), *problems(report))))
    parts += [*_layers(report), *_build(report["build"]), *_machine(report)]
    return "\n\n".join(parts) + "\n"


def escape(text: object) -> str:
    """Text that stays text: no markup, no HTML, no table border, one line."""
    out = "".join(f"\\{c}" if c in r"\`*_[]|~$#" else c for c in printable(str(text)))
    return " ".join(out.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())


def grid(columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    """A table; cells are escaped."""
    lines = [f"| {' | '.join(map(escape, columns))} |"]
    lines.append("|" + "|".join("---:" if i in right else "---" for i in range(len(columns))) + "|")
    lines += [f"| {' | '.join(map(escape, row))} |" for row in rows]
    return "\n".join(lines)


def _rows(report: Mapping[str, Plain]) -> str:
    rows = [
        [
            r["name"],
            milliseconds(r["median_ms"]),
            milliseconds(r["p99_ms"]),
            figure(r["throughput_per_s"], 1),
            speedup_text(r),
            *error_cells(r, report),
            r["error"] or "",
        ]
        for r in report["rows"]
    ]
    columns = ["", "median ms", "p99 ms", "per second", "speedup", "max abs error", "max rel error", ""]
    return grid(columns, rows, right=range(1, 7))


def _layers(report: Mapping[str, Plain]) -> list[str]:
    if "layers" not in report:
        return []
    first, tolerance = report["bisect"]["first"], report["bisect"]["tolerance"]
    said = (
        f"No node is beyond {tolerance:g} of its largest output."
        if first is None
        else f"The first node beyond {tolerance:g}: {escape(first['operator'])} {escape(first['node'])}."
    )
    rows = [
        [
            d["position"],
            d["operator"],
            error_text(layer_error(d)),
            error_text(d["passes_rel_err"]),
            histogram_text(d["histogram"]),
            d["node"],
        ]
        for d in report["layers"][:SHOWN_LAYERS]
    ]
    columns = ["op", "operator", "max rel error", "by passes", HISTOGRAM, "ONNX nodes"]
    against = f" from {escape(report['layers_against'])}" if "layers_against" in report else ""
    return [f"## Divergence by node{against}", said, grid(columns, rows, right=[0, 2, 3])]


def _build(build: Mapping[str, Any]) -> list[str]:
    parts = []
    if passes := build.get("passes"):
        rows = [
            [p["name"], len(p["fired"]), len(p["refused"]), p["nodes_before"], p["nodes_after"]]
            for p in passes
            if p["fired"] or p["refused"]
        ]
        parts += ["## Passes", grid(["pass", "made", "refused", "nodes before", "after"], rows, right=[1, 2, 3, 4])]
        before, after = passes[0]["kinds_before"], passes[-1]["kinds_after"]
        kinds = sorted({*before, *after}, key=lambda k: (-before.get(k, 0), k))
        rows = [[k, before.get(k, 0), after.get(k, 0)] for k in kinds]
        parts += ["## Operators", grid(["operator", "in the model", "in the engine"], rows, right=[1, 2])]
        refused = [
            [p["name"], rule, reason, first_of(nodes, SHOWN_NODES)]
            for p in passes
            for rule, reason, nodes in pass_groups(p["refused"])
        ]
        if refused:
            parts += ["## Fusions refused", grid(["pass", "rule", "because", "nodes"], refused)]
    if tactics := build.get("tactics"):
        rows = [[t["tactic"], milliseconds(t.get("median_ms")), t.get("refused", "")] for t in tactics]
        parts += ["## Tactics tried", grid(["tactic", "median ms", "refused"], rows, right=[1])]
    if cliffs := build.get("cliffs"):
        title = cliffs_title(cliffs)
        parts += [f"## {title[0].upper()}{title[1:]}", grid(CLIFF_COLUMNS, [*map(cliff_cells, cliffs)], right=range(5))]
    rows = [
        [where, f.get("library", "NumPy, on the CPU"), f["operator"], f["node"], f["reason"]]
        for where, fs in (build.get("fallbacks") or {}).items()
        for f in fs
    ]
    if rows:
        parts += ["## Run by another", grid(["instead of", "by", "operator", "node", "because"], rows)]
    return parts


def _machine(report: Mapping[str, Plain]) -> list[str]:
    machine = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in report["machine"].items()}
    facts = [*machine.items(), ("threads of each", report["threads"]), *report["versions"].items()]
    if report.get("command"):
        facts.append(("command", report["command"]))
    if report.get("time"):
        facts.append(("measured", report["time"]))
    return ["## Machine and versions", grid(["", ""], [[k, "" if v is None else v] for k, v in facts])]
