"""Measuring in turns, and the choice."""

from __future__ import annotations

import time

from optdnn.lowering.cpu.base import Measured, fastest, take_turns


def test_the_fastest_is_found_and_slow_ones_are_given_up() -> None:
    order: list[str] = []

    def runner(name: str, seconds: float):  # type: ignore[no-untyped-def]
        def turn(_: float) -> list[float]:
            order.append(name)
            time.sleep(seconds)
            return [seconds * 1e3]

        return turn

    times = take_turns({"slow": runner("slow", 0.02), "quick": runner("quick", 0.002)}, rounds=3, turn_seconds=0.02)
    assert times["quick"] < times["slow"]
    last = len(order) - 1 - order[::-1].index("slow")
    assert "quick" in order[last:], "the slow one must not be measured in later rounds"
    assert 15 <= times["slow"] <= 60


def test_every_runner_is_measured_even_past_the_budget() -> None:
    times = take_turns({"a": lambda s: [10.0], "b": lambda s: [10.0]}, budget_seconds=0.0)
    assert set(times) == {"a", "b"}


def test_a_runner_that_fails_gets_no_time() -> None:
    left = [[2.0], []]
    assert take_turns({"a": lambda s: left.pop(0), "b": lambda s: [2.1]}, rounds=3, turn_seconds=0.0) == {"b": 2.1}
    assert take_turns({"a": lambda s: []}) == {}


def test_refused_candidates_never_win() -> None:
    rows = [Measured("a", {}, refused="no"), Measured("b", {}, median_ms=2.0), Measured("c", {}, median_ms=1.0)]
    best = fastest(rows)
    assert best is not None
    assert best.name == "c"
    assert fastest(rows[:1]) is None
    assert rows[0].to_json() == {"tactic": "a", "refused": "no"}
    assert Measured("b", {"threads": 2}, median_ms=2.0, cached=True).to_json() == {
        "tactic": "b",
        "threads": 2,
        "median_ms": 2.0,
        "cached": True,
    }
