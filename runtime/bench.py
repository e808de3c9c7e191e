"""Measuring: latencies of one engine, their statistics, and whether they can be trusted."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> LatencyStats:
        """Statistics of these latencies, in the order they were taken. Raises UsageError for none."""
        if not len(nanoseconds):
            raise UsageError("there are no latencies to summarize")
        ms = np.asarray(nanoseconds, np.float64) / 1e6
        median, p90, p95, p99 = (float(v) for v in np.percentile(ms, [50, 90, 95, 99]))
        spread = None
        if len(ms) >= 2 * SEGMENTS:
            medians = sorted(float(np.median(part)) for part in np.array_split(ms, SEGMENTS))
            spread = (medians[-1] - medians[0]) / max(medians[SEGMENTS // 2], 1e-9)
        mean = float(ms.mean())
        return cls(
            float(ms.min()), mean, median, p90, p95, p99, float(ms.max()), 1e3 / max(mean, 1e-9), len(ms), spread
        )

    @property
    def stable(self) -> bool:
        """False where the spread is beyond UNSTABLE or cannot be told."""
        return self.spread is not None and self.spread <= UNSTABLE

    def to_plain(self) -> dict[str, Plain]:
        """The contract's ``latency_ms``: min, mean, median, p90, p95, p99, max."""
        return {k: v for k, v in asdict(self).items() if k not in ("throughput_per_s", "n", "spread")}


def measure(
    fn: Callable[[], object],
    *,
    warmup: int = 10,
    duration: float | None = None,
    iterations: int | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> LatencyStats:
    """Call ``fn`` ``warmup`` times, then time it ``iterations`` times or for ``duration`` seconds (3 by default)."""
    return LatencyStats.of(sample(fn, warmup=warmup, duration=duration, iterations=iterations, clock=clock))


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
) -> dict[str, Plain]:
    """Measure an engine in its own context, NumPy arrays in and fresh ones out; the report of ``optdnn bench --json``.

    Keys: target, precision, latency_ms, throughput_per_s, iterations, warmup, stable, spread, inputs (the shapes used),
    facts (what each step really runs), machine, versions, and with ``with_profile`` also profile. On a GPU also gpu: the
    times there (:func:`optdnn.runtime.cuda.measure.gpu_report`), with L2 flushed before each run if ``flush_l2``.
    """
    context = engine.context()
    on_gpu = cuda_context(context, feeds)
    own = plan_feeds(context, feeds)
    if flush_l2 and on_gpu is None:
        raise UsageError("there is no L2 of a GPU to flush", hint="this is for engines of target cuda")
    context.run(feeds)
    settle()
    stats = measure(lambda: context.run(feeds), warmup=warmup, duration=duration, iterations=iterations)
    report: dict[str, Plain] = {
        "target": engine.target,
        "precision": engine.precision,
        "latency_ms": stats.to_plain(),
        "throughput_per_s": stats.throughput_per_s,
        "iterations": stats.n,
        "warmup": warmup,
        "stable": stats.stable,
        "spread": stats.spread,
        "inputs": {name: list(np.shape(a)) for name, a in feeds.items()},
        "facts": [dict(f) for f in engine.facts],
        "machine": machine(),
        "versions": versions(),
    }
    if on_gpu is not None:
        from optdnn.runtime.cuda.measure import gpu_report, profile_gpu

        report["gpu"] = gpu_report(
            on_gpu, own, warmup=warmup, duration=duration, iterations=iterations, flush_l2=flush_l2
        )
        if with_profile:
            report["profile"] = [s.to_plain() for s in profile_gpu(on_gpu, own)]
    elif with_profile:
        report["profile"] = [asdict(p) | {"src": list(p.src)} for p in profile(engine, feeds)]
    return report


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
