"""Concurrent steps: the memory that each step accesses, and whether a program's lanes keep conflicting steps in order.

Two steps conflict if they access the same bytes and at least one of them writes. The order of conflicting steps must follow from
the lanes (:class:`optdnn.runtime.program.Slot`). Then every order that the lanes allow gives the same results.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from optdnn.errors import EngineError
from optdnn.runtime.program import Program, Slot, Step


@dataclass(frozen=True)
class Region:
    """Elements of a buffer: an offset, sizes and strides, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Access:
    """A read or write of a buffer by a step. ``region`` None: all of it."""

    buffer: int
    write: bool
    region: Region | None = None


def accesses(step: Step) -> list[Access]:
    """The reads and writes of a kernel. An operand that its meaning does not mention (workspace) counts as written."""
    operands = (*step.inputs, *step.outputs)
    touched: list[Access] = []
    for key, write in (("reads", False), ("writes", True)):
        for view in step.params[key]:
            if view is not None:
                number, offset, shape, strides = view
                touched.append(Access(operands[number], write, Region(offset, tuple(shape), tuple(strides))))
    named = {a.buffer for a in touched}
    return touched + [Access(i, True) for i in operands if i not in named]


# ---------------------------------------------------------------- regions


def overlap(a: Region | None, b: Region | None) -> bool:
    """Whether two regions of a buffer may share an element. Exact for boxes, and for slices along one axis of one tensor."""
    if (a is not None and 0 in a.shape) or (b is not None and 0 in b.shape):
        return False
    if a is None or b is None:
        return True
    (low_a, high_a), (low_b, high_b) = _span(a, 1 << 62), _span(b, 1 << 62)
    if high_a < low_b or high_b < low_a:
        return False
    # Modulo a stride that both have (pixels of channels-last tensors, images of a batch), slices are intervals of a circle.
    for m in sorted({abs(s) for r in (a, b) for s in r.strides if abs(s) > 1}):
        (low_a, high_a), (low_b, high_b) = _span(a, m), _span(b, m)
        wide_a, wide_b = high_a - low_a, high_b - low_b
        if (low_b - low_a) % m > wide_a and (low_a - low_b) % m > wide_b:
            return False
    return True


def _span(r: Region, modulus: int) -> tuple[int, int]:
    """The first and the last element, ignoring axes with a stride that is a multiple of ``modulus``."""
    low = high = r.offset
    for n, s in zip(r.shape, r.strides, strict=True):
        if s % modulus:
            low, high = low + min(0, (n - 1) * s), high + max(0, (n - 1) * s)
    return low, high


# ---------------------------------------------------------------- order


def waits_of(lanes: Sequence[Slot]) -> list[list[int]] | None:
    """For each step the earlier steps that it waits for directly; None for steps that run one by one."""
    if not lanes:
        return None
    last: dict[int, int] = {}
    waits = []
    for k, slot in enumerate(lanes):
        waits.append(sorted({*slot.after, *([last[slot.lane]] if slot.lane in last else [])}))
        last[slot.lane] = k
    return waits


def earlier(program: Program) -> list[int]:
    """For each step the set (as bits) of the steps that have ended when it begins."""
    waits = waits_of(program.lanes)
    return [(1 << k) - 1 for k in range(len(program.steps))] if waits is None else masks_of(waits)


def masks_of(waits: Sequence[Collection[int]]) -> list[int]:
    """For each step the set (as bits) of the steps that it waits for, directly or through others."""
    masks: list[int] = []
    for before in waits:
        mask = 0
        for d in before:
            mask |= masks[d] | 1 << d
        masks.append(mask)
    return masks


def dependencies(program: Program) -> list[set[int]]:
    """For each step the earlier steps that it conflicts with by their buffers, wherever the buffers are placed.

    Constants, which nothing writes, are left out.
    """
    conflicts: list[set[int]] = [set() for _ in program.steps]
    for _, users in _by_buffer(program):
        for (i, a), (k, b) in _meeting(users):
            if i != k and i not in conflicts[k] and overlap(a.region, b.region):
                conflicts[k].add(i)
    return conflicts


