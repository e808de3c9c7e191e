"""The autotuner with a timer that is made up: what is tried, when it stops, what is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from support.net import Net
from support.timer import FakeTimer, hashed, tactics_of

import optdnn.tuning.timing_keys
from optdnn.config import BuildOptions
from optdnn.errors import RunError
from optdnn.ir.graph import Graph
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.cuda import Prepared, emit_program, lower_cuda
from optdnn.lowering.lane_choice import LaneChoice
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.trials.process import CandidateLost, NetworkLost
from optdnn.runtime.cuda.trials.timer import TrialFailed
from optdnn.runtime.program import Program
from optdnn.tuning import candidate_stage
from optdnn.tuning.autotuner import Tuner
from optdnn.tuning.result import Tuned
from optdnn.tuning.timing_cache import TimingCache

pytestmark = pytest.mark.nvrtc


TARGET = "cuda:sm_90a"


def network(batch: int = 1) -> Graph:
    """Three equal convolutions and a product; the convolutions are most of the time."""
    n = Net()
    x = n.input(batch, 64, 28, 28)
    for _ in range(3):
        x = n.op("Relu", n.conv(x, 64, 3))
    return n.done(n.conv(x, 32, 1, pads=0))


def tuned(
    timer: FakeTimer,
    cache: TimingCache | None = None,
    graph: Graph | None = None,
    say: Any = lambda text: None,
    **options: Any,
) -> tuple[Tuned, Tuner]:
    chosen = BuildOptions(target=TARGET, precision="fp16", **options)
    g = (graph or network()).copy()
    optimize(g, chosen, TARGET)
    tuner = Tuner(
        g, chosen, of_arch("sm_90a"), timer, cache if cache is not None else TimingCache(), say, lambda: timer.now
    )
    found = tuner.run()
    assert timer.loaded == 0, "every network was closed"
    emit_program(g, chosen, of_arch("sm_90a"), {}, found.choices)  # what was chosen can be lowered
    return found, tuner


def convolution(found: Tuned) -> Any:
    return max(found.problems, key=lambda p: p.count * (p.op.kind == "Conv"))


def test_the_fastest_candidate_wins_and_equal_operators_share_measurements() -> None:
    timer = FakeTimer(hashed)
    found, _ = tuned(timer)
    problem = convolution(found)
    assert problem.count == 3
    assert len(timer.trials) == len(set(timer.trials)), "each candidate once"
    measured = {name: hashed(name) for key, name in timer.trials if key == problem.key}
    assert len(measured) > 6
    best = min(measured, key=lambda n: measured[n])
    assert str(found.choices[problem.key]) == best
    assert best != str(problem.default), "else the test says nothing"
    assert found.before_ms is not None
    assert found.after_ms is not None
    assert found.after_ms < found.before_ms
    assert found.stopped is None


def test_the_default_is_tried_first_and_problems_without_choice_not_at_all() -> None:
    timer = FakeTimer(hashed)
    found, _ = tuned(timer)
    for problem in found.problems:
        names = [n for k, n in timer.trials if k == problem.key]
        if len(problem.trials) > 1:
            assert names[0] == str(problem.default)
        else:
            assert names == []


@pytest.mark.parametrize("scatter", [0.0, 0.5])
def test_tuning_stops_where_little_is_to_be_gained(scatter: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where candidates take what is predicted, the first wave tells; where the model may err widely, all are tried."""
    monkeypatch.setattr(candidate_stage, "SCATTER", scatter)
    predicted: dict[str, float] = {}
    timer = FakeTimer(lambda name: predicted[name])
    options = BuildOptions(target=TARGET, precision="fp16", tactics="own")
    graph = network(batch=32)
    optimize(graph, options, TARGET)
    tuner = Tuner(graph, options, of_arch("sm_90a"), timer, TimingCache(), clock=lambda: timer.now)
    collect = tuner._collect

    def collected(choices: Any) -> Any:
        emitted = collect(choices)
        predicted.update({str(t.choice): t.seconds or 1.0 for q in tuner.session.problems.values() for t in q.trials})
        return emitted

    monkeypatch.setattr(tuner, "_collect", collected)
    problem = convolution(tuner.run())
    count = sum(k == problem.key for k, _ in timer.trials)
    assert count == (candidate_stage.WAVE if scatter == 0.0 else len(problem.trials))
    assert len(problem.trials) > 2 * candidate_stage.WAVE


