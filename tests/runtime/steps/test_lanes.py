"""Lanes: conflicting accesses, the guarantees of an order, and refusals of programs whose lanes race."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import mlp

from optdnn.errors import EngineError
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.file import format as fmt
from optdnn.runtime.file.header import HEADER, PROGRAM
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Buffer, Program, Slot, Step
from optdnn.runtime.simulate.runner import SimulateContext, SimulateRunner, some_order
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.runtime.steps.lanes import Region, accesses, check_lanes, dependencies, earlier, overlap, waits_of
from optdnn.types import FP32, TensorSpec

N = 8


def add(step: int, reads: Sequence[tuple[int, int]], write: tuple[int, int], size: int = N) -> Step:
    """A step that adds operands (buffer, offset) element by element: a kernel's step, except for a launch that could run."""
    inputs = tuple(dict.fromkeys(b for b, _ in reads))
    views = [[inputs.index(b), offset, [size], [1]] for b, offset in reads]
    return Step(
        "cuda",
        {
            "launch": {
                "kernel": 0, "grid": [1, 1, 1], "block": 32, "parameters": "", "relocations": [], "shared": 0,
                "cluster": 1, "dependent": True,
            },
            "op": {"kind": "Add" if len(reads) == 2 else "Abs", "attrs": {}},
            "reads": views,
            "writes": [[len(inputs), write[1], [size], [1]]],
        },
        inputs, (write[0],), (f"n{step}",),
    )  # fmt: skip


def diamond(lanes: tuple[Slot, ...], *, offsets: Sequence[int] = (0, 256, 512)) -> Program:
    """x -> a; a -> b and a -> c in parallel; b + c -> y."""
    from optdnn.runtime.program import Kernel

    buffers = [Buffer("x", FP32, (N,)), *(Buffer(n, FP32, (N,), offset=o) for n, o in zip("abc", offsets, strict=True))]
    buffers.append(Buffer("y", FP32, (N,)))
    steps = (
        add(0, [(0, 0)], (1, 0)),
        add(1, [(1, 0), (0, 0)], (2, 0)),
        add(2, [(1, 0), (1, 0)], (3, 0)),
        add(3, [(2, 0), (3, 0)], (4, 0)),
    )
    x, y = TensorSpec("x", FP32, (N,)), TensorSpec("y", FP32, (N,))
    return Program(
        "simulate", "fp32", ((x, 0),), ((y, 4),), tuple(buffers), steps, [], arena_bytes=1024,
        kernels=(Kernel("general.cu", "f", "sm_90a", {}, (), "0" * 64),), lanes=lanes,
    )  # fmt: skip


GOOD = (Slot(0), Slot(0), Slot(1, (0,)), Slot(0, (2,)))


# ---------------------------------------------------------------- what conflicts


def elements(r: Region) -> set[int]:
    found = {r.offset}
    for n, s in zip(r.shape, r.strides, strict=True):
        found = {f + i * s for f in found for i in range(n)}
    return found


def _region(rng: random.Random, rank: int) -> Region:
    shape, strides = ([rng.choice(of) for _ in range(rank)] for of in ((1, 2, 3), (1, 2, 4, 6, 12)))
    return Region(rng.randrange(30), tuple(shape), tuple(strides))


def test_overlap_never_misses_and_is_exact_for_slices() -> None:
    """Compared with sets of elements, for random regions and for slices of channels of one channels-last tensor."""
    rng = random.Random(3)
    apart = 0
    for _ in range(3000):
        a, b = (_region(rng, rng.randint(1, 3)) for _ in range(2))
        shared = bool(elements(a) & elements(b))
        assert overlap(a, b) or not shared
        apart += not overlap(a, b)
    assert apart > 500, "it says yes to everything"
    for first in range(0, 24, 4):
        for other in range(0, 24, 4):
            for wide in (4, 8):
                if max(first, other) + wide > 24:
                    continue
                a, b = (Region(at, (2, wide, 3, 3), (216, 1, 72, 24)) for at in (first, other))
                assert overlap(a, b) == bool(elements(a) & elements(b))
    assert overlap(None, Region(0, (1,), (1,)))
    assert not overlap(None, Region(0, (0, 4), (4, 1)))


def test_dependencies_are_those_of_the_data() -> None:
    assert dependencies(diamond(())) == [set(), {0}, {0}, {1, 2}]


def test_parts_of_a_joint_buffer_are_independent() -> None:
    """Two writers of parts, a reader of one part, a reader of both. Then the first part is written again."""
    p = diamond(())
    steps = (
        add(0, [(0, 0)], (1, 0), 4),
        add(1, [(0, 4)], (1, 4), 4),
        add(2, [(1, 4)], (2, 0), 4),
        add(3, [(1, 0)], (3, 0), 8),
        add(4, [(0, 0)], (1, 0), 4),
    )
    assert dependencies(replace(p, steps=steps)) == [set(), set(), {1}, {0, 1}, {0, 3}]


def test_parts_that_steps_read_and_write_in_any_order() -> None:
    """The same as from all pairs of steps: many of them access one buffer."""
    rng, p = random.Random(0), diamond(())
    for _ in range(30):
        places = [[(rng.randrange(3), 2 * rng.randrange(6)) for _ in range(3)] for _ in range(12)]
        steps = [add(k, [one, two], out, 4) for k, (one, two, out) in enumerate(places)]
        meet = [
            {
                i
                for i in range(k)
                if any(
                    a.write | b.write and a.buffer == b.buffer and overlap(a.region, b.region)
                    for a in accesses(steps[i])
                    for b in accesses(steps[k])
                )
            }
            for k in range(len(steps))
        ]
        assert dependencies(replace(p, steps=tuple(steps))) == meet


