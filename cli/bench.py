"""``optdnn bench``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from optdnn.cli.arrays import read_inputs, typed
from optdnn.cli.common import parse_sizes, print_json, progress, stderr, stdout, table


@click.command("bench")
@click.argument("engine", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--warmup", type=click.IntRange(min=0), default=10, show_default=True, help="Runs that are not counted.")
@click.option("--duration", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds to measure (3).")
@click.option("--iterations", type=click.IntRange(min=1), metavar="N", help="Runs to measure, instead of a duration.")
@click.option("--input", "inputs", multiple=True, metavar="[NAME=]FILE", help="As for run; random where not given.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="Size of a symbolic dimension (1).")
@click.option("--threads", type=click.IntRange(min=1), help="Override the build's number of threads.")
@click.option("--profile", is_flag=True, help="Also time each step.")
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
    as_json: bool,
) -> None:
    """Measure the latency and throughput of ENGINE, NumPy arrays in and out, one call at a time."""
    import optdnn
    from optdnn.runtime.bench import bench
    from optdnn.runtime.feeds import random_feeds

    loaded = optdnn.load(engine, threads=threads)
    feeds = typed(read_inputs(inputs), loaded.inputs)
    missing = [s for s in loaded.inputs if s.name not in feeds]
    if missing:
        stderr.print(f"random inputs: {', '.join(map(str, missing))}")
        feeds = {**random_feeds(missing, sizes=parse_sizes(sizes), profiles=loaded.profiles), **feeds}
    with progress(f"bench {engine.name}"):
        report = bench(loaded, feeds, warmup=warmup, duration=duration, iterations=iterations, with_profile=profile)
    if as_json:
        print_json(report)
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


def _rates(report: dict[str, Any]) -> tuple[str, str]:
    return f"{report['throughput_per_s']:.1f}", str(report["iterations"])


def _facts(steps: list[dict[str, Any]]) -> str:
    """What ran, equal steps told once."""
    counts = Counter(", ".join(f"{k} {v}" for k, v in step.items()) for step in steps)
    return "; ".join(text + (f" ({n} steps)" if n > 1 else "") for text, n in counts.items())


def _names(src: list[str]) -> str:
    return ", ".join(src[:3]) + (f" and {len(src) - 3} more" if len(src) > 3 else "")
