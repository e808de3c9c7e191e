"""The tables of ``bench``: the figures of a GPU, steps, and the layers of a CPU library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from optdnn.cli.common import stdout, table, warn
from optdnn.report.words import CLIFF_COLUMNS, cliff_cells, cliffs_title, figure, first_of

SHOWN_LAYERS = 30
SHOWN_CLIFFS = 10
GPU_ROWS = {
    "gpu_compute_ms": "GPU compute",
    "enqueue_ms": "enqueue (host)",
    "h2d_ms": "copy to the GPU",
    "d2h_ms": "copy from the GPU",
    "latency_ms": "latency (copies and compute)",
    "host_latency_ms": "latency by the host's clock",
}
"""Figures of the GPU, as the table shows them."""


def show_gpu(report: Mapping[str, Any]) -> None:
    """The report of an engine on a GPU."""
    gpu = report["gpu"]
    columns = list(gpu["gpu_compute_ms"])
    rows = [[title, *(f"{gpu[key][c]:.4f}" for c in columns)] for key, title in GPU_ROWS.items()]
    rows.append(["NumPy in, NumPy out", *(f"{report['latency_ms'][c]:.4f}" for c in columns)])
    stdout.print(table(None, ["milliseconds", *columns], rows, right=range(1, len(columns) + 1)))
    rate, runs, l2 = gpu["throughput_per_s"], gpu["iterations"], gpu["l2"]
    stdout.print(f"throughput {rate:.1f} inferences per second (calls, whatever their batch); {runs} runs, L2 {l2}")
    if "inputs" in report:
        stdout.print("inputs: " + ", ".join(f"{name} {list(shape)}" for name, shape in report["inputs"].items()))
    kernels = Counter(str(f["kernel"]) for f in report["facts"] if "kernel" in f)
    made_of = ", ".join(f"{n} {name}" for name, n in kernels.most_common(6))
    precision = report.get("precision_text", report["precision"])
    stdout.print(f"{gpu['device']}; target {report['target']}, precision {precision}; steps: {made_of}")
    clocks = gpu["clocks"]
    if clocks is not None:
        sm = clocks["sm_mhz"]
        stdout.print(
            f"clocks: multiprocessors {sm['min']} to {sm['max']} MHz (possible: {clocks['sm_mhz_possible']}), memory "
            f"{clocks['memory_mhz']} MHz; {clocks['temperature_c']} °C, {clocks['power_w_max']} W at most"
        )
    if "profile" in report:
        show_gpu_steps(report["profile"])
        show_cliffs(report["cliffs"])
    for line in gpu["remarks"]:
        warn(line)


def show_gpu_steps(steps: Sequence[Mapping[str, Any]]) -> None:
    """The time that each step adds to a run on a GPU."""
    rows = [
        [
            s["step"],
            f"{s['us']:.2f}",
            f"{s['share']:.1%}",
            figure(s["tflops"] if s["flops"] else None, 1),
            figure(s["gbs"], 0),
            "–" if s["roofline"] is None else f"{s['roofline']:.0%}",
            s["tactic"] or s["kind"],
            first_of(s["src"], 3),
        ]
        for s in steps
    ]
    columns = ["step", "µs", "%", "TFLOP/s", "GB/s", "of roofline", "tactic", "ONNX nodes"]
    if any("lane" in s for s in steps):
        columns.insert(1, "lane")
        rows = [[row[0], s.get("lane", 0), *row[1:]] for row, s in zip(rows, steps, strict=True)]
    stdout.print(table("\nwhat each step adds to a run", columns, rows, right=range(len(columns) - 2)))


def show_cliffs(cliffs: Sequence[Mapping[str, Any]]) -> None:
    """Steps that are slow for their work, with what each would gain and why it is slow."""
    if cliffs:
        rows = [cliff_cells(c) for c in cliffs[:SHOWN_CLIFFS]]
        stdout.print(table(f"\n{cliffs_title(cliffs)}", CLIFF_COLUMNS, rows, right=range(5)))


def show_steps(steps: Sequence[Mapping[str, Any]]) -> None:
    """The steps of a program that runs on the CPU."""
    rows = [
        [p["step"], p["executor"], f"{p['median_ms']:.3f}", f"{p['share']:.0%}", first_of(p["src"], 3)] for p in steps
    ]
    columns = ["step", "executor", "median ms", "share", "ONNX nodes"]
    stdout.print(table("\nsteps", columns, rows, right=[0, 2, 3], clip=[4]))


def show_layers(layers: Sequence[Mapping[str, Any]]) -> None:
    """The layers that a CPU library counted, the slowest first."""
    rows = [
        [f"{x['median_ms']:.4f}", f"{x['share']:.1%}", x["kind"], x["step"], x["name"]] for x in layers[:SHOWN_LAYERS]
    ]
    columns = ["ms", "share", "by", "step", "ONNX nodes"]
    title = "\nlayers, by the library's counters, scaled to the time without them"
    stdout.print(table(title, columns, rows, right=[0, 1, 3], clip=[4]))
    if len(layers) > SHOWN_LAYERS:
        rest = layers[SHOWN_LAYERS:]
        share = sum(x["share"] for x in rest)
        stdout.print(f"and {len(rest)} more, {share:.1%} together (all of them: --json)")


def show_energy(energy: Mapping[str, Any]) -> None:
    """The energy of a run, by each counter that was read."""
    rows = [
        [
            c["counter"],
            joules_text(c["net_joules"]),
            joules_text(c["joules"]),
            f"{c['watts']:.1f}",
            f"{c['idle_watts']:.1f}",
        ]
        for c in energy["counters"]
    ]
    columns = ["energy", "of a run", "with idle power", "W", "W at rest"]
    stdout.print(table(None, columns, rows, right=range(1, 5)))
    stdout.print(
        f"{energy['runs']} runs in {energy['seconds']:.1f} s; power at rest over {energy['idle_seconds']:.1f} s before"
    )


def joules_text(joules: float) -> str:
    """An energy in J, mJ or µJ."""
    for unit, size in (("J", 1.0), ("mJ", 1e-3)):
        if abs(joules) >= size:
            return f"{joules / size:.3g} {unit}"
    return f"{joules / 1e-6:.3g} µJ"
