"""Measures an engine: consecutive or concurrent calls, its steps, and the report of ``optdnn bench``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optdnn.errors import UsageError
from optdnn.runtime.contexts.base import BaseContext
from optdnn.runtime.cpu.huge_pages import settle
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.energy import counters, energy
from optdnn.runtime.measuring.latency import LatencyStats, RunLimits, measure, quiet, sample, timed_calls
from optdnn.runtime.measuring.machine import machine, versions
from optdnn.runtime.program import Plain
from optdnn.runtime.ranks.runner import RanksContext

if TYPE_CHECKING:
    from optdnn.runtime.cuda.runner import CudaContext


def concurrent(
    engines: Sequence[Engine],
    feeds: Mapping[str, Any],
    streams: int,
    *,
    percentiles: Sequence[float] = (),
    **limits: Any,
) -> LatencyStats:
    """Latencies and throughput of ``streams`` threads on each engine, each with its own context, all concurrent.

    ``limits`` are the fields of :class:`RunLimits`, for each thread. ``throughput_per_s`` counts the calls of all threads, from the
    start of the first call to the end of the last. Raises UsageError if there is nothing to run, and the error of a call.
    """
    if streams < 1 or not engines:
        raise UsageError(f"{streams} streams on {len(engines)} engines cannot be measured")
    runs = RunLimits(**limits)
    callers = [engine for engine in engines for _ in range(streams)]
    barrier = threading.Barrier(len(callers))

    def call(engine: Engine) -> list[tuple[int, int]]:
        try:
            context = engine.context()
            for _ in range(max(1, runs.warmup)):
                context.run(feeds)
            barrier.wait()
            return list(zip(*timed_calls(lambda: context.run(feeds), runs, time.perf_counter_ns), strict=True))
        except BaseException:
            barrier.abort()  # the others wait there
            raise

    with quiet(), ThreadPoolExecutor(len(callers)) as pool:
        futures = [pool.submit(call, engine) for engine in callers]
    errors = [error for f in futures if (error := f.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    calls = sorted(pair for f in futures for pair in f.result())
    wall = max(start + took for start, took in calls) - calls[0][0]
    return LatencyStats.of([took for _, took in calls], percentiles, wall_ns=wall)


@dataclass(frozen=True)
class StepProfile:
    """One step's share of a run: median time in milliseconds and fraction of the sum over steps."""

    step: int
    executor: str
    src: tuple[str, ...]
    median_ms: float
    share: float


def profile(engine: Engine, feeds: Mapping[str, Any], *, warmup: int = 3, iterations: int = 20) -> list[StepProfile]:
    """Median time of every step of the program, in program order."""
    context = engine.context()
    for _ in range(warmup):
        context.run(feeds)
    with quiet():
        times = np.array([context.profile(feeds)[1] for _ in range(max(1, iterations))], np.float64) / 1e6
    medians = np.median(times, axis=0)
    total = max(float(medians.sum()), 1e-12)
    return [
        StepProfile(k, s.executor, s.src, float(m), float(m) / total)
        for k, (s, m) in enumerate(zip(engine.program_for(feeds).steps, medians, strict=True))
    ]