def test_a_wrong_candidate_is_not_used_and_never_tried_again() -> None:
    best = min((n for _, n in tried()), key=hashed)

    def seconds(name: str) -> float:
        if name == best:
            raise TrialFailed("wrong result")
        return hashed(name)

    cache = TimingCache()
    timer = FakeTimer(seconds, lambda tactics: 1.0)
    found, _ = tuned(timer, cache)
    assert best not in map(str, found.choices.values())
    report = found.to_plain()
    assert any(row.get("failed") == {best: "wrong result"} for row in report["problems"])
    cache.networks.clear()
    again = FakeTimer(seconds, lambda tactics: 1.0)
    tuned(again, cache)
    assert again.trials == []


def tried() -> list[tuple[str, str]]:
    timer = FakeTimer(hashed)
    tuned(timer)
    return timer.trials


def test_the_wait_for_others_that_measure_is_not_counted() -> None:
    timer = FakeTimer(hashed)

    @contextmanager
    def alone() -> Iterator[None]:
        assert timer.trials == [], "it waits before it measures"
        timer.now += 1000.0
        yield

    options = BuildOptions(target=TARGET, precision="fp16", budget=500.0)
    graph = network()
    optimize(graph, options, TARGET)
    found = Tuner(graph, options, of_arch("sm_90a"), timer, TimingCache(), clock=lambda: timer.now, alone=alone).run()
    assert found.stopped is None
    assert timer.trials


def test_the_budget_bounds_the_time_and_the_best_so_far_is_kept() -> None:
    whole = tried()
    said: list[str] = []
    timer = FakeTimer(hashed)
    found, _ = tuned(timer, budget=14.0, say=said.append)
    assert found.stopped == "the budget was spent"
    assert len(timer.trials) == 9 < len(whole), "the first 60 % go to candidates alone"
    assert timer.now <= 15.5
    key, first = timer.trials[0]
    names = [n for k, n in timer.trials if k == key]
    assert str(found.choices[key]) == min(names, key=hashed) != first
    assert "best so far is kept" in said[-1]
    assert found.after_ms is not None, "some of the time is left for the network"


def test_a_problem_whose_default_was_not_reached_keeps_it() -> None:
    found, _ = tuned(FakeTimer(hashed), budget=0.5)
    reached = [p for p in found.problems if p.times]
    assert len(reached) == 1
    others = [p for p in found.problems if not p.times]
    assert others
    assert all(found.choices.get(p.key, p.default) == p.default for p in others)


def test_interruption_keeps_the_best_so_far_and_the_times() -> None:
    count = 0

    def seconds(name: str) -> float:
        nonlocal count
        count += 1
        if count == 9:
            raise KeyboardInterrupt
        return hashed(name)

    cache = TimingCache()
    timer = FakeTimer(seconds)
    found, _ = tuned(timer, cache)
    assert found.stopped == "interrupted"
    assert found.choices
    assert len(cache.candidates) == 8
    assert cache.changed
    assert cache.networks == {}, "an unfinished choice is not a result"


def test_interruption_in_the_network_keeps_what_was_better() -> None:
    timer = FakeTimer(hashed)
    races = 0

    def net(tactics: Sequence[str]) -> float:
        nonlocal races
        races += 1
        if races > 8:
            raise KeyboardInterrupt
        return timer._sum(tactics)

    timer.net = net
    found, _ = tuned(timer)
    assert found.stopped == "interrupted"
    assert found.after_ms is not None


