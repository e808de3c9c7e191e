"""Random programs, and checks of an arena's plan that do not rely on the planner."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from optdnn.lowering.lanes import Schedule, _numbered, slots_of
from optdnn.lowering.memory import Interval, Plan, Use
from optdnn.runtime.program import Slot


def overlaps(intervals: Sequence[Interval], offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of intervals that live at the same time and share bytes."""
    return [
        (i, j)
        for i, a in enumerate(intervals)
        for j, b in enumerate(intervals[:i])
        if a.start <= b.end
        and b.start <= a.end
        and offsets[i] < offsets[j] + b.size
        and offsets[j] < offsets[i] + a.size
    ]


def check_by_execution(steps: Sequence[Use], sizes: Mapping[int, int], found: Plan) -> None:
    """Run the steps over a real arena: each write fills the bytes of a buffer with its number, and each read must find them
    intact.

    In-place outputs are written after the operands were read, as a pointwise kernel does.
    """
    arena = np.full(found.arena_bytes, -1, np.int64)

    def bytes_of(i: int) -> slice:
        return slice(found.offsets[i], found.offsets[i] + sizes[i])

    for k, step in enumerate(steps):
        for i in step.inputs:
            assert (arena[bytes_of(i)] == i).all(), f"step {k}: operand {i} was overwritten"
        legal = {(o, s) for o, s in step.in_place}
        for o in step.outputs:
            for i in (*step.inputs, *step.outputs):
                if i != o and (o, i) not in legal:
                    a, b = bytes_of(o), bytes_of(i)
                    assert a.start >= b.stop or b.start >= a.stop, f"step {k}: {o} is written over {i}"
        for o in step.outputs:
            arena[bytes_of(o)] = o


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Use], dict[int, int]]:
    """Random straight-line programs: several inputs and outputs, in-place offers (legal or not)."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    n = draw(st.integers(1, 25))
    made: list[int] = []
    sizes: dict[int, int] = {}
    steps = []

    def new() -> int:
        sizes[len(sizes)] = rng.choice([0, 8, 64, 100, 256, 1000])
        return len(sizes) - 1

    for _ in range(n):
        inputs = [rng.choice(made) for _ in range(rng.randint(0, 3))] if made else []
        outputs = [new() for _ in range(rng.randint(1, 2))]
        offers = [(o, i) for o in outputs for i in inputs if rng.random() < 0.5]
        steps.append(Use(inputs, outputs, offers))
        made += outputs
    return steps, sizes


def lanes_of(steps: Sequence[Use], rng: random.Random) -> list[Slot]:
    """A random lane for each step, and the waits that its operands need."""
    writers: dict[int, int] = {i: k for k, s in enumerate(steps) for i in s.outputs}
    deps = [{writers[i] for i in s.inputs} for s in steps]
    lanes = [rng.randrange(4) for _ in steps]
    order = tuple(range(len(steps)))
    return slots_of(Schedule(order, tuple(_numbered(lanes)), 0.0, 0.0), deps)
