"""Tables of speeds on the CPU, and of precisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.figures.markdown import geometric, note, table
from benchmarks.rows import Row
from benchmarks.workloads import parse

README = (
    "shared/mobilenet_v2.ts:1@fp32",
    "shared/resnet50.ts:1@fp32",
    "shared/resnet50.ts:1@bf16",
    "zoo/resnet50:1@int8",
)
"""Rows of the README's table; the geometric mean of all networks at fp32 follows."""


def of_precision(rows: Sequence[Row], precision: str) -> list[Row]:
    """The CPU's speeds at a precision."""
    mine = [r for r in rows if r["what"] == "speed" and r["setup"].startswith("cpu") and r.get("over")]
    return [r for r in mine if parse(r["workload"])[0].precision == precision]


def readme(rows: Sequence[Row]) -> str:
    """Some networks compared with ONNX Runtime and OpenVINO, both at fp32; last the geometric mean of all networks at fp32."""
    whole, rivals = of_precision(rows, "fp32"), ("onnxruntime", "openvino")
    lines = [["network", "precision", "optdnn ms", "over ONNX Runtime", "over OpenVINO"]]
    for name in README:
        w = parse(name)[0]
        for r in (r for r in of_precision(rows, w.precision) if r["workload"] == name):
            over = [f"{r['over'][n]:.2f}×" for n in rivals]
            lines.append([w.short.removesuffix(".ts"), w.precision, f"{r['times']['optdnn']['ms']:.2f}", *over])
    if not whole:
        return ""
    mean = [f"{geometric(r['over'][n] for r in whole if n in r['over']):.2f}×" for n in rivals]
    return table([*lines, [f"geometric mean of {len(whole)}", "fp32", "", *mean]])


def speed(precision: str, rows: Sequence[Row]) -> str:
    """A row for each network: our time, and how much faster it is than each library and than the faster of them."""
    mine = of_precision(rows, precision)
    if not mine:
        return ""
    rivals = sorted({n for r in mine for n in r["over"]})
    lines = [["network", "optdnn ms", *(f"over {n}" for n in rivals), "over the faster"]]
    for r in mine:
        over = [f"{r['over'][n]:.2f}×" if n in r["over"] else "" for n in rivals]
        name = parse(r["workload"])[0]
        shown = f"light_{name.short}" if name.source == "light" else name.short
        lines.append([shown, f"{r['times']['optdnn']['ms']:.2f}", *over, f"{min(r['over'].values()):.2f}×"])
    mean = [geometric(r["over"][n] for r in mine if n in r["over"]) for n in rivals]
    mean.append(geometric(min(r["over"].values()) for r in mine))
    lines.append(["**geometric mean**", "", *(f"**{m:.2f}×**" for m in mean)])
    how = (
        f"{mine[0]['threads']} threads each. Each candidate runs in a separate process, in turns, on the same file with fixed "
        "shapes."
    )
    return table(lines, how=how, rows=mine)


# ---------------------------------------------------------------- precisions


def precision(target: str, rows: Sequence[Row]) -> str:
    """A table for each network, with a row for each precision; the fastest within half a point of fp32 is bold."""
    mine = [r for r in rows if r["what"] == "precision" and r["setup"].startswith(target) and "configurations" in r]
    if not mine:
        return ""
    parts = [f"### {parse(r['workload'])[0].short}\n\n{_precisions(r)}" for r in mine]
    if said := [line for r in mine for line in _declined(r)]:
        parts.append("### Why `auto` declined int8\n\n" + "\n".join(said))
    workloads = [parse(r["workload"])[0] for r in mine]
    batches = ", ".join(str(n) for n in sorted({w.batch for w in workloads if w.source == "trained"}))
    how = (
        f"All engines of a network were timed in turns, the trained ones at batch {batches}. `optdnn inspect` shows the reason for "
        "each node's precision."
    )
    return "\n\n".join([*parts, note(how, mine)])


def _declined(row: Row) -> list[str]:
    autos = [c["auto"] for name, c in row["configurations"].items() if name.startswith("auto") and "auto" in c]
    name = parse(row["workload"])[0].short
    return [f"- {name}: {line}." for auto in autos[:1] for line in auto.get("declined", ()) if line.startswith("int8 ")]


def _precisions(row: Row) -> str:
    found = {c: v for c, v in row["configurations"].items() if "error" not in v}
    lost = {c: _lost(v, found["fp32"]) for c, v in found.items()}
    within = [c for c in found if lost[c] <= row.get("bound", 0.5) and "ms" in found[c]]
    best = min(within, key=lambda c: found[c]["ms"], default=None)
    score = "accuracy" if "accuracy" in found["fp32"] else "cosine distance"
    lines = [["precision", score, "latency ms", "engine KB", "chosen", "over the fastest single"]]
    for name, v in found.items():
        over = v.get("over_best", {"verdict": ""})
        faster = over["verdict"] if "speedup" not in over or over["verdict"] == "the same engine" else ""
        cells = [
            f"{v['accuracy']:.2f} %" if "accuracy" in v else f"{v['drop']:.1g}",
            f"{v['ms']:.3f}" if "ms" in v else "",
            f"{v['engine_bytes'] / 1e3:.0f}",
            v["precision"] if "auto" in v else "",
            faster or (f"{over['speedup']:.2f}× {over['single']}" if "speedup" in over else ""),
        ]
        lines.append([f"**{name}**" if name == best else name, *cells])
    return table(lines)


def _lost(row: Mapping[str, Any], fp32: Mapping[str, Any]) -> float:
    return float(row["drop"] if "drop" in row else fp32["accuracy"] - row["accuracy"])
