"""The ring of stages in ``conv_sm90.cu`` with a prologue (``conv_change.cuh``), run as a protocol of mbarriers.

The model has the copy engine, whose fills end in any order, the changing warps, to which the fills are dealt in turn, and the
consumer. A scheduler chooses the next agent. A run fails if a warp uses a stage that does not hold its fill, or if all agents
wait although fills remain.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest


class Broken(AssertionError):
    """A warp used a stage that did not hold its fill, or all agents wait."""


@dataclass
class Barrier:
    """An mbarrier for one arrival a phase. ``phase`` counts the phases that have ended."""

    phase: int = 0

    def passed(self, parity: int) -> bool:
        """The answer of ``mbarrier.try_wait.parity``, which knows only the parity of the current phase."""
        return self.phase % 2 != parity


@dataclass
class Ring:
    """Stages, their barriers and their contents: (fill, whether it was changed)."""

    stages: int
    fills: int
    full: list[Barrier] = field(default_factory=list)
    changed: list[Barrier] = field(default_factory=list)
    empty: list[Barrier] = field(default_factory=list)
    held: list[tuple[int, bool]] = field(default_factory=list)
    on_the_way: list[int] = field(default_factory=list)
    consumed: int = 0

    def __post_init__(self) -> None:
        for barriers in (self.full, self.changed, self.empty):
            barriers += [Barrier() for _ in range(self.stages)]
        self.held = [(-1, True)] * self.stages


Agent = Iterator[tuple[Barrier, int] | None]
"""Yields the (barrier, parity) that it waits for, or None if it can continue."""


def producer(ring: Ring) -> Agent:
    for k in range(ring.fills):
        stage, turn = k % ring.stages, k // ring.stages
        if turn > 0:
            yield ring.empty[stage], (turn - 1) % 2
        ring.on_the_way.append(k)
        yield None


def changer(ring: Ring, warp: int, warps: int, *, waits_for_last_fill: bool) -> Agent:
    for k in range(warp, ring.fills, warps):
        stage, parity = k % ring.stages, k // ring.stages % 2
        if waits_for_last_fill and ring.stages % warps:
            yield ring.changed[stage], parity ^ 1
        yield ring.full[stage], parity
        if ring.held[stage] != (k, False):
            raise Broken(f"warp {warp} changes fill {k}, but stage {stage} holds {ring.held[stage]}")
        ring.held[stage] = k, True
        ring.changed[stage].phase += 1
        yield None


def consumer(ring: Ring) -> Agent:
    for k in range(ring.fills):
        stage, parity = k % ring.stages, k // ring.stages % 2
        yield ring.changed[stage], parity
        if ring.held[stage] != (k, True):
            raise Broken(f"fill {k} is multiplied, but stage {stage} holds {ring.held[stage]}")
        if k > 0:  # the product before this one has ended
            ring.empty[(k - 1) % ring.stages].phase += 1
        ring.consumed = k + 1
        yield None


def run(stages: int, fills: int, seed: int, *, waits_for_last_fill: bool) -> None:
    """One run in a random order. Raises Broken."""
    ring, choose = Ring(stages, fills), random.Random(seed)
    warps = min(stages, 4)
    agents = [producer(ring), consumer(ring)]
    agents += [changer(ring, w, warps, waits_for_last_fill=waits_for_last_fill) for w in range(warps)]
    waiting: dict[int, tuple[Barrier, int] | None] = dict.fromkeys(range(len(agents)))
    while waiting or ring.on_the_way:
        able = [i for i, wait in waiting.items() if wait is None or wait[0].passed(wait[1])]
        if ring.on_the_way and (not able or choose.random() < 0.3):
            k = ring.on_the_way.pop(choose.randrange(len(ring.on_the_way)))
            ring.held[k % stages] = k, False
            ring.full[k % stages].phase += 1
            continue
        if not able:
            raise Broken(f"nobody can move after {ring.consumed} of {fills} fills")
        i = choose.choice(able)
        try:
            waiting[i] = next(agents[i])
        except StopIteration:
            del waiting[i]


@pytest.mark.parametrize("stages", range(2, 14))
def test_the_prologue_s_warps_use_each_fill_once(stages: int) -> None:
    for fills in (1, stages, stages + 1, 2 * stages + 1, 3 * stages + 2, 40):
        for seed in range(25):
            run(stages, fills, seed, waits_for_last_fill=True)


@pytest.mark.parametrize(("stages", "safe"), [(5, False), (9, False), (10, False), (8, True), (12, True)])
def test_without_the_wait_for_the_last_fill_it_breaks(stages: int, safe: bool) -> None:
    """DenseNet-169 hung this way: several warps change one stage in turn, and a warp took an old phase for its own."""

    def broken(seed: int) -> bool:
        try:
            run(stages, 4 * stages, seed, waits_for_last_fill=False)
        except Broken:
            return True
        return False

    assert any(broken(seed) for seed in range(200)) is not safe
