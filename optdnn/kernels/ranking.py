"""Selection of the configurations of a kernel that are worth timing, from a cost model's estimates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

MOST = 2
"""Most chosen configurations of one shape."""

C = TypeVar("C", bound=Any)


def varied(found: Iterable[tuple[float, C]], shape: Callable[[C], Hashable], limit: int) -> list[C]:
    """The configurations of :func:`varied_pairs`."""
    return [config for _, config in varied_pairs(found, shape, limit)]


def varied_pairs(found: Iterable[tuple[float, C]], shape: Callable[[C], Hashable], limit: int) -> list[tuple[float, C]]:
    """The first ``limit`` (seconds, configuration) pairs by estimated seconds, at most :data:`MOST` per ``shape``. Models err by shape, so
    this keeps shapes that are ranked too low. Equal estimates come in the order of the configurations."""
    chosen: list[tuple[float, C]] = []
    shapes: dict[Hashable, int] = {}
    for seconds, config in sorted(found, key=lambda item: (item[0], item[1])):
        if len(chosen) == limit:
            break
        alike = shape(config)
        if shapes.get(alike, 0) < MOST:
            shapes[alike] = shapes.get(alike, 0) + 1
            chosen.append((seconds, config))
    return chosen


def first_reason(reasons: Iterable[str | None]) -> str | None:
    """The first reason why configurations cannot run a problem, or None if one of them can. Evaluation stops at the first None."""
    first = None
    for why in reasons:
        if why is None:
            return None
        first = why if first is None else first
    return first


def two_are_better(one: float, two: float, gain: float) -> str | None:
    """Why two launches with a total of ``two`` seconds are better than one launch of ``one`` seconds, or None if ``one`` is at most
    ``gain * two``."""
    if one <= gain * two:
        return None
    return f"two launches are predicted to be as fast ({two * 1e6:.2f} us; one: {one * 1e6:.2f} us)"


def joint(power: float, *times: float) -> float:
    """The time of overlapping work, as a norm of its times: more than the longest, less than their sum."""
    top = max(times)
    return float(top * sum((t / top) ** power for t in times) ** (1 / power))
