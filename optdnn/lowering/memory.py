"""The arena planner: offsets for buffers of known size, such that buffers that may live at the same time never overlap.

Offline dynamic storage allocation is NP-hard. Greedy placement by size (Pisarchyk and Lee, "Efficient Memory Management for
Deep Neural Net Inference", 2020) comes within a few percent on networks. The planner tries several deterministic orders and
keeps the smallest arena. Buffers may share memory in place if the caller allows it.

If steps run side by side, their positions are not enough: a buffer may take another's bytes only if every step that writes it
is certain to begin after all users of the other have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.builder import up
from optdnn.runtime.program import Program, Step
from optdnn.types import Array

ALIGNMENT = 64
"""Default alignment of every buffer in bytes (a cache line; callers for GPUs ask for 256)."""


@dataclass(frozen=True)
class Interval:
    """A buffer of ``size`` bytes that lives during the steps ``start`` to ``end``, both included."""

    size: int
    start: int
    end: int


@dataclass(frozen=True)
class Use:
    """The buffers that a step reads and writes, by number.

    ``in_place`` are pairs (output, input): the step may overwrite the input with the output, element by element.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    in_place: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Plan:
    """The byte offset of each planned buffer. ``live_bytes`` is the largest sum of sizes that live at once. Without sharing in
    place, ``live_bytes`` is a lower bound of ``arena_bytes``."""

    offsets: Mapping[int, int]
    arena_bytes: int
    live_bytes: int


def plan(
    steps: Sequence[Use], sizes: Mapping[int, int], alignment: int = ALIGNMENT, before: Sequence[int] | None = None
) -> Plan:
    """Offsets for the buffers in ``sizes`` (number -> bytes). Other buffers (inputs, constants, …) are not placed.

    A buffer lives from the step that writes it to the last step that reads it. ``before``: for each step, the steps that have ended
    when it begins, as a bit set (None: steps run one by one). Raises InternalError for a buffer that is read before it is written.
    """
    live = lifetimes(steps, sizes)
    order = None if before is None else _Order.of(steps, live, before)
    shared = _share_in_place(steps, live, order)
    best: Plan | None = None
    for root in [shared, {i: i for i in live}] if any(k != v for k, v in shared.items()) else [shared]:
        groups: dict[int, Interval] = {}
        for i, interval in live.items():
            r = root[i]
            g = groups.get(r, interval)
            groups[r] = Interval(max(g.size, interval.size), min(g.start, interval.start), max(g.end, interval.end))
        keys = list(groups)
        together = None if order is None else order.neighbors(keys, root)
        offsets, arena = pack([groups[k] for k in keys], alignment, together)
        if best is None or arena < best.arena_bytes:
            at = dict(zip(keys, offsets, strict=True))
            best = Plan({i: at[root[i]] for i in live}, arena, 0)
    assert best is not None
    alone = list(live)
    together = None if order is None else order.neighbors(alone, {i: i for i in live})
    return replace(best, live_bytes=live_bytes([live[i] for i in alone], alignment, together))


@dataclass(frozen=True)
class _Order:
    """Which buffers can live together when steps run side by side. Sets of steps are integers, one bit per step.

    ``before``: for each step, the steps that have ended when it begins. For each buffer: its ``users``, and the steps that
    have ``ended`` when any step that writes it begins.
    """

    before: Sequence[int]
    users: Mapping[int, int]
    ended: Mapping[int, int]

    @classmethod
    def of(cls, steps: Sequence[Use], live: Mapping[int, Interval], before: Sequence[int]) -> _Order:
        users, ended = dict.fromkeys(live, 0), dict.fromkeys(live, -1)
        for k, step in enumerate(steps):
            for i in (*step.inputs, *step.outputs):
                if i in live:
                    users[i] |= 1 << k
            for i in step.outputs:
                if i in live:
                    ended[i] &= before[k]
        return cls(before, users, ended)

    def may_take(self, out: int, source: int, k: int) -> bool:
        """Whether step ``k`` may overwrite ``source`` with ``out``: all other users of ``source`` have ended, none of ``out`` has begun."""
        done = self.before[k] | 1 << k
        return not self.users[source] & ~done and all(
            self.before[j] >> k & 1 for j in _bits(self.users[out] & ~(1 << k))
        )

    def neighbors(self, keys: Sequence[int], root: Mapping[int, int]) -> list[list[int]]:
        """For each group of buffers (``keys``: their roots), the numbers of the groups that must not share its memory."""
        users, ended = dict.fromkeys(keys, 0), dict.fromkeys(keys, -1)
        for i, r in root.items():
            users[r] |= self.users[i]
            ended[r] &= self.ended[i]
        if not keys:
            return []
        # By step: the groups that begin after it. By group: the others that begin after all of its users.
        after = np.packbits(_rows([ended[i] for i in keys], len(self.before)).T, axis=1)
        free = np.stack([np.bitwise_and.reduce(after[list(_bits(users[i]))], axis=0) for i in keys])
        later = np.unpackbits(free, axis=1, count=len(keys)).astype(bool)
        apart = ~(later | later.T)
        np.fill_diagonal(apart, False)
        return [np.flatnonzero(row).tolist() for row in apart]