def test_workspace_that_a_meaning_does_not_name_counts_as_written() -> None:
    p = diamond(())
    used = [replace(s, inputs=(*s.inputs, 3)) for s in (add(0, [(0, 0)], (1, 0)), add(1, [(0, 0)], (2, 0)))]
    shifted = [replace(s, params={**s.params, "writes": [[2, 0, [N], [1]]]}) for s in used]
    assert dependencies(replace(p, steps=tuple(shifted))) == [set(), {0}]


def test_steps_that_have_ended_when_a_step_begins() -> None:
    assert waits_of(()) is None
    assert waits_of(GOOD) == [[], [0], [0], [1, 2]]
    assert earlier(diamond(GOOD)) == [0, 1, 1, 7]
    assert earlier(diamond(())) == [0, 1, 3, 7]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("load", [SimulateRunner, lambda p: CudaRunner(p, LoadOptions())], ids=["simulate", "cuda"])
@pytest.mark.parametrize(
    ("lanes", "offsets", "message"),
    [
        ((Slot(0), Slot(0), Slot(1), Slot(0, (2,))), (0, 256, 512), "steps 0 and 2 .* both use buffer 'a'"),
        ((Slot(0), Slot(0), Slot(1, (0,)), Slot(0)), (0, 256, 512), "steps 2 and 3 .* both use buffer 'c'"),
        (GOOD, (0, 256, 16), "steps 1 and 2 .* their buffers '[ac]' and '[ac]' share memory"),
        (GOOD, (0, 256, 272), "steps 1 and 2 .* their buffers '[bc]' and '[bc]' share memory"),
    ],
    ids=["read after write", "join", "write after read", "write after write"],
)  # fmt: skip
def test_lanes_that_race_are_refused(
    load: Any, lanes: tuple[Slot, ...], offsets: tuple[int, ...], message: str
) -> None:
    program = diamond(lanes, offsets=offsets)
    validate(program)  # it has no other fault
    with pytest.raises(EngineError, match=message):
        load(program)
    load(diamond(GOOD))
    load(diamond((), offsets=offsets))  # only lanes are checked: in sequence, no steps run at the same time


def test_lanes_are_for_kernels() -> None:
    slots = (Slot(0), Slot(1), *(Slot(0, (1,)),), *(Slot(0) for _ in mlp().steps[3:]))
    with pytest.raises(EngineError, match="steps of reference are in lanes"):
        check_lanes(replace(mlp(), lanes=slots))


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        (GOOD[:3], "3 slots in lanes for 4 steps"),
        ((Slot(0), Slot(2), Slot(1), Slot(0)), "step 1 is in lane 2, which nothing begins"),
        ((Slot(-1), *GOOD[1:]), "step 0 is in lane -1"),
        ((*GOOD[:3], Slot(0, (3,))), r"step 3 waits for steps \[3\]"),
        ((*GOOD[:3], Slot(0, (2, 2))), r"step 3 waits for steps \[2, 2\]"),
        ((*GOOD[:3], Slot(0, (1, 2))), "waits for step .* of its own lane"),
        ((Slot(0),) * 4, "in one lane"),
    ],
)
def test_malformed_lanes_are_refused(lanes: tuple[Slot, ...], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        validate(diamond(lanes))


def test_the_format_keeps_lanes(tmp_path: Path) -> None:
    p = diamond(GOOD)
    fmt.write(p, tmp_path / "e")
    assert fmt.read(tmp_path / "e").lanes == GOOD
    assert (tmp_path / "e").read_bytes()[8:12] == b"\x01\x00\x04\x00"
    assert fmt.encode(replace(p, lanes=()))[0][8:12] == b"\x01\x00\x01\x00"


@pytest.mark.parametrize("wrong", [[[]], [[0], ["1"]], [0], [[0], [1, -1]]])
def test_a_header_with_other_lanes_is_refused(wrong: Any) -> None:
    plain = {**PROGRAM.write(diamond(GOOD), HEADER), "lanes": wrong}
    with pytest.raises(EngineError, match=r"lanes\[[01]\]"):
        PROGRAM.read(plain, HEADER, False)


# ---------------------------------------------------------------- how simulate shows a missing edge


def test_orders_are_all_that_lanes_allow_and_no_others() -> None:
    waits = [[], [0], [0], [1, 2]]
    found = {tuple(some_order(waits, random.Random(seed))) for seed in range(40)}
    assert found == {(0, 1, 2, 3), (0, 2, 1, 3)}
    assert some_order(waits, random.Random(5)) == some_order(waits, random.Random(5))


def test_simulate_shows_an_edge_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of lanes, a fault in the lanes gives other results. Faultless lanes never do."""
    x = np.arange(N, dtype=np.float32)
    want = np.abs(x) + x + 2 * np.abs(x)

    def results(lanes: tuple[Slot, ...]) -> list[bool]:
        context = SimulateContext(SimulateRunner(diamond(lanes)), poison=True)
        return [np.array_equal(context.run({"x": x})["y"], want) for _ in range(20)]

    assert all(results(GOOD))
    monkeypatch.setattr("optdnn.runtime.cuda.launches.steps.check_lanes", lambda program: None)
    assert all(results(GOOD))
    for fault in ((Slot(0), Slot(0), Slot(1), Slot(0, (2,))), (Slot(0), Slot(0), Slot(1, (0,)), Slot(0))):
        assert not all(results(fault))
