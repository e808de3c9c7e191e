"""Axes and shapes of the charts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from optdnn.report import charts


def row(values: Any, rounds: Any = (1.0,), name: str = "a") -> dict[str, Any]:
    q = np.percentile(np.asarray(values, float), range(101))
    return {
        "name": name,
        "quantiles_ms": q.tolist(),
        "median_ms": q[50],
        "p99_ms": q[99],
        "round_medians_ms": list(rounds),
    }


@pytest.mark.parametrize(
    ("values", "log", "labels"),
    [
        ([1.0, 1.9], False, ["1.0", "1.2", "1.4", "1.6", "1.8"]),
        ([10.0, 11.0], False, ["10.0", "10.2", "10.4", "10.6", "10.8", "11.0"]),
        ([1.0, 100.0], True, ["1", "2", "5", "10", "20", "50", "100"]),
        ([0.001, 5000.0], True, ["1e-3", "0.01", "0.1", "1", "10", "100", "1000"]),
        ([3.0, 3.0], False, ["2.7", "2.8", "2.9", "3.0", "3.1", "3.2", "3.3"]),
        ([0.0003, 0.0004], False, None),
    ],
)
def test_axes(values: list[float], log: bool, labels: list[str] | None) -> None:
    axis = charts.axis_over(values)
    assert axis.log is log
    assert 0 <= axis.at(min(values)) <= 50 <= axis.at(max(values)) <= 100
    if labels is not None:
        assert [t for _, t in axis.ticks] == labels
    assert 3 <= len(axis.ticks) <= 9
    assert [at for at, _ in axis.ticks] == sorted({at for at, _ in axis.ticks})
    assert axis.at(1e12) == 100
    assert axis.at(0) == 0


def test_a_violin_shows_where_the_calls_lie() -> None:
    rng = np.random.default_rng(0)
    fast, slow = rng.normal(10, 0.2, 2000), rng.normal(20, 2, 2000)
    axis, (a, none, b) = charts.violins([row(fast, (10, 10.2)), {"quantiles_ms": []}, row(slow)])
    assert none is None
    assert a is not None
    assert b is not None
    assert not axis.log
    assert a.median == pytest.approx(axis.at(10), abs=0.3)
    assert a.median < a.p99 < b.median < b.p99
    assert a.rounds == (axis.at(10), axis.at(10.2))
    for violin, center in ((a, 10), (b, 20)):
        points = [tuple(map(float, p.split(","))) for p in re.findall(r"[\d.-]+,[\d.-]+", violin.path)]
        widest = min(points, key=lambda p: p[1])
        assert widest[1] == pytest.approx(charts.MIDDLE - charts.HALF_HEIGHT, abs=0.01)
        assert widest[0] / 10 == pytest.approx(axis.at(center), abs=2.5)


def test_constant_latencies_are_still_a_shape() -> None:
    _, (violin,) = charts.violins([row([5.0] * 10)])
    assert violin is not None
    assert "nan" not in violin.path


def test_errors_exact_unknown_and_large() -> None:
    rows = [{"max_rel_err": e, "error": x} for e, x in ((0, None), (1e-6, None), (None, "crashed"), (30.0, None))]
    axis, dots, difference = charts.error_axis({"rows": rows, "input_difference": 0.5})
    assert dots == [0, axis.at(1e-6), None, axis.at(30)]
    assert axis.high == 100
    assert difference == axis.at(0.5)
    assert charts.error_axis({"rows": rows, "input_difference": None})[2] is None


def test_the_profile_follows_the_network() -> None:
    layers = [
        {"position": 4, "max_rel_err": None, "operator": "Conv", "node": "c"},
        {"position": 0, "max_rel_err": 0.0, "operator": "Relu", "node": "a"},
        {"position": 2, "max_rel_err": 1e-3, "operator": "Add", "node": "b"},
    ]
    profile = charts.error_profile(layers, 1e-4)
    assert [(x, hint) for x, _, hint in profile.points] == [(0, "Relu a"), (500, "Add b"), (1000, "Conv c")]
    zero, small, broken = (y for _, y, _ in profile.points)
    assert zero == 200
    assert broken == 0
    assert small < profile.tolerance < 200  # larger errors are higher


def test_bars() -> None:
    bars = charts.operator_bars({"Conv": 4, "Relu": 8}, {"Conv": 4, "Split": 1})
    assert [(b.label, b.before, b.after, b.before_percent, b.after_percent) for b in bars] == [
        ("Relu", 8, 0, 100, 0),
        ("Conv", 4, 4, 50, 50),
        ("Split", 0, 1, 0, 12.5),
    ]
    tactics = [{"tactic": "a", "median_ms": 2.0}, {"tactic": "b", "refused": "no"}, {"tactic": "c", "median_ms": 1.0}]
    assert [p for _, p in charts.tactic_bars(tactics)] == [100, None, 50]
