"""Sizes that a model does take, where a build for a range of them ends at one that it does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from optdnn.errors import OptdnnError
from optdnn.ranges import DimRange, Profile

SEARCH_SECONDS = 5.0
"""How long sizes are looked for before the error is shown without them."""

SIZES = range(1, 65)
"""The sizes to try for a dimension whose optimum does not fit."""

Fits = Callable[[Mapping[str, int]], None]
"""Raises OptdnnError where the model does not take these sizes of its symbols."""


def working(profile: Profile, fits: Fits, seconds: float = SEARCH_SECONDS) -> Profile | None:
    """The ranges around the optimum of ``profile`` that the model takes: each as far as it goes with the others at their optimum.
    Where the optimum itself does not fit, the ranges around other sizes that do, as near to it as they are found.

    None where no answer is found in time. A range is taken to have no gaps: the search halves it.
    """
    until = time.monotonic() + seconds
    optimum = {name: r.opt for name, r in profile.items()}

    def does(sizes: Mapping[str, int]) -> bool:
        if time.monotonic() > until:
            raise _Late
        try:
            fits(sizes)
        except OptdnnError:
            return False
        return True

    try:
        point = optimum if does(optimum) else _other_sizes(profile, does)
        if point is None:
            return None
        found = {}
        for name, r in profile.items():
            alone, size = partial(_with, does, point, name), point[name]
            found[name] = DimRange(
                _furthest(size, min(r.min, size), alone), size, _furthest(size, max(r.max, size), alone)
            )
        together = all(does({n: getattr(r, end) for n, r in found.items()}) for end in ("min", "max"))
        return found if together else _fixed(point)
    except _Late:
        return None


def _other_sizes(profile: Profile, does: Callable[[Mapping[str, int]], bool]) -> dict[str, int] | None:
    """Sizes that fit where the optimum does not: an end of the ranges, or the optimum with one size changed. A size stays at its
    optimum if that fits."""
    optimum = {name: r.opt for name, r in profile.items()}
    ends = [{name: getattr(r, end) for name, r in profile.items()} for end in ("min", "max")]
    single = [{**optimum, name: size} for name in profile for size in SIZES]
    point = next((sizes for sizes in (*ends, *single) if does(sizes)), None)
    if point is None:
        return None
    for name, size in optimum.items():
        point = {**point, name: size} if does({**point, name: size}) else point
    return point


def _with(does: Callable[[Mapping[str, int]], bool], optimum: Mapping[str, int], name: str, size: int) -> bool:
    """Whether the optimum with one dimension of another size fits."""
    return does({**optimum, name: size})


def _fixed(sizes: Mapping[str, int]) -> Profile:
    return {name: DimRange(n, n, n) for name, n in sizes.items()}


class _Late(Exception):
    """The time for the search is over."""


def _furthest(good: int, end: int, does: Callable[[int], bool]) -> int:
    """The size nearest to ``end`` that does, between ``good``, which does, and ``end``."""
    if does(end):
        return end
    while abs(end - good) > 1:
        middle = (good + end) // 2
        if does(middle):
            good = middle
        else:
            end = middle
    return good
