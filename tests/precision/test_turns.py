"""Engines timed in turns: rounds, giving up, and comparison within rounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
from precision.nets import perceptron

from optdnn.lowering.steps import lower_reference
from optdnn.precision import turns
from optdnn.precision.turns import identity, in_turns, interquartile_mean, once_each, paired, remembered, turn_of
from optdnn.runtime.engine import Engine
from optdnn.tuning.timing_cache import TimingCache


def counting(log: list[str], name: str, ms: float) -> Callable[[], float]:
    def turn() -> float:
        log.append(name)
        return ms

    return turn


def test_who_begins_changes_and_the_slow_are_given_up() -> None:
    log: list[str] = []
    three = {n: counting(log, n, ms) for n, ms in (("a", 1.0), ("b", 1.2), ("c", 9.0))}
    found = in_turns(three, rounds=4, give_up_ratio=2.0)
    assert log == ["a", "b", "c", "b", "a", "a", "b", "b", "a"]
    assert {n: len(r) for n, r in found.items()} == {"a": 4, "b": 4, "c": 1}


def test_its_time_ends_it_after_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(turns, "RACE_SECONDS", 0.0)
    found = in_turns({n: counting(log, n, 1.0) for n in "ab"}, rounds=9, give_up_ratio=2.0)
    assert {n: len(r) for n, r in found.items()} == {"a": 1, "b": 1}


def test_drift_does_not_decide() -> None:
    """b is 3 % faster in every round, and both get much slower over time. c ran only in the first round."""
    drift = [1.0 + 0.2 * k for k in range(8)]
    found = paired({"a": drift, "b": [0.97 * d for d in drift], "c": [3.0]})
    assert found["a"] / found["b"] == pytest.approx(1 / 0.97)
    assert found["c"] / found["a"] == pytest.approx(3.0)
    assert paired({}) == {}


def test_the_middle_leaves_a_disturbed_round_out_and_weighs_two_kinds() -> None:
    assert interquartile_mean([1.0, 1.0, 50.0, 1.0, 1.0, 20.0, 1.0, 1.0]) == 1.0
    assert interquartile_mean([1.0, 3.0]) == 2.0
    assert interquartile_mean([1.0] * 5 + [2.0] * 5) == pytest.approx(1.5)


def test_the_same_engine_is_measured_once() -> None:
    a, b = (Engine(lower_reference(perceptron(scale), {})) for scale in (1.0, 2.0))
    measured: list[str] = []

    def measure(engines: Mapping[str, Engine]) -> dict[str, int]:
        measured.extend(engines)
        return {n: k for k, n in enumerate(engines)}

    assert identity(a) != identity(b)
    assert once_each({"a": a, "b": b, "again": a}, measure) == {"a": 0, "b": 1, "again": 0}
    assert measured == ["a", "b"]


def test_times_are_remembered_by_engine_and_machine() -> None:
    a, b = (Engine(lower_reference(perceptron(scale), {})) for scale in (1.0, 2.0))
    cache = TimingCache()
    asked: list[list[str]] = []

    def measure(engines: Mapping[str, Engine]) -> dict[str, list[float]]:
        asked.append(sorted(engines))
        return {n: [1.0 + k] for k, n in enumerate(sorted(engines))}

    assert remembered({"a": a, "b": b}, cache, "here", measure) == {"a": 1.0, "b": 2.0}
    assert remembered({"x": b}, cache, "here", measure) == {"x": 2.0}
    assert asked == [["a", "b"]]
    assert remembered({"x": b}, cache, "there", measure) == {"x": 1.0}


def test_a_turn_warms_up_and_takes_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    calls: list[int] = []
    monkeypatch.setattr("optdnn.precision.turns.time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("optdnn.precision.turns.time.sleep", lambda seconds: None)
    assert turn_of(lambda: calls.append(1), seconds=7.0, rest=0.1)() == 1000.0
    assert len(calls) == 2 + 3
