"""Lanes: independent steps of a GPU's program run side by side if that is predicted to be faster.

A program is cut at each position where every later step depends on every earlier one. Between two cuts, steps are placed on lanes
by list scheduling (Graham, 1969): the step with the longest path of work after it goes first. Two things bound the gain: free
multiprocessors (a kernel whose blocks fill the GPU leaves no room for another) and the cost of forks and joins.

Any predicted gain is enough: measured gains are larger (``docs/internals/kernels-launches.md``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from optdnn.kernels.libraries.collective import predicted_seconds
from optdnn.ops.collective import COLLECTIVES
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import CudaStep, parse
from optdnn.runtime.cuda.libraries.calls import LibraryCall
from optdnn.runtime.cuda.measuring.expected import STEP_TIMES
from optdnn.runtime.cuda.measuring.work import Ceilings, work_of
from optdnn.runtime.program import Program, Slot, Step
from optdnn.runtime.steps.lanes import dependencies, masks_of

MOST_LANES = 4
"""The default maximum: more lanes gained nothing in measurements."""
MOST_STEPS = 2500
"""Programs of more steps keep one lane: with lanes, the arena planner compares all pairs of buffers."""
JOIN, FORK = 0.45e-6, 0.35e-6
"""Seconds that a step loses if it waits for several steps, or if several steps wait for the same one.
Measured on an H200: ``docs/internals/kernels-launches.md``."""
ROOM = 1.6
"""The sum of the rooms of steps side by side may reach this. It exceeds 1 because a kernel's blocks start in the tail of another.
On an H200, compared with 1.0: of eight networks with lanes, three take 0.94, 0.96 and 0.98 of the time, none more than 1.003."""
CROWD = 0.12
"""A step takes this fraction longer for each concurrent step: they share caches and memory."""
LATENCY = 0.9e-6
"""Seconds of a nearly empty launch that depends on the previous one."""
NEAR = 3.0
"""A block alone reaches this many times its share of the memory's bandwidth: many operands are in L2."""
RECURRENCE = 1.3e-6
"""Seconds of one time step of a recurrent layer."""


@dataclass(frozen=True)
class Load:
    """A step's demand: ``seconds`` when it runs alone, and ``room``, the fraction of the GPU's places for blocks that it fills."""

    seconds: float
    room: float


@dataclass(frozen=True)
class Schedule:
    """Steps in the order in which they begin, the lane of each, and the predicted seconds with lanes and in one lane (``alone``)."""

    order: tuple[int, ...]
    lanes: tuple[int, ...]
    seconds: float
    alone: float


def with_lanes(program: Program, gpu: GpuFacts, seconds: Mapping[int, float], most: int = MOST_LANES) -> Program:
    """The program with its steps on lanes if that is predicted to gain; otherwise unchanged.

    ``seconds`` are predicted or measured times of steps by number. ``most``: the maximum of lanes. ``meta["streams"]`` describes the
    decision.
    """
    if any(s.executor != "cuda" for s in program.steps) or len(program.steps) > MOST_STEPS:
        many = len(program.steps) > MOST_STEPS
        why = f"more than {MOST_STEPS} steps" if many else "steps on the CPU cut the network"
        program.meta["streams"] = {"lanes": 1, "why": why}
        return program
    deps = dependencies(program)
    loads = [load_of(step, program, gpu, seconds.get(k)) for k, step in enumerate(program.steps)]
    planned = schedule(deps, loads, most)
    slots = slots_of(planned, deps)
    used = 1 + max((s.lane for s in slots), default=0)
    note: dict[str, Any] = {"lanes": used, "predicted_us": round(planned.seconds * 1e6, 2)}
    note["one_lane_us"] = round(planned.alone * 1e6, 2)
    if used == 1:
        program.meta["streams"] = note
        return program
    note["aside"] = sum(s.lane > 0 for s in slots)
    program.meta["streams"] = note
    if (times := program.meta.get(STEP_TIMES)) is not None:
        program.meta[STEP_TIMES] = {**times, "steps": [times["steps"][k] for k in planned.order]}
    return replace(program, steps=tuple(program.steps[k] for k in planned.order), lanes=tuple(slots))


# ---------------------------------------------------------------- loads


