"""The autotuner if candidates or networks fail or hang: the replacements, and the records in the cache."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.timer import FakeTimer, hashed, tactics_of
from support.tuned import branchy, convolution, remembered, tried, tuned

from optdnn.errors import RunError
from optdnn.runtime.cuda.trials.process import CandidateLost, NetworkLost
from optdnn.runtime.cuda.trials.timer import TrialFailed
from optdnn.runtime.program import Program
from optdnn.tuning.timing_cache import TimingCache

pytestmark = pytest.mark.nvrtc


def test_a_gpu_that_fails_ends_the_tuning_and_nothing_is_remembered() -> None:
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


def test_if_the_default_hangs_and_nothing_else_was_tried_another_candidate_is_taken() -> None:
    timer = FakeTimer(hashed)
    defaults = {str(p.default) for p in remembered()[0].problems}

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
    """Lets the networks of a timer hang for whose program ``which`` is true: when they are loaded, or in a race (``in_race``)."""

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
    best, _ = remembered()
    ranked = sorted(convolution(best).times, key=lambda c: convolution(best).times[c])
    timer = FakeTimer(hashed)
    timer.net = lambda tactics: timer._sum(tactics) + 0.002 * sum(t == str(ranked[0]) for t in tactics)
    Hangs(timer, lambda program: str(ranked[1]) in tactics_of(program), in_race=in_race)
    found, _ = tuned(timer)
    assert found.choices[convolution(found).key] == ranked[2]
    assert f"the network with Conv by {ranked[1]}: hung: it has not ended after 20 s" in found.lost


@pytest.mark.parametrize("in_race", [False, True])
def test_the_best_candidates_may_hang_together(in_race: bool) -> None:
    best, _ = remembered()
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
def test_the_cost_models_choice_may_hang(in_race: bool) -> None:
    best, _ = remembered()
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
