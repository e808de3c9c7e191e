"""The arena planner: buffers that live at the same time do not overlap, and memory is shared only where it is legal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import F32, mlp, mlp_expected, program
from support.arenas import check_by_execution, networks, overlaps

from optdnn import Engine
from optdnn.errors import InternalError
from optdnn.lowering import memory
from optdnn.lowering.memory import ALIGNMENT, Interval, Plan, Use, lifetimes, live_bytes, pack, place_buffers, plan
from optdnn.runtime.steps.reference import reference_step

# ---------------------------------------------------------------- the properties


def test_the_checks_fire() -> None:
    both = [Interval(64, 0, 2), Interval(64, 2, 3)]
    assert overlaps(both, [0, 32]) == [(1, 0)]
    assert overlaps(both, [0, 64]) == []
    steps = [Use((), (0,)), Use((0,), (1,)), Use((0, 1), (2,))]
    sizes = {0: 8, 1: 8, 2: 8}
    with pytest.raises(AssertionError, match="step 1: 1 is written over 0"):
        check_by_execution(steps, sizes, Plan({0: 0, 1: 0, 2: 8}, 16, 0))
    late = [Use((), (0,)), Use((), (1,)), Use((0, 1), ())]
    with pytest.raises(AssertionError, match="operand 0 was overwritten"):
        check_by_execution(late, {0: 8, 1: 8}, Plan({0: 0, 1: 0}, 8, 0))


interval = st.builds(
    lambda size, start, length: Interval(size, start, start + length),
    st.integers(0, 5000),
    st.integers(0, 30),
    st.integers(0, 12),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(interval, max_size=40), st.sampled_from([1, 64, 256]))
def test_no_two_live_buffers_overlap(intervals: list[Interval], alignment: int) -> None:
    offsets, arena = pack(intervals, alignment)
    assert not overlaps(intervals, offsets)
    assert all(o % alignment == 0 for o in offsets)
    assert all(o + v.size <= arena for o, v in zip(offsets, intervals, strict=True))
    assert arena >= live_bytes(intervals, alignment)
    assert arena <= sum(-(-v.size // alignment) * alignment for v in intervals)
    assert pack(intervals, alignment) == (offsets, arena)  # the plan is deterministic


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(networks())
def test_plans_survive_execution(network: tuple[list[Use], dict[int, int]]) -> None:
    steps, sizes = network
    found = plan(steps, sizes)
    check_by_execution(steps, sizes, found)
    apart = plan([Use(s.inputs, s.outputs) for s in steps], sizes)
    assert found.arena_bytes <= apart.arena_bytes  # sharing never increases the arena
    assert apart.arena_bytes >= apart.live_bytes == found.live_bytes


# ---------------------------------------------------------------- sharing in place


def chain(*sizes: int, offers: bool = True) -> tuple[list[Use], dict[int, int]]:
    steps = [Use((), (0,))]
    steps += [Use((i,), (i + 1,), [(i + 1, i)] if offers else ()) for i in range(len(sizes) - 1)]
    return steps, dict(enumerate(sizes))


def test_a_pointwise_chain_runs_in_one_buffer() -> None:
    steps, sizes = chain(640, 640, 640)
    assert plan(steps, sizes).arena_bytes == 640
    assert set(plan(steps, sizes).offsets.values()) == {0}
    steps, sizes = chain(640, 640, 640, offers=False)
    assert plan(steps, sizes).arena_bytes == 1280


def test_sharing_is_refused_where_it_is_not_legal() -> None:
    larger, sizes = chain(64, 128)
    assert plan(larger, sizes).arena_bytes == 192
    read_later = [Use((), (0,)), Use((0,), (1,), [(1, 0)]), Use((0, 1), (2,))]
    found = plan(read_later, {0: 64, 1: 64, 2: 64})
    assert found.offsets[0] != found.offsets[1]
    twice = [Use((), (0,)), Use((0,), (1, 2), [(1, 0), (2, 0)])]
    found = plan(twice, {0: 64, 1: 64, 2: 64})
    assert found.offsets[1] != found.offsets[2]
    assert found.arena_bytes == 128
    external = [Use((9,), (1,), [(1, 9)])]
    assert plan(external, {1: 64}).offsets == {1: 0}


# ---------------------------------------------------------------- lifetimes and refusals


def test_lifetimes_run_from_the_first_write_to_the_last_read() -> None:
    steps = [Use((9,), (0,)), Use((0,), (1, 2, 3)), Use((0, 1), (4,))]
    live = lifetimes(steps, dict.fromkeys(range(5), 8))
    assert live == {
        0: Interval(8, 0, 2),
        1: Interval(8, 1, 2),
        2: Interval(8, 1, 1),  # these have no reader, but they are written
        3: Interval(8, 1, 1),
        4: Interval(8, 2, 2),
    }


def test_reading_before_writing_is_a_defect() -> None:
    with pytest.raises(InternalError, match="step 0 reads buffer 5 before"):
        plan([Use((5,), (1,))], {5: 8, 1: 8})


@pytest.mark.parametrize("wrong", [Interval(-1, 0, 0), Interval(1, 2, 1)])
def test_impossible_intervals_are_defects(wrong: Interval) -> None:
    with pytest.raises(InternalError, match="negative size or ends before"):
        pack([wrong])


def test_nothing_to_plan() -> None:
    assert plan([], {}) == Plan({}, 0, 0)
    assert plan([Use((0,), (1,))], {}) == Plan({}, 0, 0)


# ---------------------------------------------------------------- on programs


def test_a_planned_program_runs_the_same() -> None:
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    p = mlp(n=4)
    q, found = place_buffers(p, in_place=lambda s: [(s.outputs[0], s.inputs[0])] if s.params["kind"] == "Add" else [])
    assert [b.offset for b in q.buffers] == [None] * 4 + [0, 0, None, None]
    assert q.arena_bytes == found.arena_bytes == 128
    assert p.buffers[4].offset is None  # the given program is unchanged
    want = mlp_expected(p, x)
    for name, got in Engine(q).run({"x": x}).items():
        np.testing.assert_array_equal(got, want[name])


def test_symbolic_buffers_stay_outside() -> None:
    q, found = place_buffers(mlp(n="n"))
    assert found.offsets == {}
    assert all(b.offset is None for b in q.buffers)
    assert Engine(q).run({"x": np.ones((2, 5), np.float32)})["y"].shape == (2, 3)


def test_alignment_is_kept() -> None:
    kinds = ["Relu", "Neg", "Abs"]
    steps = [reference_step(k, {}, (i,), (i + 1,)) for i, k in enumerate(kinds)]
    q, _ = place_buffers(program([("x", F32, (3,))], [("y", 3)], steps, [(F32, (3,))] * 3), alignment=256)
    assert [b.offset for b in q.buffers] == [None, 0, 256, None]
    assert q.arena_bytes == 512
    assert ALIGNMENT == 64


def test_buffers_that_all_live_together_are_not_repaired_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes with a gap above the lower bound. With many neighbors, each order gets only one placement."""
    placed: list[int] = []
    place = memory._place
    monkeypatch.setattr(memory, "_place", lambda *a: placed.append(1) or place(*a))
    odd = [Interval(64 + 64 * (i * 7 % 5), i // 3, i // 3 + 1 + i % 4) for i in range(60)]
    pack(odd)
    often = len(placed)
    placed.clear()
    monkeypatch.setattr(memory, "REPAIR_WORK", 1)
    pack(odd)
    assert len(placed) <= len(memory.ORDERS) < often
