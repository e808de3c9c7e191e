"""Which steps of a GPU's program run side by side: list scheduling over data dependencies, where it is predicted to gain.

A program is cut where all that follows needs all that came before; between two cuts, steps are scheduled by the longest path of
work behind them (Graham's list scheduling, 1969) on as many lanes as pay. What bounds the gain is room: a kernel whose blocks
fill the multiprocessors leaves none for another; and what forks and joins cost. Where the gain is small, steps stay in one lane.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import CudaStep, parse
from optdnn.runtime.cuda.libraries.calls import LibraryCall
from optdnn.runtime.cuda.measuring.work import Ceilings, work_of
from optdnn.runtime.lanes import dependencies
from optdnn.runtime.program import Program, Slot, Step

MOST_LANES = 4
"""Lanes beyond this have not been seen to gain."""
MOST_STEPS = 2500
"""Programs of more steps keep one lane: who may share memory with whom is a question of pairs of buffers."""
JOIN, FORK = 0.45e-6, 0.35e-6
"""Seconds that a step loses that waits for several others, and that one of several that wait for the same step loses
(measured on an H200: ``docs/internals/kernels.md``)."""
ROOM = 1.6
"""How far the rooms of steps side by side may add up: kernels take turns on what they cannot have at once, and begin in each other's
tails. Against 1.0, of eight networks with lanes one takes 0.94 of the time, one 0.96, one 0.98, none more than 1.003
(on an H200)."""
CROWD = 0.12
"""How much longer a step takes for each other one that runs beside it: they share caches and memory."""
WORTH, LEAST = 0.08, 0.5e-6
"""Steps between two cuts leave their lane only where that is predicted to gain this part of their time, and so many seconds;"""
ALTOGETHER = 0.03
"""and a network has lanes only where this part of its time is gained."""
LATENCY = 0.9e-6
"""Seconds of a dependent launch that does next to nothing, behind another one."""
NEAR = 3.0
"""How much more than its share of the memory's bandwidth a block gets while others leave it alone: operands lie in L2."""
RECURRENCE = 1.3e-6
"""Seconds of a step of a recurrent layer."""


@dataclass(frozen=True)
class Load:
    """A step as the schedule sees it: ``seconds`` alone, and the part of the multiprocessors' ``room`` that it fills."""

    seconds: float
    room: float


@dataclass(frozen=True)
class Schedule:
    """Steps in the order in which they begin, the lane of each, and the predicted seconds, with and without lanes."""

    order: tuple[int, ...]
    lanes: tuple[int, ...]
    seconds: float
    alone: float


def with_lanes(
    program: Program, gpu: GpuFacts, seconds: Mapping[int, float], most: int = MOST_LANES, *, forced: bool = False
) -> Program:
    """The program with its steps on lanes where that is predicted to gain; as it is where it is not.

    ``seconds`` are known (predicted or measured) times of steps by number. ``most``: lanes. ``forced``: side by side wherever
    there is any gain at all. ``meta["streams"]`` says what was decided.
    """
    if any(s.executor != "cuda" for s in program.steps) or len(program.steps) > MOST_STEPS:
        many = len(program.steps) > MOST_STEPS
        why = f"more than {MOST_STEPS} steps" if many else "steps on the CPU cut the network"
        program.meta["streams"] = {"lanes": 1, "why": why}
        return program
    deps = dependencies(program)
    loads = [load_of(step, program, gpu, seconds.get(k)) for k, step in enumerate(program.steps)]
    found = schedule(deps, loads, most, forced=forced)
    slots = slots_of(found, deps)
    used = 1 + max((s.lane for s in slots), default=0)
    note: dict[str, Any] = {"lanes": used, "predicted_us": round(found.seconds * 1e6, 2)}
    note["one_lane_us"] = round(found.alone * 1e6, 2)
    if used == 1:
        program.meta["streams"] = note
        return program
    note["aside"] = sum(s.lane > 0 for s in slots)
    program.meta["streams"] = note
    return replace(program, steps=tuple(program.steps[k] for k in found.order), lanes=tuple(slots))


# ---------------------------------------------------------------- loads


def load_of(step: Step, program: Program, gpu: GpuFacts, known: float | None = None) -> Load:
    """What a step takes of a GPU; ``known``: its seconds, where they were predicted or measured."""
    parsed = parse(step, program)
    room = room_of(parsed, gpu)
    if known is not None:
        return Load(max(known, 1e-7), room)
    work = work_of(step, parsed, program)
    spent = LATENCY + Ceilings.nominal(gpu).seconds(work) / max(0.02, min(1.0, NEAR * room)) / 0.6
    if parsed.meaning.kind in ("StackedRNN", "Recurrence"):
        first = next(v for v in parsed.meaning.reads if v is not None)
        spent += RECURRENCE * (first.shape[0] + parsed.meaning.attrs.get("layers", 1))
    return Load(spent, room)


