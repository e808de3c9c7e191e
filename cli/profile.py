"""``optdnn profile``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from optdnn.cli.arrays import feeds_of
from optdnn.cli.bench_tables import show_gpu_steps, show_steps
from optdnn.cli.common import give_json, progress, remark, stdout, table
from optdnn.cli.options import Command, engine_argument, input_option, json_option, option, output_option, size_option
from optdnn.errors import UsageError, did_you_mean, printable_json
from optdnn.report.words import figure, first_of
from optdnn.runtime.cuda.measuring import nsight
from optdnn.runtime.program import Program

TRACE = "trace"


@click.command("profile", cls=Command)
@engine_argument
@input_option
@size_option
@option("--tool", type=click.Choice([nsight.NSYS, nsight.NCU, TRACE]),
        help="Nsight Systems, Nsight Compute, or a Chrome trace of optdnn's own times.  "
             "[default: ncu with --step; else nsys where it is installed; else trace]")  # fmt: skip
@option("--step", "wanted", multiple=True, gpu=True, metavar="STEP",
        help="Count only this step: its number or an ONNX node; * matches anything. Repeat.")  # fmt: skip
@output_option("The report.  [default: ENGINE's name with .trace.json, .nsys-rep or .ncu-rep, here]")
@json_option
def command(
    engine: Path,
    inputs: tuple[str, ...],
    sizes: tuple[str, ...],
    tool: str | None,
    wanted: tuple[str, ...],
    output: Path | None,
    json_file: Path | None,
) -> None:
    """Show where the time of a run of ENGINE goes.

    On a GPU, Nsight Systems records a run with the ONNX nodes as NVTX ranges, and Nsight Compute shows what limits each step:
    throughput of memory, tensor pipes, occupancy, hits in L2, what warps wait for, and the roofline. The trace needs
    neither. It holds the measured time of each step, on every target, for https://ui.perfetto.dev.
    """
    import optdnn
    from optdnn.runtime.measuring.bench import cuda_context

    if wanted and tool not in (None, nsight.NCU):
        raise UsageError(f"--step works only with ncu, not with {tool}", hint="--tool ncu, or leave --step out")
    loaded = optdnn.load(engine)
    feeds, _ = feeds_of(loaded, inputs, sizes)
    context = loaded.context()
    on_gpu = cuda_context(context, feeds)
    chosen = tool or default_tool(bool(wanted), on_gpu is not None)
    found: dict[str, Any] = {}
    report = output or Path(engine.stem + nsight.SUFFIX.get(chosen, ".trace.json"))
    if chosen == TRACE:
        found = _traced(loaded, feeds, context, engine.name, report)
    else:
        suffix = nsight.SUFFIX[chosen]
        if on_gpu is None:
            raise UsageError(
                f"{chosen} profiles engines of target cuda; this one is for {loaded.target}", hint="take --tool trace"
            )
        if report.suffix != suffix:
            raise UsageError(f"{chosen} writes files whose names end in {suffix}, not {report}")
        again = [*_options("--input", inputs), *_options("--size", sizes)]
        traced = [sys.executable, "-m", "optdnn", "bench", str(engine), "--trace", *again]
        with progress(f"{chosen} {engine.name}"):
            if chosen == nsight.NSYS:
                nsight.record_run(traced, report)
            else:
                found = _counted(on_gpu, context.innermost(feeds)[1], wanted, traced, report)
    found = {"tool": chosen, "report": str(report), **found}
    if not give_json(found, json_file):
        show(found)
    remark(f"written: {report}")


def default_tool(with_steps: bool, on_gpu: bool) -> str:
    """The tool to use if ``--tool`` is not given."""
    if with_steps:
        return nsight.NCU
    return nsight.NSYS if on_gpu and nsight.find(nsight.NSYS) else TRACE


def _options(name: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (name, value)]


def _traced(engine: Any, feeds: Mapping[str, Any], context: Any, name: str, file: Path) -> dict[str, Any]:
    """Measure the steps of a run and write the trace of them."""
    from optdnn.runtime.file.atomic import check_writable, write_atomic
    from optdnn.runtime.measuring.bench import steps_of
    from optdnn.runtime.measuring.chrome_trace import chrome_trace

    check_writable(file)
    with progress(f"profile {name}"):
        found = steps_of(engine, feeds, context)
    trace = chrome_trace(name, found["profile"], found.get("layers", ()))
    write_atomic(file, [printable_json(json.dumps(trace, ensure_ascii=False)).encode()])
    return {"profile": found["profile"], "on_gpu": "cliffs" in found}


def _counted(
    context: Any, feeds: Mapping[str, Any], wanted: Sequence[str], traced: Sequence[str], report: Path
) -> dict[str, Any]:
    """The counters of the steps' kernels, with the measured time and roofline of each step."""
    from optdnn.runtime.cuda.measuring.measure import profile_gpu

    nsight.needed(nsight.NCU)
    steps = steps_named(context.program, wanted)
    measured = {s.step: s.to_plain() for s in profile_gpu(context, feeds)}
    rows = []
    for c in nsight.count(traced, steps, report):
        own = {} if c.step is None else measured.get(c.step, {})
        rows.append(
            {**c.to_plain(), **{k: own.get(k) for k in ("src", "tactic", "roofline")}, "added_us": own.get("us")}
        )
    return {"kernels": rows}


def steps_named(program: Program, wanted: Sequence[str]) -> list[int]:
    """The numbers of the steps that ``--step`` names; empty without ``--step``. Raises UsageError."""
    found: list[int] = []
    for text in wanted:
        if text.isascii() and text.isdigit() and int(text) < len(program.steps):
            found.append(int(text))
            continue
        exact = [k for k, s in enumerate(program.steps) if text in s.src]
        fitting = exact or [k for k, s in enumerate(program.steps) if any(fnmatchcase(n, text) for n in s.src)]
        if not fitting:
            meant = did_you_mean(text.strip("*"), dict.fromkeys(n for s in program.steps for n in s.src), 3)
            raise UsageError(
                f"no step of the engine is {text!r}" + (f"; {meant}" if meant else ""),
                hint=f"steps have numbers from 0 to {len(program.steps) - 1} and names of ONNX nodes: optdnn bench --profile",
            )
        found += fitting
    return sorted(set(found))


def show(found: Mapping[str, Any]) -> None:
    """The result as a table."""
    if "kernels" in found:
        show_kernels(found["kernels"])
    elif found.get("on_gpu"):
        show_gpu_steps(found["profile"])
    elif "profile" in found:
        show_steps(found["profile"])


def show_kernels(rows: Sequence[Mapping[str, Any]]) -> None:
    """The counters of ncu, a line for each kernel."""
    cells = [
        [
            "–" if r["step"] is None else r["step"],
            f"{r['us']:.2f}",
            *(figure(r[k], 0) for k in ("dram", "tensor", "occupancy", "l2_hits")),
            f"{r['stall']} {r['stall_share']:.0%}" if r["stall"] else "–",
            figure(r["added_us"], 2),
            "–" if r["roofline"] is None else f"{r['roofline']:.0%}",
            r["tactic"] or r["kernel"],
            first_of(r["src"] or [r["kernel"]], 2),
        ]
        for r in rows
    ]
    columns = ["step", "µs alone", "DRAM %", "tensor %", "occupancy %", "L2 hits %", "warps wait for", "µs added",
               "of roofline", "tactic", "ONNX nodes"]  # fmt: skip
    stdout.print(table(None, columns, cells, right=(*range(6), 7, 8)))
