"""Processor time in tests: other load on the machine does not count, and limits are those of a processor of today.

A slow processor, or one whose cache and frequency others share, takes longer for everything. A loop that is timed beside the work
tells how much longer, and the limit grows by it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

LOOP_S = 0.008
"""What :func:`slowness`'s loop takes on the processor that limits are meant for, in seconds."""


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """The least processor time of some runs, each begun without garbage of earlier tests."""
    best = float("inf")
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def slowness() -> float:
    """How many times longer than meant this processor takes now, at least 1."""
    return max(1.0, seconds(_loop, 3) / LOOP_S)


def assert_quick(measured: Callable[[], float], limit: float, tries: int = 5) -> None:
    """Assert that ``measured()`` is at most ``limit`` times :func:`slowness`. A measurement that is above is repeated."""
    seen: list[tuple[float, float]] = []
    for _ in range(tries):
        seen.append((measured(), limit * slowness()))
        if seen[-1][0] <= seen[-1][1]:
            return
    raise AssertionError(f"measured, and the limit then: {seen}")


def assert_linear(works: Mapping[int, Callable[[], object]], growth: float, tries: int = 4) -> None:
    """Assert that one of many pieces takes at most ``growth`` times what one of few does. ``works``: for the smaller and the larger
    number of pieces, the work. Both are measured again where the processor was slow during one of them."""
    few, many = sorted(works)
    least = dict.fromkeys(works, float("inf"))
    for _ in range(tries):
        for n, work in works.items():
            least[n] = min(least[n], seconds(work, 2))
        if least[many] / many <= growth * least[few] / few:
            return
    raise AssertionError(f"seconds: {least}")


def _loop() -> int:
    total = 0
    for k in range(200_000):
        total += k % 7
    return total
