"""Steps that run in parallel: branches, if the GPU has room, and no chains; and simulated programs with lanes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.branches import inception
from support.net import Net
from support.simulated import feeds_of, lowered, simulate

from optdnn import Engine
from optdnn.config import BuildOptions
from optdnn.errors import EngineError, UsageError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.lowering import lanes as lanes
from optdnn.lowering.cuda import OVERLAP, emit_program
from optdnn.lowering.lane_choice import LaneChoice, on_lanes
from optdnn.lowering.lanes import JOIN, ROOM, Load, schedule, segments, slots_of
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Slot
from optdnn.runtime.simulate.runner import SimulateContext, SimulateRunner
from optdnn.runtime.steps.lanes import dependencies, earlier, first_race

US = 1e-6


def chain(n: int) -> list[set[int]]:
    return [{k - 1} if k else set() for k in range(n)]


def branches(lengths: tuple[int, ...]) -> list[set[int]]:
    """A step, branches with these numbers of steps, and a step that needs all of them."""
    deps: list[set[int]] = [set()]
    ends = set()
    for length in lengths:
        last = 0
        for _ in range(length):
            deps.append({last})
            last = len(deps) - 1
        ends.add(last)
    return [*deps, ends]


# ---------------------------------------------------------------- the schedule


def test_a_chain_stays_in_one_lane() -> None:
    found = schedule(chain(9), [Load(3 * US, 0.1)] * 9)
    assert found.lanes == (0,) * 9
    assert found.order == tuple(range(9))
    assert found.seconds == found.alone == pytest.approx(27 * US)


def test_branches_with_room_run_side_by_side() -> None:
    deps = branches((3, 3))
    found = schedule(deps, [Load(4 * US, 0.3)] * 8)
    assert len(set(found.lanes)) == 2
    assert found.alone == pytest.approx(32 * US)
    assert found.seconds < 24 * US
    assert found == schedule(deps, [Load(4 * US, 0.3)] * 8), "deterministic"
    slots = slots_of(found, deps)
    assert sum(len(s.after) for s in slots) == 2, "one fork and one join, no more edges"


def test_branches_that_fill_the_gpu_do_not() -> None:
    assert set(schedule(branches((3, 3)), [Load(4 * US, 1.0)] * 8).lanes) == {0}
    assert set(schedule(branches((3, 3)), [Load(4 * US, 0.52 * ROOM)] * 8).lanes) == {0}


def test_branches_that_are_shorter_than_a_join_do_not() -> None:
    assert set(schedule(branches((1, 1)), [Load(JOIN, 0.1)] * 4).lanes) == {0}
    assert set(schedule(branches((1, 1)), [Load(6 * US, 0.1)] * 4).lanes) == {0, 1}


def test_any_gain_is_enough() -> None:
    loads = [Load(40 * US, 0.1), Load(2.2 * US, 0.1), Load(38 * US, 0.1), Load(40 * US, 0.1)]
    found = schedule(branches((1, 1)), loads)
    assert set(found.lanes) == {0, 1}
    assert 0.98 * found.alone < found.seconds < found.alone


def test_a_shortcut_past_a_chain_is_no_join() -> None:
    """A step that reads a chain's begin and its end waits for its end alone."""
    deps = branches((5, 1))
    shortcuts = [*deps[:4], {3, 1}, {4, 1}, *deps[6:]]
    loads = [Load(3 * US, 0.1)] * 8
    assert schedule(shortcuts, loads) == schedule(deps, loads)
    assert set(schedule(deps, loads).lanes) == {0, 1}


def test_lanes_are_bounded() -> None:
    deps, loads = branches((2,) * 7), [Load(5 * US, 0.02)] * 16
    assert max(schedule(deps, loads, most=3).lanes) == 2
    assert max(schedule(deps, loads, most=1).lanes) == 0