def load_of(step: Step, program: Program, gpu: GpuFacts, known: float | None = None) -> Load:
    """The load of a step. ``known``: its predicted or measured seconds; without them, a rough estimate from its work."""
    parsed = parse(step, program)
    room = room_of(parsed, gpu)
    if known is not None:
        return Load(max(known, 1e-7), room)
    if parsed.meaning.kind in COLLECTIVES:
        result = program.buffers[step.outputs[0]].nbytes or 0
        return Load(predicted_seconds(parsed.meaning.kind, result, parsed.meaning.attrs["world"]), room)
    work = work_of(step, parsed, program)
    spent = LATENCY + Ceilings.nominal(gpu).seconds(work) / max(0.02, min(1.0, NEAR * room)) / 0.6
    if parsed.meaning.kind in ("StackedRNN", "Recurrence"):
        first = next(v for v in parsed.meaning.reads if v is not None)
        spent += RECURRENCE * (first.shape[0] + parsed.meaning.attrs.get("layers", 1))
    return Load(spent, room)


def room_of(step: CudaStep, gpu: GpuFacts) -> float:
    """The fraction of a GPU's places for blocks that a launch fills (1: all).

    A library's tiles are unknown: they are assumed to be 128 x 128 results, one per multiprocessor."""
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


def schedule(deps: Sequence[set[int]], loads: Sequence[Load], most: int = MOST_LANES) -> Schedule:
    """Put steps on lanes. ``deps``: the earlier steps that each step depends on. Deterministic."""
    order: list[int] = []
    lanes: dict[int, int] = {}
    seconds = alone = 0.0
    reach = masks_of(deps)
    for first, last in segments(deps):
        steps = range(first, last)
        one = sum(loads[k].seconds for k in steps)
        best = (one, list(steps), dict.fromkeys(steps, 0))
        for count in range(2, most + 1 if len(steps) > 1 else 2):
            tried = _listed(steps, deps, reach, loads, count)
            if tried[0] < best[0] - 1e-12:
                best = tried
        order += best[1]
        lanes |= best[2]
        seconds, alone = seconds + best[0], alone + one
    return Schedule(tuple(order), tuple(_numbered([lanes[k] for k in order])), seconds, alone)


def segments(deps: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Ranges of steps between cuts: positions where each later step depends on each earlier one, directly or indirectly."""
    reach = masks_of(deps)
    cuts, common = [len(deps)], -1
    for k in range(len(deps) - 1, 0, -1):
        common &= reach[k]
        everything = (1 << k) - 1
        if common & everything == everything:
            cuts.append(k)
    cuts.append(0)
    return list(pairwise(sorted(set(cuts))))


def _listed(
    steps: range, deps: Sequence[set[int]], reach: Sequence[int], loads: Sequence[Load], count: int
) -> tuple[float, list[int], dict[int, int]]:
    """Seconds, order and lanes of these steps on ``count`` lanes. When there is room, the step with the most work after it
    starts. ``reach``: all steps before each one, as bits."""
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
            lanes[chosen] = lane = _lane(inner[chosen], last, busy, ends)
            direct = _direct(inner[chosen], reach)
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


def _direct(before: set[int], reach: Sequence[int]) -> set[int]:
    """The steps that a step waits for directly: without those that come before another of them."""
    return {d for d in before if not any(reach[e] >> d & 1 for e in before)}


def _lane(before: set[int], last: Sequence[int | None], busy: set[int], ends: Mapping[int, float]) -> int:
    """A free lane: the lane of the last-ending step that it waits for, otherwise an unused lane, otherwise the lowest."""
    free = [i for i in range(len(last)) if i not in busy]
    mine = [i for i in free if last[i] in before]
    if mine:
        return max(mine, key=lambda i: (ends[last[i]], -i))  # type: ignore[index]
    return next((i for i in free if last[i] is None), free[0])


def _numbered(lanes: Sequence[int]) -> list[int]:
    """The lanes, numbered in the order of their first use."""
    number: dict[int, int] = {}
    return [number.setdefault(lane, len(number)) for lane in lanes]


def slots_of(planned: Schedule, deps: Sequence[set[int]]) -> list[Slot]:
    """The slot of each step, in the schedule's order: its lane, and the fewest steps of other lanes that it must wait for."""
    at = {k: i for i, k in enumerate(planned.order)}
    slots: list[Slot] = []
    before: list[int] = []
    last: dict[int, int] = {}
    for i, (k, lane) in enumerate(zip(planned.order, planned.lanes, strict=True)):
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
