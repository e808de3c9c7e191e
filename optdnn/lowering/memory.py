"""The arena planner: offsets for buffers of known size so that buffers which may live at the same time never overlap.

Offline dynamic storage allocation is NP-hard; greedy placement by size (Pisarchyk and Lee, "Efficient Memory Management for
Deep Neural Net Inference", 2020) comes within a few percent on networks. Several orders are tried and the smallest arena
wins; all are deterministic. Buffers may share memory in place where the caller says it is legal.

Where steps run side by side, what counts is not their position but what is certain: a buffer may take another's bytes only
where every step that writes it begins after all users of the other have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from optdnn.errors import InternalError
from optdnn.runtime.program import Program, Step

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
    """What the planner must know of a step: the buffers it reads and writes, by number.

    ``scratch`` are buffers that live during this step alone. ``in_place`` are pairs (output, input): the step may write that
    output over that input, element by element in place.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    scratch: Sequence[int] = ()
    in_place: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Plan:
    """Byte offset of each planned buffer. ``live_bytes`` is the largest sum of sizes that live at once: a lower bound
    of ``arena_bytes`` for plans without sharing in place."""

    offsets: Mapping[int, int]
    arena_bytes: int
    live_bytes: int


def plan(
    steps: Sequence[Use], sizes: Mapping[int, int], alignment: int = ALIGNMENT, before: Sequence[int] | None = None
) -> Plan:
    """Offsets for the buffers in ``sizes`` (number -> bytes); other buffers (inputs, constants, …) are left alone.

    A buffer lives from the step that writes it to the last that reads it. ``before`` has for each step the set (as bits) of
    steps that have ended when it begins (None: steps run one by one). Raises InternalError for a buffer that is read
    before it is written.
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
        together = None if order is None else order.neighbours(keys, root)
        offsets, arena = pack([groups[k] for k in keys], alignment, together)
        if best is None or arena < best.arena_bytes:
            at = dict(zip(keys, offsets, strict=True))
            best = Plan({i: at[root[i]] for i in live}, arena, 0)
    assert best is not None
    alone = list(live)
    together = None if order is None else order.neighbours(alone, {i: i for i in live})
    return replace(best, live_bytes=live_bytes([live[i] for i in alone], alignment, together))


@dataclass(frozen=True)
class _Order:
    """Which buffers can be live together where steps run side by side. Sets of steps are bits of an integer: per buffer its
    users, and the steps that have ended whenever one that writes it begins; per step those that have ended before it."""

    before: Sequence[int]
    users: Mapping[int, int]
    writers: Mapping[int, int]
    ended: Mapping[int, int]

    @classmethod
    def of(cls, steps: Sequence[Use], live: Mapping[int, Interval], before: Sequence[int]) -> _Order:
        users, writers, ended = (dict.fromkeys(live, 0), dict.fromkeys(live, 0), dict.fromkeys(live, -1))
        for k, step in enumerate(steps):
            for i in (*step.inputs, *step.outputs, *step.scratch):
                if i in live:
                    users[i] |= 1 << k
            for i in (*step.outputs, *step.scratch):
                if i in live:
                    writers[i] |= 1 << k
                    ended[i] &= before[k]
        return cls(before, users, writers, ended)

    def may_take(self, out: int, source: int, k: int) -> bool:
        """Whether step ``k`` may write ``out`` over ``source``: the latter's other users have ended, none of the former's begun."""
        done = self.before[k] | 1 << k
        return not self.users[source] & ~done and all(
            self.before[j] >> k & 1 for j in _bits(self.users[out] & ~(1 << k))
        )

    def neighbours(self, keys: Sequence[int], root: Mapping[int, int]) -> list[list[int]]:
        """For each group of ``keys`` (of the buffers with that root) the numbers of those that must not share its memory."""
        users, ended = dict.fromkeys(keys, 0), dict.fromkeys(keys, -1)
        for i, r in root.items():
            users[r] |= self.users[i]
            ended[r] &= self.ended[i]
        found: list[list[int]] = [[] for _ in keys]
        for a, i in enumerate(keys):
            of_i, before_i = users[i], ended[i]
            for b in range(a):
                j = keys[b]
                if of_i & ~ended[j] and users[j] & ~before_i:
                    found[a].append(b)
                    found[b].append(a)
        return found


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def lifetimes(steps: Sequence[Use], sizes: Mapping[int, int]) -> dict[int, Interval]:
    """The interval of each buffer in ``sizes`` that a step writes (or uses as scratch)."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, step in enumerate(steps):
        for i in step.inputs:
            if i in sizes:
                if i not in first:
                    raise InternalError(f"step {k} reads buffer {i} before a step writes it")
                last[i] = k
        for i in (*step.outputs, *step.scratch):
            if i in sizes:
                first.setdefault(i, k)
                last[i] = k
    return {i: Interval(sizes[i], first[i], last[i]) for i in first}