def test_cuts_are_where_all_later_steps_need_all_earlier_ones() -> None:
    assert segments(chain(4)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert segments(branches((2, 1))) == [(0, 1), (1, 4), (4, 5)]
    # Two steps, then two that need both: a cut without a separate step.
    assert segments([set(), set(), {0, 1}, {0, 1}]) == [(0, 2), (2, 4)]
    assert segments([set(), set(), {0}, {1}]) == [(0, 4)]
    assert segments([]) == []


def test_random_schedules_keep_every_dependency() -> None:
    """Order, lanes and waits of random graphs: they imply each dependency, and no wait is superfluous."""
    rng = random.Random(5)
    used = 0
    for _ in range(60):
        n = rng.randint(1, 30)
        deps = [set(rng.sample(range(k), min(k, rng.choice([0, 1, 1, 2])))) for k in range(n)]
        loads = [Load(rng.uniform(1, 8) * US, rng.choice([0.05, 0.3, 1.0])) for _ in range(n)]
        found = schedule(deps, loads, most=rng.randint(1, 5))
        assert sorted(found.order) == list(range(n))
        assert found.seconds <= found.alone + 1e-12
        slots = slots_of(found, deps)
        used += any(s.lane for s in slots)
        at = {k: i for i, k in enumerate(found.order)}
        masks = _masks(slots)
        assert all(masks[at[k]] >> at[d] & 1 for k in range(n) for d in deps[k])
        for i, slot in enumerate(slots):
            for d in slot.after:
                fewer = [*slots[:i], Slot(slot.lane, tuple(x for x in slot.after if x != d)), *slots[i + 1 :]]
                assert not _masks(fewer)[i] >> d & 1, "the wait follows from others"
    assert used > 30


def _masks(slots: list[Slot]) -> list[int]:
    from optdnn.runtime.steps.lanes import masks_of, waits_of

    return masks_of(waits_of(slots) or [])


# ---------------------------------------------------------------- whole programs


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joins cost nothing, so small networks have lanes as well."""
    monkeypatch.setattr(lanes, "JOIN", 0.0)
    monkeypatch.setattr(lanes, "FORK", 0.0)


@pytest.mark.usefixtures("eager")
def test_a_branchy_network_on_lanes_gives_the_same_bits() -> None:
    graph = inception()
    one, several = lowered(graph, streams=1), lowered(graph, streams=4)
    assert not one.lanes
    assert {s.lane for s in several.lanes} >= {0, 1}
    assert first_race(several) is None
    assert several.meta["streams"]["lanes"] == 1 + max(s.lane for s in several.lanes)
    assert several.meta["streams"]["predicted_us"] < several.meta["streams"]["one_lane_us"]
    feeds = feeds_of(graph)
    want = simulate(one, feeds)
    context = SimulateContext(SimulateRunner(several), poison=True, seed=3)
    for _ in range(8):
        got = context.run(feeds)
        assert all(np.array_equal(got[k], want[k]) for k in want)
    expected = evaluate(graph, feeds)
    scale = max(float(np.abs(v).max()) for v in expected.values())
    assert all(float(np.abs(got[k] - v).max()) < 4e-3 * scale for k, v in expected.items())
    # Parts of the concatenation are written in parallel: steps are ordered only where data require it.
    pairs = [(i, k) for k, mask in enumerate(earlier(several)) for i in range(k) if not mask >> i & 1]
    assert any(set(several.steps[i].outputs) & set(several.steps[k].outputs) for i, k in pairs)


@pytest.mark.usefixtures("eager")
def test_a_removed_wait_is_refused_or_changes_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait of the program is removed alone. The check on loading refuses the rest."""
    from dataclasses import replace

    program = lowered(inception(), streams=3)
    removed = 0
    for k, slot in enumerate(program.lanes):
        for d in slot.after:
            fault = Slot(slot.lane, tuple(x for x in slot.after if x != d))
            broken = replace(program, lanes=(*program.lanes[:k], fault, *program.lanes[k + 1 :]))
            removed += 1
            with pytest.raises(EngineError, match="may run at the same time"):
                SimulateRunner(broken)
    assert removed >= 4
    # Without the check, results would differ in some order.
    joins = [k for k, s in enumerate(program.lanes) if s.after]
    k = joins[-1]
    broken = replace(program, lanes=(*program.lanes[:k], Slot(program.lanes[k].lane), *program.lanes[k + 1 :]))
    feeds = feeds_of(inception())
    want = simulate(lowered(inception(), streams=1), feeds)
    monkeypatch.setattr("optdnn.runtime.cuda.launches.steps.check_lanes", lambda p: None)
    context = SimulateContext(SimulateRunner(broken), poison=True)
    assert not all(np.array_equal(context.run(feeds)[n], v) for _ in range(12) for n, v in want.items())


@pytest.mark.usefixtures("eager")
def test_an_engine_with_lanes_is_saved_and_loaded(tmp_path: Any) -> None:
    import optdnn

    program = lowered(inception(), streams=4)
    Engine(program).save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    assert engine.program.lanes == program.lanes
    feeds = feeds_of(inception())
    want = simulate(program, feeds)
    got = engine.run(feeds)
    assert all(np.array_equal(got[k], want[k]) for k in want)


def test_a_sequential_network_is_left_alone() -> None:
    n = Net()
    x = n.input(1, 8, 12, 12)
    for _ in range(4):
        x = n.op("Relu", n.conv(x, 8, 3))
    graph = n.done(x)
    assert not lowered(graph, streams=4).lanes
    assert lowered(graph, streams=4).steps == lowered(graph).steps


def test_auto_takes_the_measured_form_or_else_the_predicted_one() -> None:
    """With a measurement, the faster form is taken; without one, any predicted gain. Measured times go before predicted ones."""
    options = BuildOptions(target="simulate", precision="fp16")
    graph = inception(64)
    emitted = emit_program(_optimized(graph), options, of_arch("sm_90a"), {})
    program, predicted = emitted.program, emitted.seconds(of_arch("sm_90a"))
    short = dict.fromkeys(range(len(program.steps)), 0.1 * US)
    assert not on_lanes(program, of_arch("sm_90a"), short, options).lanes
    assert program.meta["streams"] == {
        "lanes": 1,
        "why": "nothing is predicted to gain side by side",
        **_times(program),
    }
    assert (
        on_lanes(program, of_arch("sm_90a"), dict.fromkeys(predicted, 50 * US), options).meta["streams"]["why"]
        == "predicted, not measured"
    )
    seconds = {d.signature: 50 * US for d in emitted.decisions}
    known = emitted.seconds(of_arch("sm_90a"), seconds)
    assert known != predicted
    assert all(value == pytest.approx(50 * US) for value in known.values())
    assert not on_lanes(program, of_arch("sm_90a"), known, options, LaneChoice(1, seconds)).lanes
    assert on_lanes(program, of_arch("sm_90a"), known, options, LaneChoice(4, seconds)).lanes
    one = BuildOptions(target="simulate", precision="fp16", streams=1)
    assert not on_lanes(program, of_arch("sm_90a"), known, one, LaneChoice(4, seconds)).lanes


def test_launches_of_one_operator_share_its_time() -> None:
    """A convolution with the means of its result: its kernel, and the launch that adds up the sums of its blocks."""
    n = Net()
    x = n.op("Relu", n.conv(n.conv(n.input(8, 64, 112, 112), 64, 1, pads=0), 64, 3, group=64))
    scale = n.op("Relu", n.conv(n.op("GlobalAveragePool", x), 64, 1, pads=0))
    graph = _optimized(n.done(n.conv(n.op("Mul", x, scale), 64, 1, pads=0)))
    gpu = of_arch("sm_90a")
    emitted = emit_program(graph, BuildOptions(target="simulate", precision="fp16"), gpu, {})
    (site,) = {k for k in emitted.sites if k is not None and emitted.sites.count(k) == 2}
    decision = emitted.decisions[site]
    first, second = (k for k, s in enumerate(emitted.sites) if s == site)
    assert decision.seconds is not None
    seconds = emitted.seconds(gpu)
    assert seconds[first] > 5 * seconds[second] > 0
    assert seconds[first] + seconds[second] == pytest.approx(decision.seconds - OVERLAP)
    measured = {decision.signature: 30 * US}
    assert emitted.measured(measured) == {first, second}
    seconds = emitted.seconds(gpu, measured)
    assert seconds[first] + seconds[second] == pytest.approx(30 * US)


def _optimized(graph: Graph) -> Graph:
    from optdnn.optimize import optimize

    copy = graph.copy()
    optimize(copy, BuildOptions(target="simulate", precision="fp16"), "simulate")
    return copy


def test_steps_on_the_cpu_keep_one_lane() -> None:
    n = Net()
    x = n.input(1, 8, 12, 12)
    a, b = n.conv(x, 8, 3), n.conv(x, 8, 5, pads=2)
    mask = n.op("NonZero", n.op("Relu", n.op("Add", a, b)))
    graph = n.done(mask)
    program = lowered(graph, "fp32", streams=4)
    if any(s.executor != "cuda" for s in program.steps):
        assert not program.lanes
        assert "CPU" in program.meta["streams"]["why"]
    else:
        pytest.fail("the network has no step on the CPU any more: take another operator")


def test_a_program_of_very_many_steps_keeps_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MOST_STEPS", 10)
    program = lowered(inception(64, size=28), streams=4)
    assert not program.lanes
    assert program.meta["streams"]["why"] == "more than 10 steps"


def test_gpus_without_measurements_have_lanes_only_on_request() -> None:
    graph = inception(64, size=28)
    assert lowered(graph).lanes, "Hopper, by prediction"
    assert not lowered(graph, target="cuda:sm_80").lanes
    assert lowered(graph, target="cuda:sm_80", streams=4).lanes


def test_dependencies_are_of_the_steps_order() -> None:
    program = lowered(inception())
    for k, before in enumerate(dependencies(program)):
        assert all(d < k for d in before)


@pytest.mark.parametrize("wrong", [0, 9, "many", 2.5, None])
def test_options_that_make_no_sense(wrong: Any) -> None:
    with pytest.raises(UsageError, match="streams must be auto or a number from 1 to 8"):
        BuildOptions(target="simulate", streams=wrong)


def test_streams_are_for_gpus() -> None:
    assert BuildOptions(target="simulate", streams="3").streams == 3
    with pytest.raises(UsageError, match="streams are for GPUs"):
        BuildOptions(target="cpu", streams=2)
    BuildOptions(target="cpu", streams=1)


def _times(program: Any) -> dict[str, float]:
    return {k: program.meta["streams"][k] for k in ("predicted_us", "one_lane_us")}
