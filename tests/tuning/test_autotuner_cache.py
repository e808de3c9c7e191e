"""The autotuner uses the times of earlier builds: which candidates are not measured again, and which facts must agree."""

from __future__ import annotations

from typing import Any

import pytest
from support.timer import FakeTimer, hashed
from support.tuned import convolution, remembered, tuned

import optdnn.tuning.timing_keys
from optdnn.lowering.choose import TacticChoice
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.tuning.timing_cache import NetworkChoices, TimingCache

pytestmark = pytest.mark.nvrtc


def test_a_second_build_measures_nothing() -> None:
    first, cache = remembered()
    timer = FakeTimer(hashed)
    again, _ = tuned(timer, cache)
    assert timer.trials == []
    assert again.cached
    assert again.choices == first.choices
    assert again.after_ms == pytest.approx(first.after_ms, abs=1e-5)


def test_a_build_with_the_same_budget_measures_nothing_and_one_with_more_continues() -> None:
    cache = TimingCache()
    budget = 14.0  # the budget ends during the trials in the network
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
    first, cache = remembered()
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
def test_facts_that_must_agree(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache = remembered()
    options: dict[str, Any] = {}
    timer = FakeTimer(hashed, device="other GPU" if change == "device" else "GPU")
    if change == "kernels":
        monkeypatch.setattr(Recipe, "digest", lambda self, *first: "0" * 64)
        monkeypatch.setattr(optdnn.tuning.timing_keys, "template_files", dict)
    if change == "workspace":
        options["workspace"] = 1 << 30
    again, _ = tuned(timer, cache, **options)
    assert not again.cached
    assert bool(timer.trials) == (change != "workspace"), "candidates' times hold, whatever may be chosen"


def test_a_remembered_choice_that_no_longer_exists_is_made_again() -> None:
    first, cache = remembered()
    (key,) = cache.networks
    cache.note_network(key, NetworkChoices({k: TacticChoice("gone") for k in first.choices}, 1.0, {"driver": "1"}))
    again, _ = tuned(FakeTimer(hashed), cache)
    assert not again.cached
    assert again.choices == first.choices


def test_choices_for_other_problems_are_not_taken() -> None:
    first, cache = remembered()
    (key,) = cache.networks
    again, _ = tuned(FakeTimer(hashed), cache)
    assert again.cached
    assert again.emitted is not None
    cache.networks[key]["problems"] = "0" * 32  # as written by a version that lowers this network in another way
    again, _ = tuned(FakeTimer(hashed), cache)
    assert not again.cached
    assert again.choices == first.choices
    (row,) = cache.networks.values()
    assert row["problems"] != "0" * 32
