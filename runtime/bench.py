"""Measuring: latencies of one engine, calls one after another or many at once, and whether the figures can be trusted."""

from __future__ import annotations

import gc
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from optdnn.errors import UsageError
from optdnn.runtime.cpu.huge_pages import settle
from optdnn.runtime.engine import Engine
from optdnn.runtime.machine import machine, versions
from optdnn.runtime.program import Plain

if TYPE_CHECKING:
    from optdnn.runtime.cuda.runner import CudaContext

SEGMENTS = 5
"""Parts of a measurement whose medians are compared to judge its stability."""
UNSTABLE = 0.10
"""Largest relative spread of the segments' medians that still counts as stable."""


@dataclass(frozen=True)
class LatencyStats:
    """Latencies in milliseconds; percentiles interpolate linearly. ``throughput_per_s`` is calls per second of run time.
    ``further`` holds percentiles that were asked for besides.

    ``spread`` is (largest - smallest) / middle of the medians of consecutive fifths of the measurement: a machine that
    changes its speed, or is shared, shows there. None where there are too few samples to tell.
    """

    min: float
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float
    throughput_per_s: float
    n: int
    spread: float | None
    further: Mapping[float, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, nanoseconds: Sequence[int], percentiles: Sequence[float] = (), wall_ns: int | None = None
    ) -> LatencyStats:
        """Statistics of these latencies, in the order they were taken. ``wall_ns`` is the time that all of them took together,
        where that is not their sum: of calls that ran at once. Raises UsageError for none."""
        if not len(nanoseconds):
            raise UsageError("there are no latencies to summarize")
        ms = np.asarray(nanoseconds, np.float64) / 1e6
        median, p90, p95, p99 = (float(v) for v in np.percentile(ms, [50, 90, 95, 99]))
        spread = None
        if len(ms) >= 2 * SEGMENTS:
            medians = sorted(float(np.median(part)) for part in np.array_split(ms, SEGMENTS))
            spread = (medians[-1] - medians[0]) / max(medians[SEGMENTS // 2], 1e-9)
        mean = float(ms.mean())
        per_second = 1e3 / max(mean, 1e-9) if wall_ns is None else len(ms) / max(wall_ns * 1e-9, 1e-12)
        further = {p: float(v) for p, v in zip(percentiles, np.percentile(ms, list(percentiles)), strict=True)}
        return cls(float(ms.min()), mean, median, p90, p95, p99, float(ms.max()), per_second, len(ms), spread, further)

    @property
    def stable(self) -> bool:
        """False where the spread is beyond UNSTABLE or cannot be told."""
        return self.spread is not None and self.spread <= UNSTABLE

    def to_plain(self) -> dict[str, Plain]:
        """The contract's ``latency_ms``: min, mean, median, p90, p95, p99, max, then those that were asked for besides."""
        own = {k: v for k, v in asdict(self).items() if k not in ("throughput_per_s", "n", "spread", "further")}
        return own | {f"p{p:g}": v for p, v in self.further.items() if f"p{p:g}" not in own}


def measure(
    fn: Callable[[], object],
    *,
    warmup: int = 10,
    duration: float | None = None,
    iterations: int | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
    percentiles: Sequence[float] = (),
) -> LatencyStats:
    """Call ``fn`` ``warmup`` times, then time it ``iterations`` times or for ``duration`` seconds (3 by default)."""
    taken = sample(fn, warmup=warmup, duration=duration, iterations=iterations, clock=clock)
    return LatencyStats.of(taken, percentiles)


def sample(
    fn: Callable[[], object],
    *,
    warmup: int = 10,
    duration: float | None = None,
    iterations: int | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> array[int]:
    """The latencies of :func:`measure` in nanoseconds. Raises UsageError for contradicting or negative bounds."""
    if duration is not None and iterations is not None:
        raise UsageError("give either a duration or a number of iterations, not both")
    if duration is None and iterations is None:
        duration = 3.0
    if (iterations is not None and iterations < 1) or (duration is not None and duration <= 0) or warmup < 0:
        raise UsageError(f"nothing to measure: warmup {warmup}, iterations {iterations}, duration {duration}")
    taken = array("q")
    for _ in range(warmup):
        fn()
    with quiet():
        end = None if duration is None else clock() + int(duration * 1e9)
        while True:
            start = clock()
            fn()
            stop = clock()
            taken.append(stop - start)
            if stop >= end if end is not None else len(taken) == iterations:
                return taken


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while measuring; a full one before."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class _Caller:
    """One thread's calls: when each began, and how long it took, in nanoseconds."""

    engine: Engine
    starts: array[int] = field(default_factory=lambda: array("q"))
    took: array[int] = field(default_factory=lambda: array("q"))
    error: BaseException | None = None


def concurrent(
    engines: Sequence[Engine],
    feeds: Mapping[str, Any],
    streams: int,
    *,
    warmup: int = 10,
    duration: float | None = None,
    iterations: int | None = None,
    percentiles: Sequence[float] = (),
) -> LatencyStats:
    """Latencies and throughput of ``streams`` threads on each engine, every one with a context of its own and all at once.

    Each thread makes ``iterations`` calls, or calls for ``duration`` seconds (3 by default), after ``warmup`` that do not count.
    ``throughput_per_s`` is the calls of all threads over the time from the first one's begin to the last one's end.
    Raises UsageError where there is nothing to run, and what a call raises.
    """
    if streams < 1 or not engines:
        raise UsageError(f"{streams} streams on {len(engines)} engines cannot be measured")
    callers = [_Caller(engine) for engine in engines for _ in range(streams)]
    barrier = threading.Barrier(len(callers))
    seconds = duration if duration is not None else None if iterations is not None else 3.0
    threads = [threading.Thread(target=_call, args=(c, feeds, barrier, warmup, seconds, iterations)) for c in callers]
    with quiet():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    failed = [c.error for c in callers if c.error is not None and not isinstance(c.error, threading.BrokenBarrierError)]
    if failed:
        raise failed[0]
    calls = sorted((start, took) for c in callers for start, took in zip(c.starts, c.took, strict=True))
    wall = max(start + took for start, took in calls) - calls[0][0]
    return LatencyStats.of([took for _, took in calls], percentiles, wall_ns=wall)


def _call(
    caller: _Caller,
    feeds: Mapping[str, Any],
    barrier: threading.Barrier,
    warmup: int,
    seconds: float | None,
    iterations: int | None,
) -> None:
    clock = time.perf_counter_ns
    try:
        context = caller.engine.context()
        for _ in range(max(1, warmup)):
            context.run(feeds)
        barrier.wait()
        end = None if seconds is None else clock() + int(seconds * 1e9)
        while True:
            start = clock()
            context.run(feeds)
            stop = clock()
            caller.starts.append(start)
            caller.took.append(stop - start)
            if stop >= end if end is not None else len(caller.took) == iterations:
                return
    except BaseException as error:  # raised again by the thread that waits
        caller.error = error
        barrier.abort()


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
    warmup: int = 10,
    duration: float | None = None,
    iterations: int | None = None,
    with_profile: bool = False,
    flush_l2: bool = False,
    percentiles: Sequence[float] = (),
    streams: int = 1,
    further: Sequence[Engine] = (),
) -> dict[str, Plain]:
    """Measure an engine in its own context, NumPy arrays in and fresh ones out; the report of ``optdnn bench --json``.

    Keys: target, precision, latency_ms, throughput_per_s, iterations, warmup, stable, spread, concurrency, inputs (the shapes
    used), sizes (those of symbolic dimensions), facts (what each step really runs), machine, versions, and with ``with_profile``
    also profile (steps) and, on the target cpu, layers. On a GPU also gpu: the times there
    (:func:`optdnn.runtime.cuda.measuring.measure.gpu_report`), with L2 flushed before each run if ``flush_l2``.
    ``percentiles`` (0 to 100) are added to latency_ms. With ``streams`` threads, or ``further`` engines of the same network,
    calls run at once (:func:`concurrent`). Raises UsageError for what the target has not.
    """
    context = engine.context()
    on_gpu = cuda_context(context, feeds)
    if flush_l2 and on_gpu is None:
        raise UsageError("there is no L2 of a GPU to flush", hint="this is for engines of target cuda")
    several = streams > 1 or bool(further)
    if several and on_gpu is not None:
        raise UsageError("--streams and --instances measure engines for a CPU", hint="on a GPU, raise the batch")
    outputs = context.run(feeds)
    settle()
    bounds: dict[str, Any] = {
        "warmup": warmup, "duration": duration, "iterations": iterations, "percentiles": percentiles
    }  # fmt: skip
    engines = [engine, *further]
    stats = concurrent(engines, feeds, streams, **bounds) if several else measure(lambda: context.run(feeds), **bounds)
    report = _facts_of(engine, feeds, outputs, stats) | {
        "warmup": warmup,
        "concurrency": {"instances": len(engines), "streams": streams},
    }
    if on_gpu is not None:
        from optdnn.runtime.cuda.measuring.measure import gpu_report, profile_gpu

        own = plan_feeds(context, feeds)
        report["gpu"] = gpu_report(
            on_gpu, own, warmup=warmup, duration=duration, iterations=iterations, flush_l2=flush_l2
        )
        if with_profile:
            report["profile"] = [s.to_plain() for s in profile_gpu(on_gpu, own)]
    elif with_profile:
        report |= _profiled(engine, feeds)
    return report


def _facts_of(
    engine: Engine, feeds: Mapping[str, Any], outputs: Mapping[str, Any], stats: LatencyStats
) -> dict[str, Plain]:
    """What a report says of every engine."""
    return {
        "target": engine.target,
        "precision": engine.precision,
        "latency_ms": stats.to_plain(),
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


def _profiled(engine: Engine, feeds: Mapping[str, Any]) -> dict[str, Plain]:
    """The steps of a program that runs on the CPU, and what of them its libraries count."""
    steps = profile(engine, feeds)
    found: dict[str, Plain] = {"profile": [asdict(p) | {"src": list(p.src)} for p in steps]}
    if engine.target == "cpu":
        from optdnn.runtime.cpu.layers import layer_times

        threads = next((int(str(f["threads"])) for f in engine.facts if "threads" in f), None)
        times = [p.median_ms for p in steps]
        runs = int(min(200, max(10, 1e3 / max(sum(times), 1e-3))))
        layers = layer_times(engine.program, feeds, times, threads or None, runs)
        found["layers"] = [asdict(layer) for layer in layers]
    return found


def sizes_of(engine: Engine, feeds: Mapping[str, Any]) -> dict[str, int]:
    """The size of each symbolic dimension of the inputs."""
    found: dict[str, int] = {}
    for spec in engine.inputs:
        found |= {d: n for d, n in zip(spec.shape, np.shape(feeds[spec.name]), strict=True) if isinstance(d, str)}
    return found


def plan_feeds(context: object, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the plan for these inputs takes: all but those that are constants in it."""
    feeds_of = getattr(context, "feeds_of", None)
    found: Mapping[str, Any] = feeds if feeds_of is None else feeds_of(feeds)
    return found


def cuda_context(context: object, feeds: Mapping[str, Any]) -> CudaContext | None:
    """The context (or, of an engine for several shapes, its plan's for these inputs), if it runs on a GPU."""
    plan_of = getattr(context, "plan_of", None)
    if plan_of is not None:
        context = plan_of(feeds)
    if not type(context).__module__.startswith("optdnn.runtime.cuda"):
        return None  # without importing what only GPUs need
    from optdnn.runtime.cuda.runner import CudaContext

    return context if isinstance(context, CudaContext) else None
