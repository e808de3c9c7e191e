"""The autotuner with a made-up timer: its trials, when it stops, and its choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from support.timer import FakeTimer, hashed
from support.tuned import TARGET, convolution, network, remembered, tried, tuned

from optdnn.config import BuildOptions
from optdnn.errors import RunError
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.trials.timer import TrialFailed
from optdnn.runtime.program import Program
from optdnn.tuning import candidate_stage
from optdnn.tuning.autotuner import Tuner
from optdnn.tuning.timing_cache import TimingCache

pytestmark = pytest.mark.nvrtc


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
    """If candidates take their predicted times, the first wave is enough. If the model may err widely, all are tried."""
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


def test_interruption_in_the_network_keeps_better_choices() -> None:
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


def test_the_network_decides_between_near_equal_candidates() -> None:
    """The candidate that is fastest alone slows its neighbors down: in the network, the second one is chosen."""
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


def test_the_models_choice_is_kept_where_it_was_right_about_the_network() -> None:
    defaults = {"", *(str(p.default) for p in remembered()[0].problems)}

    def net(tactics: Sequence[str]) -> float:
        return 1.0 + 0.1 * sum(t not in defaults for t in tactics)

    again, _ = tuned(FakeTimer(hashed, net))
    assert all(again.choices[p.key] == p.default for p in again.problems if p.key in again.choices)
    assert again.after_ms == again.before_ms


def test_a_gpu_without_room_for_another_network_has_each_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"", *(str(p.default) for p in remembered()[0].problems)}
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


# ---------------------------------------------------------------- measuring and reports


@pytest.mark.parametrize("l2", [1 << 10, 60 << 20])
def test_weights_are_cold_where_the_network_does_not_fit_the_cache(l2: int) -> None:
    timer = FakeTimer(hashed, l2=l2)
    tuned(timer)
    assert timer.regimes == {l2 == 1 << 10}


def test_progress_shows_the_remaining_work_and_the_best_time() -> None:
    said: list[str] = []
    tuned(FakeTimer(hashed), say=said.append)
    assert any("s left" in t and " us; sum " in t for t in said)
    assert any("in the network" in t and " ms" in t for t in said)