def _rows(sets: Sequence[int], size: int) -> Array:
    """Sets as rows of booleans. ``sets``: one bit for each of ``size`` members; bits beyond them are ignored."""
    width = (size + 7) // 8
    data = b"".join((s & (1 << size) - 1).to_bytes(width, "little") for s in sets)
    bits = np.frombuffer(data, np.uint8).reshape(len(sets), width)
    return np.unpackbits(bits, axis=1, count=size, bitorder="little").astype(bool)


def _bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def lifetimes(steps: Sequence[Use], sizes: Mapping[int, int]) -> dict[int, Interval]:
    """The interval of each buffer in ``sizes`` that a step writes."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, step in enumerate(steps):
        for i in step.inputs:
            if i in sizes:
                if i not in first:
                    raise InternalError(f"step {k} reads buffer {i} before a step writes it")
                last[i] = k
        for i in step.outputs:
            if i in sizes:
                first.setdefault(i, k)
                last[i] = k
    return {i: Interval(sizes[i], first[i], last[i]) for i in first}


def _share_in_place(steps: Sequence[Use], live: Mapping[int, Interval], order: _Order | None) -> dict[int, int]:
    """Buffer -> the first buffer of the chain whose memory it reuses.

    An output reuses an input's memory if the step allows it, the input's life ends there, and the output is not larger.
    """
    root = {i: i for i in live}
    taken: set[int] = set()
    for k, step in enumerate(steps):
        for out, source in step.in_place:
            legal = (
                out in live
                and source in live
                and root[out] == out
                and source not in taken
                and live[source].end == k == live[out].start
                and live[out].size <= live[source].size
                and (order is None or order.may_take(out, source, k))
            )
            if legal:
                root[out] = root[source]
                taken.add(source)
    return root


def live_bytes(
    intervals: Sequence[Interval], alignment: int = ALIGNMENT, neighbors: Sequence[Sequence[int]] | None = None
) -> int:
    """The largest sum of (aligned) sizes that live at one step: no arena can be smaller.

    With ``neighbors`` (for each buffer, the buffers that may live together with it), the heaviest set of buffers that may all live
    together, as found greedily.
    """
    if neighbors is not None:
        return _largest_together([up(v.size, alignment) for v in intervals], neighbors)
    change: dict[int, int] = {}
    for v in intervals:
        size = up(v.size, alignment)
        change[v.start] = change.get(v.start, 0) + size
        change[v.end + 1] = change.get(v.end + 1, 0) - size
    now = peak = 0
    for _, delta in sorted(change.items()):
        now += delta
        peak = max(peak, now)
    return peak


def _largest_together(sizes: Sequence[int], neighbors: Sequence[Sequence[int]]) -> int:
    """The size of a heavy clique, found greedily: each buffer in turn, with the largest neighbors that fit."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    place = np.empty(len(sizes), np.int64)
    place[order] = np.arange(len(sizes))
    masks = []  # by place in the order: the lowest bit of a set is its largest buffer
    for i in order:
        row = np.zeros(len(sizes), bool)
        row[place[list(neighbors[i])]] = True
        masks.append(int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little"))
    peak = 0
    for first, left in enumerate(masks):
        total = sizes[order[first]]
        while left:
            largest = (left & -left).bit_length() - 1
            left &= masks[largest]
            total += sizes[order[largest]]
        peak = max(peak, total)
    return peak


def place_buffers(
    program: Program,
    alignment: int = ALIGNMENT,
    in_place: Callable[[Step], Sequence[tuple[int, int]]] = lambda step: (),
    outside: Collection[int] = (),
    before: Sequence[int] | None = None,
) -> tuple[Program, Plan]:
    """The program with an arena: every intermediate buffer of static shape gets an offset.

    Inputs and outputs of the network (the caller owns them), constants, buffers of symbolic shape and buffers in ``outside`` are
    not in the arena. ``in_place`` returns a step's legal (output, input) pairs. ``before`` is as for :func:`plan`.
    """
    outside = {i for _, i in (*program.inputs, *program.outputs)}.union(outside)
    sizes = {
        i: b.nbytes
        for i, b in enumerate(program.buffers)
        if b.blob is None and i not in outside and b.nbytes is not None
    }
    arena = plan([Use(s.inputs, s.outputs, in_place(s)) for s in program.steps], sizes, alignment, before)
    buffers = tuple(replace(b, offset=arena.offsets.get(i)) for i, b in enumerate(program.buffers))
    return replace(program, buffers=buffers, arena_bytes=arena.arena_bytes), arena


Order = Callable[[Sequence[Interval]], list[int]]


def pack(
    intervals: Sequence[Interval], alignment: int = ALIGNMENT, together: Sequence[Sequence[int]] | None = None
) -> tuple[list[int], int]:
    """Offsets (multiples of ``alignment``) and arena size for these intervals, by the best of several greedy orders.

    ``together``: for each interval, the numbers of the intervals that must not share its memory (None: the overlapping ones)."""
    if any(v.size < 0 or v.start > v.end for v in intervals):
        raise InternalError("an interval has a negative size or ends before it starts")
    bound = live_bytes(intervals, alignment, together)
    sized = [replace(v, size=up(v.size, alignment)) for v in intervals]
    neighbors = _neighbors(sized) if together is None else together
    best: tuple[list[int], int] | None = None
    compared = max(1, len(sized) + sum(map(len, neighbors)))
    for make in ORDERS:
        order = make(sized)
        for _ in range(1 + min(REPAIRS, REPAIR_WORK // compared)):
            offsets, arena = _place(sized, neighbors, order)
            if best is None or arena < best[1]:
                best = offsets, arena
            if best[1] == bound:
                return best
            # Buffers at the top of the arena were placed too late: place them first.
            late = [i for i in order if offsets[i] + sized[i].size == arena]
            order = late + [i for i in order if offsets[i] + sized[i].size != arena]
        if best is not None and best[1] <= bound * CLOSE:
            return best
    assert best is not None
    return best


REPAIRS, REPAIR_WORK = 60, 2_000_000
"""Per order: most repairs of a placement above the lower bound, and most comparisons of a buffer with a neighbor in all repairs."""
CLOSE = 1.01
"""No further order is tried once the arena is below this multiple of its lower bound."""


def _by_size(v: Sequence[Interval]) -> list[int]:
    return sorted(range(len(v)), key=lambda i: (-v[i].size, v[i].start, i))


def _by_area(v: Sequence[Interval]) -> list[int]:
    return sorted(range(len(v)), key=lambda i: (-v[i].size * (v[i].end - v[i].start + 1), v[i].start, i))


def _by_length(v: Sequence[Interval]) -> list[int]:
    return sorted(range(len(v)), key=lambda i: (v[i].start - v[i].end, -v[i].size, i))


def _by_start(v: Sequence[Interval]) -> list[int]:
    return sorted(range(len(v)), key=lambda i: (v[i].start, -v[i].size, i))


def _by_breadth(v: Sequence[Interval]) -> list[int]:
    """The buffers of the fullest step, largest first; then those of the next fullest step."""
    at: dict[int, list[int]] = {}
    for i, x in enumerate(v):
        for t in range(x.start, x.end + 1):
            at.setdefault(t, []).append(i)
    order: dict[int, None] = {}
    for t in sorted(at, key=lambda t: (-sum(v[i].size for i in at[t]), t)):
        order.update(dict.fromkeys(sorted(at[t], key=lambda i: (-v[i].size, i))))
    return list(order)


ORDERS: tuple[Order, ...] = (_by_size, _by_breadth, _by_area, _by_length, _by_start)
"""Orders in which buffers are placed; the orders that win most often come first."""


def _neighbors(intervals: Sequence[Interval]) -> list[list[int]]:
    """For each interval, the numbers of the intervals that overlap with it."""
    overlapping: list[list[int]] = [[] for _ in intervals]
    alive: list[int] = []
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i].start):
        alive = [j for j in alive if intervals[j].end >= intervals[i].start]
        for j in alive:
            overlapping[i].append(j)
            overlapping[j].append(i)
        alive.append(i)
    return overlapping


def _place(
    intervals: Sequence[Interval], neighbors: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[list[int], int]:
    """Place the buffers in this order, each in the smallest gap (the lowest on ties) between its neighbors."""
    offsets = [-1] * len(intervals)
    ends = [0] * len(intervals)
    arena = 0
    for i in order:
        size = intervals[i].size
        end, best, slack = 0, -1, -1
        for low, high in sorted([(offsets[j], ends[j]) for j in neighbors[i] if offsets[j] >= 0]):
            gap = low - end
            if gap >= size and (best < 0 or gap - size < slack):
                best, slack = end, gap - size
            if high > end:
                end = high
        offsets[i] = at = best if best >= 0 else end
        ends[i] = at + size
        arena = max(arena, at + size)
    return offsets, arena
