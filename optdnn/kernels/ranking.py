"""Which configurations of a kernel are worth timing, of those that a cost model has estimated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

MOST = 2
"""Configurations of one shape."""

C = TypeVar("C", bound=Any)


def varied(found: Iterable[tuple[float, C]], shape: Callable[[C], Hashable], limit: int) -> list[C]:
    """The configurations of :func:`varied_pairs`."""
    return [config for _, config in varied_pairs(found, shape, limit)]


def varied_pairs(found: Iterable[tuple[float, C]], shape: Callable[[C], Hashable], limit: int) -> list[tuple[float, C]]:
    """The first ``limit`` (seconds, configuration) by estimated seconds, at most :data:`MOST` of what ``shape`` calls alike: models err
    by shape, so that one that was ranked too low is there all the same. Equal estimates: in the order of the configurations."""
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
    """The first of the reasons why configurations cannot run a problem, or None where one of them can: the others are not asked."""
    first = None
    for why in reasons:
        if why is None:
            return None
        first = why if first is None else first
    return first


def two_are_better(one: float, two: float, gain: float) -> str | None:
    """Why two launches of ``two`` seconds in all are better than one of ``one``, which has to promise at most ``gain`` of that; or None."""
    if one <= gain * two:
        return None
    return f"two launches are predicted to be as fast ({two * 1e6:.2f} us; one: {one * 1e6:.2f} us)"


def joint(power: float, *times: float) -> float:
    """The time of what runs side by side, as a norm of the times: more than the longest, and less than their sum."""
    top = max(times)
    return float(top * sum((t / top) ** power for t in times) ** (1 / power))