def bench(
    engine: Engine,
    feeds: Mapping[str, Any],
    *,
    with_profile: bool = False,
    flush_l2: bool = False,
    with_energy: bool = False,
    percentiles: Sequence[float] = (),
    streams: int = 1,
    further: Sequence[Engine] = (),
    **limits: Any,
) -> dict[str, Plain]:
    """Measure an engine in its own context, with NumPy arrays in and new arrays out; the report of ``optdnn bench --json``.

    ``limits`` are the fields of :class:`RunLimits`; ``percentiles`` (0 to 100) are added to latency_ms. With ``streams`` threads,
    or ``further`` engines of the same network, calls are concurrent (:func:`concurrent`).
    Keys: target, precision, latency_ms, distribution (quantiles for a chart), throughput_per_s, iterations, warmup, stable,
    spread, concurrency, inputs (the shapes used), sizes (of symbolic dimensions), facts (the real executor of each step), machine,
    versions; with ``with_profile`` also profile (steps) and, on the target cpu, layers; ``with_energy`` adds energy
    (:func:`optdnn.runtime.measuring.energy.energy`).
    On a GPU also gpu: the times there (:func:`optdnn.runtime.cuda.measuring.measure.gpu_report`), with L2 flushed before each run
    if ``flush_l2``.
    Raises UsageError for a request that the target cannot meet.
    """
    runs = RunLimits(**limits)
    context = engine.context()
    on_gpu = cuda_context(context, feeds)
    if flush_l2 and on_gpu is None:
        raise UsageError("there is no L2 of a GPU to flush", hint="this is for engines of target cuda")
    read = counters(gpu=on_gpu is not None) if with_energy else []
    several = streams > 1 or bool(further)
    if several and on_gpu is not None:
        raise UsageError("--streams and --instances measure engines for a CPU", hint="on a GPU, raise the batch")
    outputs = context.run(feeds)
    settle()
    engines, own_limits = [engine, *further], asdict(runs)
    if several:
        stats = concurrent(engines, feeds, streams, percentiles=percentiles, **own_limits)
    else:
        stats = measure(lambda: context.run(feeds), percentiles=percentiles, **own_limits)
    report = _facts_of(engine, feeds, outputs, stats) | {
        "warmup": runs.warmup,
        "concurrency": {"instances": len(engines), "streams": streams},
    }
    if on_gpu is not None:
        from optdnn.runtime.cuda.measuring.measure import gpu_report

        own = context.innermost(feeds)[1]
        report["gpu"] = gpu_report(on_gpu, own, runs, flush_l2=flush_l2)
    if with_profile:
        report |= steps_of(engine, feeds, context)
    if with_energy:
        report["energy"] = energy(_runs_for(context, on_gpu, feeds), read)
    if isinstance(context, RanksContext) and context.on_gpu:
        times = sorted(context.gpu_times(feeds))
        report["ranks"] = {"devices": context.world, "gpu_ms": {"min": times[0], "median": times[len(times) // 2]}}
    return report


def _runs_for(context: BaseContext, on_gpu: CudaContext | None, feeds: Mapping[str, Any]) -> Callable[[float], int]:
    """A function that runs for some seconds, on a GPU with the arrays there, and returns the number of runs."""
    if on_gpu is None:
        return lambda seconds: len(sample(lambda: context.run(feeds), warmup=1, duration=seconds))
    from optdnn.runtime.cuda.measuring.measure import sampler_of

    sampler = sampler_of(on_gpu, context.innermost(feeds)[1])
    return lambda seconds: len(sampler(seconds, None, 1))


def _facts_of(
    engine: Engine, feeds: Mapping[str, Any], outputs: Mapping[str, Any], stats: LatencyStats
) -> dict[str, Plain]:
    """The facts in the report of every engine."""
    return {
        "target": engine.target,
        "precision": engine.precision,
        "latency_ms": stats.to_plain(),
        "distribution": stats.distribution(),
        "throughput_per_s": stats.throughput_per_s,
        "iterations": stats.n,
        "stable": stats.stable,
        "spread": stats.spread,
        "inputs": {name: list(np.shape(a)) for name, a in feeds.items()},
        "outputs": {name: list(a.shape) for name, a in outputs.items()},
        "sizes": sizes_of(engine, feeds),
        "facts": [dict(f) for f in engine.facts],
        "machine": machine(),
        "versions": versions(),
    }


def steps_of(engine: Engine, feeds: Mapping[str, Any], context: BaseContext) -> dict[str, Plain]:
    """The steps of a run: ``profile``, and on a GPU their ``cliffs``, on the target cpu the ``layers`` that its libraries count.

    ``context`` is one of the engine's contexts; on a GPU the steps run in it."""
    on_gpu = cuda_context(context, feeds)
    if on_gpu is not None:
        from optdnn.runtime.cuda.measuring.cliffs import cliffs
        from optdnn.runtime.cuda.measuring.measure import profile_gpu

        rows = [s.to_plain() for s in profile_gpu(on_gpu, context.innermost(feeds)[1])]
        return {"profile": rows, "cliffs": cliffs(rows, on_gpu.program)}
    steps = profile(engine, feeds)
    report: dict[str, Plain] = {"profile": [asdict(p) | {"src": list(p.src)} for p in steps]}
    if engine.target == "cpu":
        from optdnn.runtime.cpu.layers import layer_times

        threads = next((int(str(f["threads"])) for f in engine.facts if "threads" in f), None)
        times = [p.median_ms for p in steps]
        runs = int(min(200, max(10, 1e3 / max(sum(times), 1e-3))))
        layers = layer_times(engine.program, feeds, times, threads or None, runs)
        report["layers"] = [asdict(layer) for layer in layers]
    return report


def sizes_of(engine: Engine, feeds: Mapping[str, Any]) -> dict[str, int]:
    """The size of each symbolic dimension of the inputs."""
    pairs = (p for s in engine.inputs for p in zip(s.shape, np.shape(feeds[s.name]), strict=True))
    return {d: n for d, n in pairs if isinstance(d, str)}


def cuda_context(context: BaseContext, feeds: Mapping[str, Any]) -> CudaContext | None:
    """The context that runs these inputs (of an engine with several plans, the plan's), if it runs on a GPU."""
    inner: Any = context.innermost(feeds)[0]
    # Recognized by its module name, so that no module that only GPUs need is imported.
    return inner if type(inner).__module__.startswith("optdnn.runtime.cuda") else None
