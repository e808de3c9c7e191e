"""Decoding with caches in place: milliseconds a call, tokens and operations a second, and the share that memory takes.

    python -m benchmarks decode --groups decoders --out decode.jsonl
    python -m benchmarks decode decoders/llama_8b:1,16,64:layers=4:bits=4 --out decode.jsonl
    python -m benchmarks decode decoders/llama_8b:1:layers=4:tokens=2048 --out prefill.jsonl

Each run decodes the token at the same position, or reads a prompt of so many ``tokens``: a bound call, whose caches are state,
replayed between two events. Engines take the cost model's tactics (``--tune S``: measured ones).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import optdnn
from benchmarks import decoders
from benchmarks.harness import Job, Kind, turn
from benchmarks.products import BANDWIDTH
from benchmarks.rows import Row
from benchmarks.workloads import Workload

RUNS, ROUNDS = 50, 9


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tune", type=float, default=0.0, metavar="S", help="tune each engine for so many seconds (not)"
    )


def setups(options: argparse.Namespace, workload: Workload) -> list[str]:
    return [f"{options.target}{f' tuned {options.tune:g} s' if options.tune else ''}"]


def prepare(job: Job) -> Row:
    """The engine."""
    tuned: dict[str, Any] = (
        {"tactics": "auto", "budget": job.options.tune} if job.options.tune else {"tactics": "heuristic"}
    )
    how = {"target": job.options.target, "precision": "fp16", "io_dtype": "fp16", **tuned}
    engine = optdnn.build(decoders.model(job.workload), **how)
    engine.save(job.folder / "engine")
    return {"launches": len(engine.program.steps), "arena_bytes": engine.program.arena_bytes}


def measure(job: Job) -> Row:
    """The time of a call, the median of several rounds."""
    import cupy

    workload = job.workload
    context: Any = optdnn.load(job.folder / "engine").context()
    feeds = {n: cupy.asarray(a) for n, a in decoders.feeds(workload, 1).items()}
    bound = context.bind(feeds, state=decoders.states(workload))
    stream = cupy.cuda.Stream(non_blocking=True)
    events = [cupy.cuda.Event() for _ in range(2)]

    def once() -> float:
        events[0].record(stream)
        for _ in range(RUNS):
            bound.run(stream)
        events[1].record(stream)
        events[1].synchronize()
        return float(cupy.cuda.get_elapsed_time(*events)) / RUNS

    bound.run(stream)
    stream.synchronize()
    turn()
    once()
    rounds = [once() for _ in range(ROUNDS)]
    ms, d = statistics.median(rounds), decoders.Decoder.of(workload)
    share = {"ours": round(d.nbytes / BANDWIDTH / (ms * 1e-3), 4)}
    finite = bool(cupy.isfinite(bound.outputs["logits"]).all())
    times = {"ours": {"ms": ms, "rounds_ms": rounds}}
    rates = {"tokens_per_s": round(d.batch * d.tokens / ms * 1e3, 1), "tflop_per_s": round(d.flops / ms / 1e9, 1)}
    figures = {**rates, "bytes": d.nbytes, "flops": d.flops, **job.prepared}
    return {"times": times, **figures, "of_bandwidth": share, "verdict": "right" if finite else "wrong"}


def shown(row: Row) -> str:
    """Time, rate and share."""
    ms, share = row["times"]["ours"]["ms"], row["of_bandwidth"]["ours"]
    rates = f"{row['tokens_per_s']:g} tokens/s, {row['tflop_per_s']:g} TFLOP/s"
    return f"{ms:.4f} ms, {rates}, {share:.0%} of bandwidth, {row['launches']} steps"


KIND = Kind(
    name="decode", about=__doc__ or "", measure=measure, prepare=prepare, arguments=arguments, groups=("decoders",), setups=setups,
    timed=True, shown=shown,
)  # fmt: skip