def test_a_gpu_that_fails_ends_the_tuning_and_nothing_of_it_is_remembered() -> None:
    def seconds(name: str) -> float:
        if hashed(name) < 2.2e-6:
            raise RunError("illegal address")
        return hashed(name)

    cache = TimingCache()
    found, _ = tuned(FakeTimer(seconds), cache)
    assert found.stopped == "the GPU failed: illegal address"
    assert not any("failed" in row for row in cache.candidates.values())


def test_a_candidate_that_hangs_is_not_used_and_not_remembered() -> None:
    best = min((n for _, n in tried()), key=hashed)

    def seconds(name: str) -> float:
        if name == best:
            raise CandidateLost("hung: it has not ended after 10 s")
        return hashed(name)

    cache, said = TimingCache(), list[str]()
    timer = FakeTimer(seconds, lambda tactics: 1.0)
    found, _ = tuned(timer, cache, say=said.append)
    assert found.stopped is None
    assert best not in map(str, found.choices.values())
    (line,) = found.lost
    assert re.fullmatch(rf"Conv Conv_\d+.* by {re.escape(best)}: hung: it has not ended after 10 s", line)
    assert f"tune: refused {line}" in said
    report = found.to_plain()
    assert report["lost"] == [line]
    assert any(best in row.get("failed", {}) for row in report["problems"])
    assert not any(best in key for key in cache.candidates)


def test_where_the_default_hangs_and_nothing_else_was_tried_another_is_taken() -> None:
    timer = FakeTimer(hashed)
    defaults = {str(p.default) for p in tuned(FakeTimer(hashed))[0].problems}

    def seconds(name: str) -> float:
        raise CandidateLost("hung") if name in defaults else TrialFailed("never tried")

    timer.seconds = seconds
    timer.net = lambda tactics: 1.0
    found, _ = tuned(timer, budget=0.5)
    assert len(found.lost) == 1
    problem = next(p for p in found.problems if p.failed)
    assert list(problem.failed) == [problem.default]
    assert found.choices[problem.key] == problem.trials[1].choice


# ---------------------------------------------------------------- networks that hang


class Hangs:
    """Lets networks of a timer hang: those whose steps' tactics, or lanes, ``which`` says."""

    def __init__(self, timer: FakeTimer, which: Any, *, in_race: bool = False):
        self.which, self.in_race, self.load, self.race = which, in_race, timer.load, timer.race
        self.bad: list[Any] = []
        timer.load, timer.race = self.loaded, self.raced  # type: ignore[method-assign]

    def loaded(self, program: Program) -> Any:
        hangs = self.which(program)
        if hangs and not self.in_race:
            raise NetworkLost(None, "hung: it has not ended after 20 s")  # type: ignore[arg-type]
        net = self.load(program)
        self.bad += [net] if hangs else []
        return net

    def raced(self, networks: Any, rounds: int) -> list[float]:
        for net in networks:
            if any(net is b for b in self.bad):
                raise NetworkLost(net, "hung: it has not ended after 20 s")
        return self.race(networks, rounds)


@pytest.mark.parametrize("in_race", [False, True])
def test_lanes_that_hang_are_not_taken(in_race: bool) -> None:
    timer = FakeTimer(lambda name: 10 * hashed(name), lanes=0.5)
    Hangs(timer, lambda program: bool(program.lanes), in_race=in_race)
    found, _ = tuned(timer, graph=branchy())
    assert found.streams is not None
    assert found.streams.most == 1
    assert found.lost
    assert all(re.match(r"the network with its steps on \d lanes: hung", line) for line in found.lost)
    assert found.stopped is None