def room_of(step: CudaStep, gpu: GpuFacts) -> float:
    """The part of the places for blocks on a GPU that a launch takes (1: all).

    How a library cuts its work is not known: it counts as tiles of 128 x 128 results, one on a multiprocessor."""
    launch = step.launch
    if isinstance(launch, LibraryCall):
        results = max((math.prod(v.shape) for v in step.meaning.writes if v is not None), default=0)
        return min(1.0, results / LIBRARY_TILE / gpu.multiprocessors)
    blocks = math.prod(launch.grid)
    registers = 168 if launch.shared > 48 << 10 else 64
    resident = min(
        gpu.shared_per_multiprocessor // (launch.shared + 1024),
        2048 // launch.block,
        max(1, 65536 // (registers * launch.block)),
    )
    return min(1.0, blocks / (gpu.multiprocessors * max(1, resident)))


LIBRARY_TILE = 128 * 128


# ---------------------------------------------------------------- schedule


def schedule(
    deps: Sequence[set[int]], loads: Sequence[Load], most: int = MOST_LANES, *, forced: bool = False
) -> Schedule:
    """Lanes for steps that depend on earlier ones as ``deps`` say. Deterministic."""
    order: list[int] = []
    lanes: dict[int, int] = {}
    seconds = alone = 0.0
    margin, least = (0.0, 0.0) if forced else (WORTH, LEAST)
    for first, last in segments(deps):
        steps = range(first, last)
        one = sum(loads[k].seconds for k in steps)
        best = (one, list(steps), dict.fromkeys(steps, 0))
        for count in range(2, most + 1 if len(steps) > 1 else 2):
            tried = _listed(steps, deps, loads, count)
            if tried[0] < best[0] - 1e-12 and one - tried[0] > max(least, margin * one):
                best = tried
        order += best[1]
        lanes |= best[2]
        seconds, alone = seconds + best[0], alone + one
    if seconds > (1 - (0.0 if forced else ALTOGETHER)) * alone:
        return Schedule(tuple(range(len(deps))), (0,) * len(deps), alone, alone)
    return Schedule(tuple(order), tuple(_numbered([lanes[k] for k in order])), seconds, alone)


def segments(deps: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Ranges of steps between cuts: positions where each later step needs, by way of others, each earlier one."""
    reach: list[int] = []
    for before in deps:
        mask = 0
        for d in before:
            mask |= reach[d] | 1 << d
        reach.append(mask)
    cuts, common = [len(deps)], -1
    for k in range(len(deps) - 1, 0, -1):
        common &= reach[k]
        everything = (1 << k) - 1
        if common & everything == everything:
            cuts.append(k)
    cuts.append(0)
    return list(pairwise(sorted(set(cuts))))


def _listed(
    steps: range, deps: Sequence[set[int]], loads: Sequence[Load], count: int
) -> tuple[float, list[int], dict[int, int]]:
    """Seconds, order and lanes of these steps on ``count`` lanes: whenever there is room, the step with most work behind it."""
    inner = {k: {d for d in deps[k] if d in steps} for k in steps}
    after: dict[int, list[int]] = {k: [] for k in steps}
    for k, before in inner.items():
        for d in before:
            after[d].append(k)
    behind: dict[int, float] = {}
    for k in reversed(steps):
        behind[k] = loads[k].seconds + max((behind[j] for j in after[k]), default=0.0)
    missing = {k: len(before) for k, before in inner.items()}
    ready = sorted((k for k in steps if not missing[k]), key=lambda k: (-behind[k], k))
    ends: dict[int, float] = {}
    lanes: dict[int, int] = {}
    order: list[int] = []
    last: list[int | None] = [None] * count
    running: list[int] = []
    now = 0.0
    while ready or running:
        full = sum(loads[k].room for k in running)
        busy = {lanes[k] for k in running}
        chosen = next((k for k in ready if not running or full + loads[k].room <= ROOM), None)
        if chosen is not None and len(busy) < count:
            ready.remove(chosen)
            lanes[chosen] = lane = _lane(chosen, inner[chosen], last, busy, ends)
            direct = _direct(chosen, inner[chosen], inner)
            extra = JOIN if len(direct) > 1 else FORK if direct and last[lane] not in direct else 0.0
            if not inner[chosen] and lane:
                extra = FORK
            ends[chosen] = now + extra + loads[chosen].seconds * (1 + CROWD * len(running))
            last[lane] = chosen
            order.append(chosen)
            running.append(chosen)
            continue
        now = min(ends[k] for k in running)
        for k in [k for k in running if ends[k] <= now]:
            running.remove(k)
            for j in after[k]:
                missing[j] -= 1
                if not missing[j]:
                    ready.append(j)
        ready.sort(key=lambda k: (-behind[k], k))
    tails = [k for k in steps if not after[k]]
    total = max(ends.values(), default=0.0) + (JOIN if len(tails) > 1 else 0.0)
    return total, order, lanes


def _direct(k: int, before: set[int], inner: Mapping[int, set[int]]) -> set[int]:
    """What a step waits for, but for what those wait for themselves."""
    return {d for d in before if not any(d in inner[e] for e in before)}


def _lane(k: int, before: set[int], last: Sequence[int | None], busy: set[int], ends: Mapping[int, float]) -> int:
    """A free lane: that of what the step waits for (the last of them to end), else one that nothing ran in, else the lowest."""
    free = [i for i in range(len(last)) if i not in busy]
    mine = [i for i in free if last[i] in before]
    if mine:
        return max(mine, key=lambda i: (ends[last[i]], -i))  # type: ignore[index]
    return next((i for i in free if last[i] is None), free[0])


def _numbered(lanes: Sequence[int]) -> list[int]:
    """The lanes, numbered as they begin."""
    number: dict[int, int] = {}
    return [number.setdefault(lane, len(number)) for lane in lanes]


def slots_of(found: Schedule, deps: Sequence[set[int]]) -> list[Slot]:
    """The slot of each step, in the schedule's order: what it must wait for beyond its lane, and no more."""
    at = {k: i for i, k in enumerate(found.order)}
    slots: list[Slot] = []
    before: list[int] = []
    last: dict[int, int] = {}
    for i, (k, lane) in enumerate(zip(found.order, found.lanes, strict=True)):
        mask = before[last[lane]] | 1 << last[lane] if lane in last else 0
        after = []
        for d in sorted((at[d] for d in deps[k]), reverse=True):
            if not mask >> d & 1:
                after.append(d)
                mask |= before[d] | 1 << d
        slots.append(Slot(lane, tuple(sorted(after))))
        before.append(mask)
        last[lane] = i
    return slots
