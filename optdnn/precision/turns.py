"""Engines timed side by side: in rounds, each a turn of every engine, and compared within rounds.

A machine's clock, its neighbours and its caches drift by more than engines of small networks differ; within a round they hit all
alike. So engines are compared by their ratios in the same rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Rounds = Mapping[str, Sequence[float]]
"""Engine -> milliseconds, one for each round; those given up have fewer."""


def in_turns(
    turns: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    give_up_ratio: float,
    budget_seconds: float = 30.0,
    tick: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Milliseconds that each turn tells, ``rounds`` times; who begins changes from round to round.

    After each round those whose best is ``give_up_ratio`` times the best of all are given up. ``budget_seconds`` bounds the whole;
    each is measured at least once.
    """
    found: dict[str, list[float]] = {name: [] for name in turns}
    active = list(turns)
    deadline = time.perf_counter() + budget_seconds
    for k in range(rounds):
        for name in active[k % len(active) :] + active[: k % len(active)]:
            tick(name)
            found[name].append(turns[name]())
        best = min(min(found[n]) for n in active)
        active = [n for n in active if min(found[n]) <= best * give_up_ratio]
        if time.perf_counter() > deadline or len(active) == 1:
            break
    return found


def paired(rounds: Rounds) -> dict[str, float]:
    """Milliseconds of each: those of the fastest, times the mean ratio to it in the same rounds."""
    most = max((len(r) for r in rounds.values()), default=0)
    if not most:
        return {}
    base = min((n for n, r in rounds.items() if len(r) == most), key=lambda n: middle(rounds[n]))
    scale = middle(rounds[base])
    return {n: scale * middle([a / b for a, b in zip(r, rounds[base], strict=False)]) for n, r in rounds.items() if r}


def middle(values: Sequence[float]) -> float:
    """The mean without a tenth of the values at either end (rounded up, where there are five or more): where values come in two
    kinds, it moves with their shares, as a median does not, and what disturbed a single round is left out."""
    skip = -(-len(values) // 10) if len(values) >= 5 else 0
    return statistics.fmean(sorted(values)[skip : len(values) - skip])


def turn_of(run: Callable[[], object], *, seconds: float, rest: float) -> Callable[[], float]:
    """A turn by the host's clock: a pause (the threads of whoever ran before spin for a while), two runs that are not counted, and
    the median of those in ``seconds``, in milliseconds."""

    def turn() -> float:
        time.sleep(rest)
        run()
        run()
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while not taken or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken) * 1e3

    return turn