@pytest.mark.parametrize("in_race", [False, True])
def test_near_equals_that_hang_in_the_network_are_not_taken(in_race: bool) -> None:
    best, _ = tuned(FakeTimer(hashed))
    ranked = sorted(convolution(best).times, key=lambda c: convolution(best).times[c])
    timer = FakeTimer(hashed)
    timer.net = lambda tactics: timer._sum(tactics) + 0.002 * sum(t == str(ranked[0]) for t in tactics)
    Hangs(timer, lambda program: str(ranked[1]) in tactics_of(program), in_race=in_race)
    found, _ = tuned(timer)
    assert found.choices[convolution(found).key] == ranked[2]
    assert f"the network with Conv by {ranked[1]}: hung: it has not ended after 20 s" in found.lost


@pytest.mark.parametrize("in_race", [False, True])
def test_the_best_candidates_may_hang_together(in_race: bool) -> None:
    best, _ = tuned(FakeTimer(hashed))
    problem = convolution(best)
    timer = FakeTimer(hashed)
    Hangs(timer, lambda program: str(problem.default) not in tactics_of(program), in_race=in_race)
    found, _ = tuned(timer)
    assert found.stopped is None
    assert found.choices[problem.key] == problem.default
    assert found.before_ms is not None
    assert found.after_ms is not None
    assert found.lost[0] == "the network by the fastest candidates: hung: it has not ended after 20 s"


@pytest.mark.parametrize("in_race", [False, True])
def test_what_the_cost_model_chose_may_hang(in_race: bool) -> None:
    best, _ = tuned(FakeTimer(hashed))
    problem = convolution(best)
    timer = FakeTimer(hashed)
    Hangs(timer, lambda program: str(problem.default) in tactics_of(program), in_race=in_race)
    found, _ = tuned(timer)
    assert (found.stopped, found.before_ms) == (None, None)
    assert found.after_ms is not None
    assert found.choices[problem.key] == best.choices[problem.key]
    assert found.lost[0] == "the network by the choices to begin with: hung: it has not ended after 20 s"


def test_a_network_that_hangs_in_one_graph_ends_the_tuning() -> None:
    timer = FakeTimer(hashed)
    Hangs(timer, lambda program: True)
    cache = TimingCache()
    found, _ = tuned(timer, cache)
    assert found.stopped == "the network does not run in one graph"
    assert len(found.lost) == 2
    assert not cache.networks


def test_near_equals_are_chosen_in_the_network() -> None:
    """The fastest alone costs its neighbours something: the network prefers the second."""
    timer = FakeTimer(hashed)
    found, _ = tuned(timer)
    problem = convolution(found)
    alone = str(found.choices[problem.key])

    other = FakeTimer(hashed)
    other.net = lambda tactics: other._sum(tactics) + 0.002 * sum(t == alone for t in tactics)
    again, _ = tuned(other)
    assert str(again.choices[problem.key]) != alone
    ranked = sorted(problem.times, key=lambda c: problem.times[c])
    assert again.choices[problem.key] == ranked[1]


def test_where_the_model_was_right_about_the_network_it_is_followed() -> None:
    _, tuner = tuned(FakeTimer(hashed))
    defaults = {"", *(str(p.default) for p in tuner.session.problems.values())}

    def net(tactics: Sequence[str]) -> float:
        return 1.0 + 0.1 * sum(t not in defaults for t in tactics)

    again, _ = tuned(FakeTimer(hashed, net))
    assert all(again.choices[p.key] == p.default for p in again.problems if p.key in again.choices)
    assert again.after_ms == again.before_ms


def test_a_gpu_without_room_for_another_network_has_each_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tuner = tuned(FakeTimer(hashed))
    defaults = {"", *(str(p.default) for p in tuner.session.problems.values())}
    timer = FakeTimer(hashed, lambda tactics: 1.0 + 0.1 * sum(t not in defaults for t in tactics))
    load, loads = timer.load, count()

    def full(program: Program) -> object:
        if next(loads) == 2:  # the first two were raced, and the second is closed already
            raise RunError("no room")
        return load(program)

    monkeypatch.setattr(timer, "load", full)
    found, _ = tuned(timer)
    assert found.stopped == "the GPU failed: no room"
    assert timer.loaded == 0


