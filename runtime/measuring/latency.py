"""Latencies of repeated calls: the end of a measurement, its statistics, and whether they are reliable."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from optdnn.errors import UsageError
from optdnn.runtime.program import Plain

SEGMENTS = 5
"""Number of parts of a measurement whose medians are compared to judge its stability."""
UNSTABLE = 0.10
"""Largest relative spread of the segments' medians that still counts as stable."""
SECONDS = 3.0
"""The default duration of a measurement."""
Clock: TypeAlias = Callable[[], int]
"""Returns nanoseconds."""


@dataclass(frozen=True)
class RunLimits:
    """The number of runs of a measurement: ``iterations``, or as many as ``duration`` seconds allow (3 by default).

    ``warmup`` earlier runs do not count. Raises UsageError for contradicting or negative limits.
    """

    warmup: int = 10
    duration: float | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        if self.duration is not None and self.iterations is not None:
            raise UsageError("give either a duration or a number of iterations, not both")
        least = 1 if self.iterations is None else self.iterations
        if least < 1 or self.seconds <= 0 or self.warmup < 0:
            raise UsageError(
                f"nothing to measure: warmup {self.warmup}, iterations {self.iterations}, duration {self.duration}"
            )

    @property
    def seconds(self) -> float:
        """The duration, if it limits the measurement."""
        return SECONDS if self.duration is None else self.duration

    def begin(self, clock: Clock = time.perf_counter_ns) -> Callable[[int], bool]:
        """Start counting. The returned function decides after each run, from the number of runs so far, whether to
        continue."""
        if (most := self.iterations) is not None:
            return lambda done: done < most
        end = clock() + int(self.seconds * 1e9)
        return lambda done: not done or clock() < end


@dataclass(frozen=True)
class LatencyStats:
    """Latencies in milliseconds. Percentiles interpolate linearly. ``throughput_per_s`` is calls per second of run time.
    ``further`` holds additional percentiles.

    ``spread`` is (largest - smallest) / middle of the medians of consecutive fifths of the measurement. It reveals a machine that
    changes its speed, or is shared. None if there are too few samples. ``quantiles_ms`` are the 0 %, 1 %, … 100 % quantiles,
    enough to draw the distribution, and ``part_medians_ms`` the medians of these fifths.
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
    quantiles_ms: tuple[float, ...] = field(default=(), repr=False)
    part_medians_ms: tuple[float, ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls, nanoseconds: Sequence[int], percentiles: Sequence[float] = (), wall_ns: int | None = None
    ) -> LatencyStats:
        """Statistics of these latencies, in the order of measurement. ``wall_ns`` is their total time,
        if it is not their sum (concurrent calls). Raises UsageError if there are none."""
        if not len(nanoseconds):
            raise UsageError("there are no latencies to summarize")
        ms = np.asarray(nanoseconds, np.float64) / 1e6
        median, p90, p95, p99 = (float(v) for v in np.percentile(ms, [50, 90, 95, 99]))
        spread = None
        parts: tuple[float, ...] = ()
        if len(ms) >= 2 * SEGMENTS:
            parts = tuple(float(np.median(part)) for part in np.array_split(ms, SEGMENTS))
            medians = sorted(parts)
            spread = (medians[-1] - medians[0]) / max(medians[SEGMENTS // 2], 1e-9)
        mean = float(ms.mean())
        per_second = 1e3 / max(mean, 1e-9) if wall_ns is None else len(ms) / max(wall_ns * 1e-9, 1e-12)
        further = {p: float(v) for p, v in zip(percentiles, np.percentile(ms, list(percentiles)), strict=True)}
        quantiles = tuple(float(v) for v in np.percentile(ms, range(101)))
        least, most = quantiles[0], quantiles[-1]
        return cls(least, mean, median, p90, p95, p99, most, per_second, len(ms), spread, further, quantiles, parts)

    @property
    def stable(self) -> bool:
        """False if the spread is beyond UNSTABLE or unknown."""
        return self.spread is not None and self.spread <= UNSTABLE

    def to_plain(self) -> dict[str, Plain]:
        """``latency_ms`` of reports: min, mean, median, p90, p95, p99, max, then the additional percentiles."""
        own = {k: getattr(self, k) for k in ("min", "mean", "median", "p90", "p95", "p99", "max")}
        return own | {f"p{p:g}": v for p, v in self.further.items() if f"p{p:g}" not in own}

    def distribution(self) -> dict[str, Plain]:
        """``quantiles_ms`` and ``round_medians_ms``, as in the rows of a race: the data for a chart of the latencies."""
        rounded = [round(v, 6) for v in self.quantiles_ms]
        return {"quantiles_ms": rounded, "round_medians_ms": [round(v, 6) for v in self.part_medians_ms]}


def measure(
    fn: Callable[[], object], *, clock: Clock = time.perf_counter_ns, percentiles: Sequence[float] = (), **limits: Any
) -> LatencyStats:
    """Time calls of ``fn``. ``limits`` are the fields of :class:`RunLimits`."""
    return LatencyStats.of(sample(fn, clock=clock, **limits), percentiles)


def sample(fn: Callable[[], object], *, clock: Clock = time.perf_counter_ns, **limits: Any) -> array[int]:
    """The latencies of :func:`measure` in nanoseconds."""
    runs = RunLimits(**limits)
    for _ in range(runs.warmup):
        fn()
    with quiet():
        return timed_calls(fn, runs, clock)[1]


def timed_calls(fn: Callable[[], object], limits: RunLimits, clock: Clock) -> tuple[array[int], array[int]]:
    """The start and the duration of each call, in nanoseconds."""
    starts, took = array("q"), array("q")
    more = limits.begin(clock)
    while more(len(took)):
        start = clock()
        fn()
        stop = clock()
        starts.append(start)
        took.append(stop - start)
    return starts, took


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection during the measurement; a full one before it, unless another measurement encloses it."""
    enabled = gc.isenabled()
    if enabled:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
