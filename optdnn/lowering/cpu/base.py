"""Tactics: ways of running (a part of) a graph on a target, measured against one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """One candidate's outcome. Exactly one of ``median_ms`` and ``refused`` is set; ``cached``: not timed in this build.

    ``note`` is a reservation about a candidate that was not refused.
    """

    name: str
    settings: Mapping[str, Any]
    median_ms: float | None = None
    refused: str | None = None
    cached: bool = False
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"tactic": self.name, **self.settings}
        row |= {"refused": self.refused} if self.refused is not None else {"median_ms": self.median_ms}
        row |= {"note": self.note} if self.note is not None else {}
        return row | ({"cached": True} if self.cached else {})


REST_SECONDS = 0.02
"""How long a turn waits for the rivals' spinning threads to come to rest."""
TURN_SECONDS = 0.08
"""The default length of a turn."""


def take_turns(
    runners: Mapping[str, Callable[[float], Sequence[float]]],
    *,
    rounds: int = 4,
    turn_seconds: float | None = None,
    budget_seconds: float = 8.0,
    give_up_ratio: float = 1.25,
    tick: Callable[[str], None] = lambda name: None,
) -> dict[str, float]:
    """Median milliseconds of each runner, measured in turns so that a noisy machine hits all alike.

    A runner gets the seconds of its turn (None: :data:`TURN_SECONDS`) and returns the milliseconds of each run. An empty result
    means that the runner failed; it gets no time. A turn starts with a pause: the rivals' threads spin for a while after their
    last run, which slows down a small network. After each round, runners with a best time above ``give_up_ratio`` times the
    best of all are given up. ``budget_seconds`` bounds the whole; each runner is measured at least once.
    """
    times: dict[str, list[float]] = {name: [] for name in runners}
    active = list(runners)
    deadline = time.perf_counter() + budget_seconds
    seconds = TURN_SECONDS if turn_seconds is None else turn_seconds
    for _ in range(rounds):
        for name in active:
            tick(name)
            time.sleep(REST_SECONDS)
            taken = runners[name](seconds)
            if not taken:
                del times[name]
            else:
                times[name] += taken
        active = [n for n in active if n in times]
        if not active:
            break
        best = min(min(times[n]) for n in active)
        active = [n for n in active if min(times[n]) <= best * give_up_ratio]
        if time.perf_counter() > deadline or len(active) == 1:
            break
    return {name: statistics.median(t) for name, t in times.items() if t}


def fastest(rows: Sequence[Measured]) -> Measured | None:
    """The fastest measured candidate (the first of equals), or None when all were refused."""
    measured = [r for r in rows if r.median_ms is not None]
    return min(measured, key=lambda r: r.median_ms or 0.0) if measured else None