# ---------------------------------------------------------------- the timing cache


def test_a_second_build_measures_nothing() -> None:
    cache = TimingCache()
    first, _ = tuned(FakeTimer(hashed), cache)
    timer = FakeTimer(hashed)
    again, _ = tuned(timer, cache)
    assert timer.trials == []
    assert again.cached
    assert again.choices == first.choices
    assert again.after_ms == pytest.approx(first.after_ms, abs=1e-5)


def test_a_build_with_as_little_time_measures_nothing_and_one_with_more_goes_on() -> None:
    cache = TimingCache()
    budget = 14.0  # ended in the network
    first, _ = tuned(FakeTimer(hashed), cache, budget=budget)
    assert first.stopped is not None
    assert first.after_ms is not None, "it was ended in the network"
    timer = FakeTimer(hashed)
    again, _ = tuned(timer, cache, budget=budget)
    assert again.cached
    assert timer.trials == []
    assert again.choices == first.choices
    more, _ = tuned(timer, cache)
    assert not more.cached
    assert more.stopped is None
    assert more.before_ms == pytest.approx(first.after_ms, abs=1e-5), "it goes on from what was chosen"
    final, _ = tuned(FakeTimer(hashed), cache, budget=0.001)
    assert final.cached


def test_another_driver_makes_the_times_a_ranking() -> None:
    cache = TimingCache()
    first, _ = tuned(FakeTimer(hashed), cache)
    said: list[str] = []
    timer = FakeTimer(hashed, driver="2")
    again, _ = tuned(timer, cache, say=said.append)
    assert "only rank" in said[0]
    assert not again.cached
    problem = convolution(again)
    names = [n for k, n in timer.trials if k == problem.key]
    assert names[0] == min(names, key=hashed), "the best of before is tried first"
    assert names[0] == str(first.choices[problem.key])