def _meeting(users: Sequence[tuple[int, Access]]) -> Iterator[tuple[tuple[int, Access], tuple[int, Access]]]:
    """The pairs of accesses of a buffer, in order, that may conflict: one of them writes, and their spans meet.

    The steps of a loop read or write thousands of parts of one buffer. Most pairs are left out without a closer look."""
    everything = Region(0, (1 << 62,), (1,))
    spans = [_span(a.region or everything, 1 << 62) for _, a in users]
    writers = [n for n, (_, a) in enumerate(users) if a.write]
    for n, (user, (low, high)) in enumerate(zip(users, spans, strict=True)):
        later = range(n + 1, len(users)) if user[1].write else writers[bisect(writers, n) :]
        for m in later:
            if spans[m][0] <= high and low <= spans[m][1]:
                yield user, users[m]


def check_lanes(program: Program) -> None:
    """Raise EngineError if steps that conflict may run concurrently: by a buffer, or by bytes of the arena that buffers share.

    Steps on the host cannot be in lanes at all.
    """
    if not program.lanes:
        return
    others = sorted({s.executor for s in program.steps} - {"cuda"})
    if others:
        raise EngineError(f"steps of {', '.join(others)} are in lanes, which are for kernels")
    race = first_race(program)
    if race is not None:
        i, k, why = race
        raise EngineError(
            f"steps {i} and {k} of the engine may run at the same time, but {why}",
            hint="the file was changed, or written by a faulty program: build the engine again",
        )


def first_race(program: Program) -> tuple[int, int, str] | None:
    """Two steps that conflict without an order, and the cause; None if there are none."""
    before = earlier(program)
    together = [mask | 1 << k for k, mask in enumerate(before)]  # the steps in order with each step, itself included
    for k, mask in enumerate(before):
        while mask:
            low = mask & -mask
            together[low.bit_length() - 1] |= 1 << k
            mask ^= low
    users = dict(_by_buffer(program))
    for i, uses in users.items():
        name = program.buffers[i].name
        for (j, a), (k, b) in _meeting(uses):
            if not together[j] >> k & 1 and overlap(a.region, b.region):
                return j, k, f"both use buffer {name!r}, which one of them writes"
    for pair in _sharing(program, users):
        for first, second in (pair, pair[::-1]):
            touched = sum(1 << k for k in {k for k, _ in users[second]})
            for k in sorted({k for k, use in users[first] if use.write}):
                wild = touched & ~together[k]
                if wild:
                    names = f"{program.buffers[first].name!r} and {program.buffers[second].name!r}"
                    other = (wild & -wild).bit_length() - 1
                    return min(k, other), max(k, other), f"their buffers {names} share memory"
    return None


def _by_buffer(program: Program) -> Iterator[tuple[int, list[tuple[int, Access]]]]:
    """Every buffer that is not constant, and its users, in order."""
    users: dict[int, list[tuple[int, Access]]] = {}
    for k, step in enumerate(program.steps):
        for a in accesses(step):
            if program.buffers[a.buffer].blob is None:
                users.setdefault(a.buffer, []).append((k, a))
    yield from sorted(users.items())


def _sharing(program: Program, users: dict[int, list[tuple[int, Access]]]) -> Iterator[tuple[int, int]]:
    """Pairs of buffers that overlap in the arena."""
    placed = sorted(
        (b.offset, b.offset + (b.nbytes or 0), i)
        for i, b in enumerate(program.buffers)
        if b.offset is not None and b.nbytes and i in users
    )
    open_: list[tuple[int, int]] = []
    for start, end, i in placed:
        open_ = [(stop, j) for stop, j in open_ if stop > start]
        for _, j in open_:
            yield j, i
        open_.append((end, i))
