"""Decoding with caches in place: milliseconds per call, tokens and operations per second, and the share of memory's bandwidth.

    python -m benchmarks decode --groups decoders --out decode.jsonl
    python -m benchmarks decode decoders/llama_8b:1,16,64:layers=4:bits=4 --out decode.jsonl
    python -m benchmarks decode decoders/llama_8b:1:layers=4:tokens=2048 --out prefill.jsonl
    python -m benchmarks decode decoders/llama_8b:1:layers=4 --torch --out beside.jsonl

Each run decodes the token at the same position, or reads a prompt of ``tokens`` tokens. It is a bound call with caches as state,
replayed between two events. Engines take the cost model's tactics (``--tune S``: measured ones). ``--torch`` also measures PyTorch
as in gpt-fast, compiled and in a CUDA graph.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import optdnn
from benchmarks import decoders
from benchmarks.harness import Job, Kind, tune_argument, tuned_for, tuning, turn
from benchmarks.products import BANDWIDTH
from benchmarks.rows import Row
from benchmarks.workloads import Workload

RUNS, ROUNDS = 50, 9
WRONG = 0.1
"""Largest error of logits relative to PyTorch's largest one; larger ones are wrong (fp16 and bf16 differ by 0.02)."""


def arguments(parser: argparse.ArgumentParser) -> None:
    tune_argument(parser)
    parser.add_argument("--torch", action="store_true", help="PyTorch beside it, where one token is decoded")


def setups(options: argparse.Namespace, workload: Workload) -> list[str]:
    beside = " beside PyTorch" if options.torch else ""
    return [f"{options.target}{tuned_for(options.tune)}{beside}"]


def prepare(job: Job) -> Row:
    """The engine."""
    how: dict[str, Any] = {"target": job.options.target, "precision": "fp16", "io_dtype": "fp16"}
    engine = optdnn.build(decoders.model(job.workload), **how, **tuning(job.options.tune))
    engine.save(job.folder / "engine")
    return {"launches": len(engine.program.steps), "arena_bytes": engine.program.arena_bytes}


def measure(job: Job) -> Row:
    """The time of a call, the median of several rounds in which the candidates take turns."""
    import cupy

    workload, d = job.workload, decoders.Decoder.of(job.workload)
    context: Any = optdnn.load(job.folder / "engine").context()
    given = decoders.feeds(workload, 1)
    bound = context.bind({n: cupy.asarray(a) for n, a in given.items()}, state=decoders.states(workload))
    stream = cupy.cuda.Stream(non_blocking=True)
    bound.run(stream)
    stream.synchronize()
    logits = bound.outputs["logits"]
    calls, checks = {"ours": partial(bound.run, stream)}, {"ours": {"finite": bool(cupy.isfinite(logits).all())}}
    if job.options.torch:
        calls["torch"], checks["torch"] = _beside(job, given, stream, logits)
    turn()
    times: dict[str, Row] = {name: {"rounds_ms": []} for name in calls}
    for _ in range(1 + ROUNDS):
        for name, call in calls.items():
            times[name]["rounds_ms"].append(_once(call, stream))
    for row in times.values():
        row["rounds_ms"] = row["rounds_ms"][1:]
        row["ms"] = statistics.median(row["rounds_ms"])
    ms = times["ours"]["ms"]
    share = {n: round(d.nbytes / BANDWIDTH / (t["ms"] * 1e-3), 4) for n, t in times.items()}
    rates = {"tokens_per_s": round(d.batch * d.tokens / ms * 1e3, 1), "tflop_per_s": round(d.flops / ms / 1e9, 1)}
    figures = {**rates, "bytes": d.nbytes, "flops": d.flops, **job.prepared}
    right = checks["ours"]["finite"] and checks.get("torch", {}).get("error_rel", 0.0) < WRONG
    return {
        "times": times, "checks": checks, **figures, "of_bandwidth": share, "verdict": "right" if right else "wrong",
    }  # fmt: skip


def _once(call: Callable[[], object], stream: Any) -> float:
    """Milliseconds of a call."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record(stream)
    for _ in range(RUNS):
        call()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / RUNS


def _beside(job: Job, given: dict[str, Any], stream: Any, logits: Any) -> tuple[Callable[[], object], Row]:
    """PyTorch's call, and the difference of its logits from ours, relative to the largest one."""
    import torch

    from benchmarks import race, torch_decoder

    race.begin()
    outside = torch.cuda.ExternalStream(stream.ptr)
    run, feeds = torch_decoder.compiled(decoders.Decoder.of(job.workload), decoders.model(job.workload), given)
    replay, outputs = race.captured(run, feeds, outside)
    error = race.errors(outputs(), [torch.from_dlpack(logits)])

    def call() -> None:
        with torch.cuda.stream(outside):
            replay()

    return call, {"error_rel": error}


def shown(row: Row) -> str:
    """Time, rate and share."""
    ms, share = row["times"]["ours"]["ms"], row["of_bandwidth"]["ours"]
    rates = f"{row['tokens_per_s']:g} tokens/s, {row['tflop_per_s']:g} TFLOP/s"
    torch = row["times"].get("torch")
    beside = "" if torch is None else f"; PyTorch {torch['ms']:.4f} ms"
    return f"{ms:.4f} ms, {rates}, {share:.0%} of bandwidth, {row['launches']} steps{beside}"


KIND = Kind(
    name="decode", about=__doc__ or "", measure=measure, prepare=prepare, arguments=arguments, groups=("decoders",), setups=setups,
    timed=True, shown=shown,
)  # fmt: skip