def _share_in_place(steps: Sequence[Use], live: Mapping[int, Interval], order: _Order | None = None) -> dict[int, int]:
    """Buffer -> the first buffer of the chain whose memory it takes over.

    An output takes an input's memory where the step allows it, the input dies there, and the output is no larger.
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
    intervals: Sequence[Interval], alignment: int = ALIGNMENT, neighbours: Sequence[Sequence[int]] | None = None
) -> int:
    """The largest sum of (aligned) sizes that live at one step: no arena can be smaller.

    With ``neighbours`` (who may live together with whom) that of sets found from each buffer on, largest first, all of whose
    members may live together.
    """
    if neighbours is not None:
        return _largest_together([_up(v.size, alignment) for v in intervals], neighbours)
    change: dict[int, int] = {}
    for v in intervals:
        size = _up(v.size, alignment)
        change[v.start] = change.get(v.start, 0) + size
        change[v.end + 1] = change.get(v.end + 1, 0) - size
    now = peak = 0
    for _, delta in sorted(change.items()):
        now += delta
        peak = max(peak, now)
    return peak


def _largest_together(sizes: Sequence[int], neighbours: Sequence[Sequence[int]]) -> int:
    """A heavy clique, greedily: from each buffer on, the largest of its neighbours that fit."""
    masks = [sum(1 << j for j in n) for n in neighbours]
    rank = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    peak = 0
    for first in rank:
        left, total = masks[first], sizes[first]
        for j in sorted(neighbours[first], key=lambda j: (-sizes[j], j)):
            if left >> j & 1:
                left &= masks[j]
                total += sizes[j]
        peak = max(peak, total)
    return peak


def place_buffers(
    program: Program,
    alignment: int = ALIGNMENT,
    in_place: Callable[[Step], Sequence[tuple[int, int]]] = lambda step: (),
    outside: Collection[int] = (),
    before: Sequence[int] | None = None,
) -> tuple[Program, Plan]:
    """The program with an arena: every intermediate buffer of static shape gets its offset.

    Inputs, constants, outputs of the network (which are the caller's own), buffers of symbolic shape and those of ``outside``
    stay outside. ``in_place`` gives a step's legal (output, input) pairs; ``before`` is as for :func:`plan`.
    """
    outside = {i for _, i in (*program.inputs, *program.outputs)}.union(outside)
    sizes = {
        i: b.nbytes
        for i, b in enumerate(program.buffers)
        if b.blob is None and i not in outside and b.nbytes is not None
    }
    found = plan([Use(s.inputs, s.outputs, (), in_place(s)) for s in program.steps], sizes, alignment, before)
    buffers = tuple(replace(b, offset=found.offsets.get(i)) for i, b in enumerate(program.buffers))
    return replace(program, buffers=buffers, arena_bytes=found.arena_bytes), found


Order = Callable[[Sequence[Interval]], list[int]]


def pack(
    intervals: Sequence[Interval], alignment: int = ALIGNMENT, together: Sequence[Sequence[int]] | None = None
) -> tuple[list[int], int]:
    """Offsets (multiples of ``alignment``) and arena size for these intervals, by the best of several greedy orders.

    ``together``: for each the numbers of those whose memory it must not share (None: those that share a step with it)."""
    if any(v.size < 0 or v.start > v.end for v in intervals):
        raise InternalError("an interval has a negative size or ends before it starts")
    bound = live_bytes(intervals, alignment, together)
    sized = [replace(v, size=_up(v.size, alignment)) for v in intervals]
    neighbours = _neighbours(sized) if together is None else together
    best: tuple[list[int], int] | None = None
    for make in ORDERS:
        order = make(sized)
        for _ in range(1 + min(REPAIRS, REPAIR_WORK // max(1, len(sized)))):
            found = _place(sized, neighbours, order)
            if best is None or found[1] < best[1]:
                best = found
            if best[1] == bound:
                return best
            # Whatever ends at the top of the arena came too late: let it choose first.
            offsets, arena = found
            late = [i for i in order if offsets[i] + sized[i].size == arena]
            order = late + [i for i in order if offsets[i] + sized[i].size != arena]
        if best is not None and best[1] <= bound * CLOSE:
            return best
    assert best is not None
    return best


REPAIRS, REPAIR_WORK = 60, 60_000
"""How often a placement above the lower bound is repaired, and how many buffers may be placed in doing so, per order."""
CLOSE = 1.01
"""An arena this near to its lower bound is not worth another order."""


def _by_size(v: Sequence[Interval]) -> list[int]:
    return sorted(range(len(v)), key=lambda i: (-v[i].size, v[i].start, i))


def _by_area(v: Sequence[Interval]) -> list[int]:
    return sorted(range(len(v)), key=lambda i: (-v[i].size * (v[i].end - v[i].start + 1), v[i].start, i))


def _by_length(v: Sequence[Interval]) -> list[int]:
    return sorted(range(len(v)), key=lambda i: (v[i].start - v[i].end, -v[i].size, i))


def _by_start(v: Sequence[Interval]) -> list[int]:
    return sorted(range(len(v)), key=lambda i: (v[i].start, -v[i].size, i))


def _by_breadth(v: Sequence[Interval]) -> list[int]:
    """Buffers of the fullest step first, largest first; then of the next fullest."""
    at: dict[int, list[int]] = {}
    for i, x in enumerate(v):
        for t in range(x.start, x.end + 1):
            at.setdefault(t, []).append(i)
    order: dict[int, None] = {}
    for t in sorted(at, key=lambda t: (-sum(v[i].size for i in at[t]), t)):
        order.update(dict.fromkeys(sorted(at[t], key=lambda i: (-v[i].size, i))))
    return list(order)


ORDERS: tuple[Order, ...] = (_by_size, _by_breadth, _by_area, _by_length, _by_start)
"""Orders in which buffers are placed, most often best first."""


def _neighbours(intervals: Sequence[Interval]) -> list[list[int]]:
    """For each interval those that share a step with it."""
    found: list[list[int]] = [[] for _ in intervals]
    alive: list[int] = []
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i].start):
        alive = [j for j in alive if intervals[j].end >= intervals[i].start]
        for j in alive:
            found[i].append(j)
            found[j].append(i)
        alive.append(i)
    return found


def _place(
    intervals: Sequence[Interval], neighbours: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[list[int], int]:
    """Place in this order, each at the smallest gap (lowest on ties) between the buffers it lives together with."""
    offsets = [-1] * len(intervals)
    ends = [0] * len(intervals)
    arena = 0
    for i in order:
        size = intervals[i].size
        end, best, slack = 0, -1, -1
        for low, high in sorted([(offsets[j], ends[j]) for j in neighbours[i] if offsets[j] >= 0]):
            gap = low - end
            if gap >= size and (best < 0 or gap - size < slack):
                best, slack = end, gap - size
            if high > end:
                end = high
        offsets[i] = at = best if best >= 0 else end
        ends[i] = at + size
        arena = max(arena, at + size)
    return offsets, arena


def _up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
