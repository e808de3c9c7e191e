"""``optdnn bench``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from optdnn.cli.arrays import feeds_of, on_random
from optdnn.cli.bench_tables import show_energy, show_gpu, show_layers, show_steps
from optdnn.cli.common import (
    command_line,
    give_json,
    now,
    progress,
    reading_record,
    stdout,
    table,
    warn,
    write_text,
)
from optdnn.cli.options import (
    WRITTEN,
    Command,
    Integer,
    Number,
    config_option,
    engine_argument,
    input_option,
    json_option,
    option,
    size_option,
)
from optdnn.cli.words import precision_text
from optdnn.errors import UsageError
from optdnn.report.words import counted

MEASURING, DETAIL = "Measuring", "Detail"


@click.command("bench", cls=Command)
@engine_argument
@input_option
@size_option
@option(
    "--warmup",
    type=Integer(min=0),
    default=10,
    show_default=True,
    group=MEASURING,
    help="Runs that are not counted.",
)
@option(
    "--duration",
    type=Number(min=0, min_open=True),
    metavar="S",
    group=MEASURING,
    help="Seconds to measure.  [default: 3]",
)
@option("--iterations", type=Integer(min=1), metavar="N", group=MEASURING,
        help="Runs to measure (of each stream), instead of a duration.")  # fmt: skip
@option("--percentile", "percentiles", type=Number(0, 100), multiple=True, metavar="P", group=MEASURING,
        help="Also this percentile of the latencies: --percentile 99.9. Repeat.")  # fmt: skip
@option("--threads", type=Integer(min=1), group=MEASURING,
        help="Threads of each instance.  [default: the build's; with --instances, the cores shared out]")  # fmt: skip
@option("--streams", type=Integer(1, 256), default=1, show_default=True, group=MEASURING,
        help="Threads that call each instance concurrently (not on GPUs).")  # fmt: skip
@option("--instances", type=Integer(1, 256), default=1, show_default=True, group=MEASURING,
        help="Copies of the engine that run concurrently, each with its own threads (not on GPUs).")  # fmt: skip
@option("--profile", is_flag=True, group=DETAIL, help="Also time each step, and each layer of a CPU library.")
@option("--html", type=WRITTEN, group=DETAIL, metavar="FILE",
        help="Write a report with the network, timed step by step, as one HTML file.")  # fmt: skip
@option("--energy", "energy", is_flag=True, group=DETAIL,
        help="Also the energy of an inference: by NVML on GPUs, by RAPL where it can be read.")  # fmt: skip
@option("--flush-l2", is_flag=True, gpu=True, group=DETAIL, help="Empty its L2 before each run.")
@option("--trace", is_flag=True, gpu=True, group=DETAIL,
        help="Run once, a kernel at a time in NVTX ranges, for nsys and ncu.")  # fmt: skip
@json_option
@config_option
def command(
    engine: Path,
    inputs: tuple[str, ...],
    sizes: tuple[str, ...],
    trace: bool,
    json_file: Path | None,
    instances: int,
    threads: int | None,
    html: Path | None,
    **measuring: Any,
) -> None:
    """Measure the latency and throughput of ENGINE, NumPy arrays in and out, one call at a time or (--streams) several.

    Random inputs have the sizes of the profile's optimum, else the sizes of the build's measurements. On a GPU, this shows four
    times: the GPU's for an inference with all arrays there, the host's to enqueue one, the copies, and an inference with copies.
    """
    import optdnn
    from optdnn.report import check_outputs

    check_outputs({"html": html})
    threads = _threads_each(threads, instances)
    loaded = [optdnn.load(engine, threads=threads) for _ in range(instances)]
    feeds, made = feeds_of(loaded[0], inputs, sizes)
    if trace:
        _trace(loaded[0], feeds)
        return
    measuring["profile"] |= html is not None
    with on_random(made):
        report = measured(loaded, feeds, engine.name, **measuring)
    if html is not None:
        _write_html(html, engine, loaded[0].program_for(feeds), report)
    if not give_json(report, json_file):
        show(report)
        if "energy" in report:
            show_energy(report["energy"])


def _write_html(html: Path, engine: Path, program: Any, report: Mapping[str, Any]) -> None:
    from optdnn.report.drawing import draw
    from optdnn.report.html import bench_html
    from optdnn.runtime.engine import saved_report

    build = {**program.meta, **saved_report(engine)}
    told = {**report, "build": build, "command": command_line(click.get_current_context()), "time": now()}
    with reading_record(engine):
        write_text(html, bench_html(told, draw(program, told, measured=report), engine.name))


def measured(
    engines: Sequence[Any],
    feeds: Mapping[str, Any],
    name: str,
    *,
    profile: bool = False,
    energy: bool = False,
    **bounds: Any,
) -> Any:
    """The report of :func:`optdnn.runtime.measuring.bench.bench`, with the precision in words."""
    from optdnn.runtime.measuring.bench import bench

    with progress(f"bench {name}"):
        report = bench(engines[0], feeds, further=engines[1:], with_profile=profile, with_energy=energy, **bounds)
    with reading_record(Path(name)):
        return {**report, "precision_text": precision_text(engines[0].precision, engines[0].meta)}


def _threads_each(threads: int | None, instances: int) -> int | None:
    """Several instances share the cores, unless a number of threads is requested."""
    if threads is not None or instances == 1:
        return threads
    from optdnn.runtime.measuring.machine import usable_cores

    return max(1, usable_cores() // instances)


def show(report: Mapping[str, Any]) -> None:
    """The report as text."""
    if "ranks" in report:
        ranks = report["ranks"]
        stdout.print(
            f"{ranks['devices']} GPUs: {ranks['gpu_ms']['median']:.4f} ms a run on the GPUs (median), one after another"
        )
    if "gpu" in report:
        show_gpu(report)
        return
    latency, parallel = report["latency_ms"], report["concurrency"]
    cells = [*(f"{v:.3f}" for v in latency.values()), f"{report['throughput_per_s']:.1f}", report["iterations"]]
    columns = [*latency, "calls/s", "calls"]
    stdout.print(table(None, columns, [cells], right=range(len(columns))))
    stdout.print(f"milliseconds a call; inputs {_shapes(report['inputs'])}{_sizes(report['sizes'])}")
    if parallel["instances"] * parallel["streams"] > 1:
        instances, streams = counted(parallel["instances"], "instance"), counted(parallel["streams"], "stream")
        stdout.print(f"at once: {instances} with {streams} each")
    stdout.print(f"target {report['target']}, precision {report['precision_text']}; {_facts(report['facts'])}")
    if "profile" in report:
        show_steps(report["profile"])
    if "layers" in report:
        show_layers(report["layers"])
    if not report["stable"]:
        warn(
            "the machine was too unstable to trust these figures, or too few runs were taken: a longer --duration helps"
        )


def _shapes(inputs: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in inputs.items())


def _sizes(sizes: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{n}={size}' for n, size in sizes.items())})" if sizes else ""


def _facts(steps: Sequence[Mapping[str, Any]]) -> str:
    """The facts of the steps, equal steps counted."""
    counts = Counter(", ".join(f"{k} {_value(v)}" for k, v in step.items()) for step in steps)
    return "; ".join(text + (f" ({n} steps)" if n > 1 else "") for text, n in counts.items())


def _value(value: object) -> str:
    return ", ".join(f"{n} in {k}" for k, n in value.items()) if isinstance(value, Mapping) else str(value)


def _trace(engine: Any, feeds: Mapping[str, Any]) -> None:
    from optdnn.runtime.cuda.launches import nvtx
    from optdnn.runtime.measuring.bench import cuda_context

    made = engine.context()
    context = cuda_context(made, feeds)
    if context is None:
        raise UsageError("--trace is for engines of target cuda")
    if not nvtx.available():
        warn("neither the nvtx package nor CuPy is installed: the kernels run without ranges")
    context.trace(made.innermost(feeds)[1])