@pytest.mark.parametrize("change", ["device", "kernels", "workspace"])
def test_what_must_agree(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TimingCache()
    tuned(FakeTimer(hashed), cache)
    options: dict[str, Any] = {}
    timer = FakeTimer(hashed, device="other GPU" if change == "device" else "GPU")
    if change == "kernels":
        monkeypatch.setattr("optdnn.kernels.builder.source_digest", lambda recipe: "0" * 64)
        monkeypatch.setattr(optdnn.tuning.timing_keys, "KERNELS", optdnn.tuning.timing_keys.KERNELS / "nowhere")
    if change == "workspace":
        options["workspace"] = 1 << 30
    again, _ = tuned(timer, cache, **options)
    assert not again.cached
    assert bool(timer.trials) == (change != "workspace"), "candidates' times hold, whatever may be chosen"


def test_a_remembered_choice_that_is_gone_is_made_anew() -> None:
    cache = TimingCache()
    first, _ = tuned(FakeTimer(hashed), cache)
    (key,) = cache.networks
    cache.note_network(key, {k: TacticChoice("gone") for k in first.choices}, 1.0, {"driver": "1"})
    again, _ = tuned(FakeTimer(hashed), cache)
    assert not again.cached
    assert again.choices == first.choices


def test_choices_for_other_problems_are_not_taken() -> None:
    cache = TimingCache()
    first, _ = tuned(FakeTimer(hashed), cache)
    (key,) = cache.networks
    again, _ = tuned(FakeTimer(hashed), cache)
    assert again.cached
    assert again.emitted is not None
    cache.networks[key]["problems"] = "0" * 32  # as a version would keep it that lowers this network in another way
    again, _ = tuned(FakeTimer(hashed), cache)
    assert not again.cached
    assert again.choices == first.choices
    (row,) = cache.networks.values()
    assert row["problems"] != "0" * 32


# ---------------------------------------------------------------- how it is measured and told


@pytest.mark.parametrize("l2", [1 << 10, 60 << 20])
def test_weights_are_cold_where_the_network_does_not_fit_the_cache(l2: int) -> None:
    timer = FakeTimer(hashed, l2=l2)
    tuned(timer)
    assert timer.regimes == {l2 == 1 << 10}


def test_progress_tells_the_rest_and_the_best() -> None:
    said: list[str] = []
    tuned(FakeTimer(hashed), say=said.append)
    assert any("s left" in t and " us; sum " in t for t in said)
    assert any("in the network" in t and " ms" in t for t in said)


# ---------------------------------------------------------------- steps side by side


def branchy() -> Graph:
    """Two branches of two convolutions between two others."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 16, 14, 14), 16, 3))
    a = n.op("Relu", n.conv(n.op("Relu", n.conv(x, 16, 3)), 32, 3))
    b = n.op("Relu", n.conv(n.op("Relu", n.conv(x, 24, 5, pads=2)), 32, 1, pads=0))
    return n.done(n.conv(n.op("Mul", a, b), 32, 1, pads=0))


@pytest.mark.parametrize(("factor", "most"), [(0.9, 4), (0.995, 1), (1.2, 1)])
def test_lanes_are_kept_only_where_the_network_is_measured_to_be_faster(factor: float, most: int) -> None:
    cache = TimingCache()
    timer = FakeTimer(lambda name: 10 * hashed(name), lanes=factor)
    found, tuner = tuned(timer, cache, branchy())
    assert timer.with_lanes >= 1, "else the test says nothing"
    assert found.streams is not None
    assert found.streams.most == most
    assert found.streams.one_ms is not None
    assert found.streams.lanes_ms is not None
    assert (found.streams.lanes_ms < found.streams.one_ms) == (factor < 1)
    assert found.to_plain()["streams"]["most"] == most
    program = lower_cuda(
        tuner.session.graph,
        tuner.session.options,
        of_arch("sm_90a"),
        {},
        prepared=Prepared(found.choices, found.streams),
    )
    assert bool(program.lanes) == (most > 1)
    said = "measured faster" if most > 1 else "measured not faster"
    assert program.meta["streams"]["why"].startswith(said)
    # Another build takes it from the cache, and comes to the same program.
    again = FakeTimer(hashed)
    known, tuner = tuned(again, cache, branchy())
    assert known.cached
    assert not again.trials
    other = lower_cuda(
        tuner.session.graph,
        tuner.session.options,
        of_arch("sm_90a"),
        {},
        prepared=Prepared(known.choices, known.streams),
    )
    assert other.lanes == program.lanes
    assert other.meta == program.meta


def test_lanes_are_not_tried_where_the_build_says_how_many() -> None:
    timer = FakeTimer(lambda name: 10 * hashed(name), lanes=0.5)
    found, _ = tuned(timer, graph=branchy(), streams=1)
    assert timer.with_lanes == 0
    assert found.streams is None
    timer = FakeTimer(lambda name: 10 * hashed(name), lanes=0.5)
    tuned(timer, graph=branchy(), streams=2)
    assert timer.with_lanes > 1


def test_a_chain_has_no_lanes_to_try() -> None:
    timer = FakeTimer(hashed, lanes=0.5)
    found, tuner = tuned(timer)
    assert timer.with_lanes == 0
    program = lower_cuda(
        tuner.session.graph,
        tuner.session.options,
        of_arch("sm_90a"),
        {},
        prepared=Prepared(found.choices, found.streams),
    )
    assert program.meta["streams"] == {"lanes": 1, "why": "nothing is predicted to gain side by side"}


@pytest.mark.parametrize("wrong", [None, 3, {}, {"most": 9, "forced": True, "us": {}, "one_ms": 1, "lanes_ms": 1}])
def test_what_is_no_record_of_lanes_is_none(wrong: Any) -> None:
    assert LaneChoice.of_plain(wrong) is None
