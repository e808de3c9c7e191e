"""``optdnn bench``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from optdnn.cli.arrays import read_inputs, typed
from optdnn.cli.common import parse_sizes, print_json, progress, stderr, stdout, table
from optdnn.errors import UsageError


@click.command("bench")
@click.argument("engine", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--warmup", type=click.IntRange(min=0), default=10, show_default=True, help="Runs that are not counted.")
@click.option("--duration", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds to measure (3).")
@click.option("--iterations", type=click.IntRange(min=1), metavar="N", help="Runs to measure, instead of a duration.")
@click.option("--input", "inputs", multiple=True, metavar="[NAME=]FILE", help="As for run; random where not given.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="Size of a symbolic dimension (1).")
@click.option("--threads", type=click.IntRange(min=1), help="Override the build's number of threads.")
@click.option("--profile", is_flag=True, help="Also time each step.")
@click.option("--flush-l2", is_flag=True, help="On a GPU: empty its L2 before each run.")
@click.option("--trace", is_flag=True, help="On a GPU: run once, a kernel at a time in NVTX ranges, for nsys and ncu.")
@click.option("--json", "as_json", is_flag=True, help="Print the full report as JSON.")
def command(
    engine: Path,
    warmup: int,
    duration: float | None,
    iterations: int | None,
    inputs: tuple[str, ...],
    sizes: tuple[str, ...],
    threads: int | None,
    profile: bool,
    flush_l2: bool,
    trace: bool,
    as_json: bool,
) -> None:
    """Measure the latency and throughput of ENGINE, NumPy arrays in and out, one call at a time.

    On a GPU also what the GPU does: its time for an inference with all arrays there, the host's time to enqueue one, the
    copies, and both together.
    """
    import optdnn
    from optdnn.runtime.bench import bench
    from optdnn.runtime.feeds import random_feeds

    loaded = optdnn.load(engine, threads=threads)
    feeds = typed(read_inputs(inputs), loaded.inputs)
    missing = [s for s in loaded.inputs if s.name not in feeds]
    if missing:
        stderr.print(f"random inputs: {', '.join(map(str, missing))}")
        made = random_feeds(loaded.inputs, sizes=parse_sizes(sizes), profiles=loaded.profiles, given=feeds)
        feeds = {**made, **feeds}
    if trace:
        _trace(loaded, feeds)
        return
    with progress(f"bench {engine.name}"):
        report = bench(
            loaded,
            feeds,
            warmup=warmup,
            duration=duration,
            iterations=iterations,
            with_profile=profile,
            flush_l2=flush_l2,
        )
    if as_json:
        print_json(report)
        return
    if "gpu" in report:
        show_gpu(report)
        return
    latency = report["latency_ms"]
    stdout.print(
        table(None, [*latency, "per second", "runs"], [[*(f"{v:.3f}" for v in latency.values()), *_rates(report)]])
    )
    facts = _facts(report["facts"])
    stdout.print(f"milliseconds; target {report['target']}, precision {report['precision']}; {facts}")
    if profile:
        rows = [
            [p["step"], p["executor"], f"{p['median_ms']:.3f}", f"{p['share']:.0%}", _names(p["src"])]
            for p in report["profile"]
        ]
        stdout.print(table("\nsteps", ["step", "executor", "median ms", "share", "ONNX nodes"], rows, right=[0, 2, 3]))
    if not report["stable"]:
        stderr.print("the machine was too unstable to trust these figures (or too few runs were taken)")


GPU_ROWS = {
    "gpu_compute_ms": "GPU compute",
    "enqueue_ms": "enqueue (host)",
    "h2d_ms": "copy to the GPU",
    "d2h_ms": "copy from the GPU",
    "latency_ms": "latency (copies and compute)",
    "host_latency_ms": "latency by the host's clock",
}
"""Figures of the GPU, as the table shows them."""


def show_gpu(report: dict[str, Any]) -> None:
    gpu = report["gpu"]
    columns = list(gpu["gpu_compute_ms"])
    rows = [[title, *(f"{gpu[key][c]:.4f}" for c in columns)] for key, title in GPU_ROWS.items()]
    rows.append(["NumPy in, NumPy out", *(f"{report['latency_ms'][c]:.4f}" for c in columns)])
    stdout.print(table(None, ["milliseconds", *columns], rows, right=range(1, len(columns) + 1)))
    rate, runs, l2 = gpu["throughput_per_s"], gpu["iterations"], gpu["l2"]
    stdout.print(f"throughput {rate:.1f} inferences per second (calls, whatever their batch); {runs} runs, L2 {l2}")
    kernels = Counter(str(f["kernel"]) for f in report["facts"] if "kernel" in f)
    made_of = ", ".join(f"{n} {name}" for name, n in kernels.most_common(6))
    stdout.print(f"{gpu['device']}; target {report['target']}, precision {report['precision']}; steps: {made_of}")
    clocks = gpu["clocks"]
    if clocks is not None:
        sm = clocks["sm_mhz"]
        stdout.print(
            f"clocks: multiprocessors {sm['min']} to {sm['max']} MHz (possible: {clocks['sm_mhz_possible']}), memory "
            f"{clocks['memory_mhz']} MHz; {clocks['temperature_c']} °C, {clocks['power_w_max']} W at most"
        )
    if "profile" in report:
        show_steps(report["profile"])
    for remark in gpu["remarks"]:
        stderr.print(f"warning: {remark}")


def show_steps(steps: list[dict[str, Any]]) -> None:
    rows = [
        [
            s["step"],
            f"{s['us']:.2f}",
            f"{s['share']:.1%}",
            _rate(s["tflops"] if s["flops"] else None, 1),
            _rate(s["gbs"], 0),
            "–" if s["roofline"] is None else f"{s['roofline']:.0%}",
            s["tactic"] or s["kind"],
            _names(s["src"]),
        ]
        for s in steps
    ]
    columns = ["step", "µs", "%", "TFLOP/s", "GB/s", "of roofline", "tactic", "ONNX nodes"]
    if any("lane" in s for s in steps):
        columns.insert(1, "lane")
        rows = [[row[0], s.get("lane", 0), *row[1:]] for row, s in zip(rows, steps, strict=True)]
    stdout.print(table("\nwhat each step adds to a run", columns, rows, right=range(len(columns) - 2)))


def _rate(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _trace(engine: Any, feeds: dict[str, Any]) -> None:
    from optdnn.runtime.bench import cuda_context, plan_feeds
    from optdnn.runtime.cuda import nvtx

    made = engine.context()
    context = cuda_context(made, feeds)
    if context is None:
        raise UsageError("--trace is for engines of target cuda")
    if not nvtx.available():
        stderr.print("neither the nvtx package nor CuPy is installed: the kernels run without ranges")
    context.trace(plan_feeds(made, feeds))


def _rates(report: dict[str, Any]) -> tuple[str, str]:
    return f"{report['throughput_per_s']:.1f}", str(report["iterations"])


def _facts(steps: list[dict[str, Any]]) -> str:
    """What ran, equal steps told once."""
    counts = Counter(", ".join(f"{k} {v}" for k, v in step.items()) for step in steps)
    return "; ".join(text + (f" ({n} steps)" if n > 1 else "") for text, n in counts.items())


def _names(src: list[str]) -> str:
    return ", ".join(src[:3]) + (f" and {len(src) - 3} more" if len(src) > 3 else "")
