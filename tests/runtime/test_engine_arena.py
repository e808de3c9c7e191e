"""The arena of an engine: planned buffers, alignment, views of it, and an arena that is larger than memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from programs import F32, program

from optdnn import Engine
from optdnn.errors import RunError
from optdnn.runtime.program import Step
from optdnn.runtime.steps.reference import reference_step


def planned(aliasing: bool = False) -> Any:
    """x -> Relu -> (arena 0) -> Neg -> (arena 64) -> Abs -> (arena 0 again) -> Identity -> y"""
    kinds = ["Relu", "Neg", "Identity" if aliasing else "Abs", "Neg"]
    steps = [reference_step(k, {}, (i,), (i + 1,)) for i, k in enumerate(kinds)]
    p = program([("x", F32, (4,))], [("y", 4)], steps, [(F32, (4,))] * 4, arena_bytes=128)
    offsets = {1: 0, 2: 64, 3: 0}
    p.buffers = tuple(replace(b, offset=offsets.get(i)) for i, b in enumerate(p.buffers))
    return p


@pytest.mark.parametrize("aliasing", [False, True])
def test_planned_buffers_live_in_the_arena(aliasing: bool) -> None:
    context = Engine(planned(aliasing)).context()
    x = np.array([-1, 2, -3, 4], np.float32)
    for _ in range(2):
        y = context.run({"x": x})["y"]
        assert y.tolist() == ([0, 2, 0, 4] if aliasing else [0, -2, 0, -4])
    first = y.copy()
    context.run({"x": np.ones(4, np.float32)})
    np.testing.assert_array_equal(y, first)  # no view of the arena


def test_arena_memory_is_offered_aligned(fake: Any) -> None:
    seen: list[Any] = []

    def run(inputs: Any, outs: Any) -> Any:
        seen.extend(outs)
        return [inputs[0] + 1]  # not written in place: the engine copies it to its place

    fake(run)
    p = program([("x", F32, (4,))], [("y", 2)], [], [(F32, (4,))] * 2, arena_bytes=256)
    p.steps = (Step("fake", {}, (0,), (1,)), Step("fake", {}, (1,), (2,)))
    p.buffers = tuple(replace(b, offset=64 if i == 1 else None) for i, b in enumerate(p.buffers))
    assert Engine(p)(np.zeros(4, np.float32)).tolist() == [2] * 4
    assert seen[0].ctypes.data % 64 == 0
    assert seen[0].tolist() == [1] * 4
    assert seen[1] is None


def test_a_view_of_the_arena_in_an_unplanned_buffer_is_copied() -> None:
    """t1 is in the arena, t2 = Identity(t1) is not planned, and t3 takes t1's place. y = t2 + t3 must still read the right t2."""
    steps = [
        reference_step("Relu", {}, (0,), (1,)),
        reference_step("Identity", {}, (1,), (2,)),
        reference_step("Neg", {}, (0,), (3,)),
        reference_step("Add", {}, (2, 3), (4,)),
    ]
    p = program([("x", F32, (2,))], [("y", 4)], steps, [(F32, (2,))] * 4, arena_bytes=64)
    p.buffers = tuple(replace(b, offset=0 if i in (1, 3) else None) for i, b in enumerate(p.buffers))
    assert Engine(p)(np.array([5, -7], np.float32)).tolist() == [0, 7]


def test_an_arena_beyond_memory_is_a_run_error() -> None:
    p = planned()
    p.arena_bytes = 1 << 61
    with pytest.raises(RunError, match="no memory for the arena"):
        Engine(p)
