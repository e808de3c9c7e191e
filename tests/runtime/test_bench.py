"""Measuring: the statistics, the judgement of stability, and the report."""

from __future__ import annotations

import gc
import itertools
import json
from typing import Any

import numpy as np
import pytest
from programs import mlp

from optdnn import Engine
from optdnn.errors import UsageError
from optdnn.runtime import bench
from optdnn.runtime.bench import LatencyStats, measure, sample
from optdnn.runtime.feeds import random_feeds
from optdnn.runtime.machine import machine, versions
from optdnn.types import BF16, TensorSpec

X = np.ones((2, 5), np.float32)


def test_statistics_of_known_latencies() -> None:
    s = LatencyStats.of([ms * 1_000_000 for ms in range(1, 102)])
    assert (s.min, s.median, s.p90, s.p95, s.p99, s.max, s.mean) == (1, 51, 91, 96, 100, 101, 51)
    assert s.n == 101
    assert s.throughput_per_s == pytest.approx(1000 / 51)
    assert list(s.to_plain()) == ["min", "mean", "median", "p90", "p95", "p99", "max"]


def test_a_machine_that_slows_down_is_unstable() -> None:
    steady = [1_000_000 + 1000 * (i % 7) for i in range(100)]
    assert LatencyStats.of(steady).stable
    slowing = LatencyStats.of([1_000_000 + 3000 * i for i in range(100)])
    assert slowing.spread == pytest.approx(0.24 / 1.1485, rel=1e-3)
    assert not slowing.stable
    outliers = LatencyStats.of([t * 30 if i % 25 == 0 else t for i, t in enumerate(steady)])
    assert outliers.stable  # single spikes show in max and p99, and do not spoil the ranking


def test_too_few_samples_cannot_be_called_stable() -> None:
    s = LatencyStats.of([1000] * 9)
    assert s.spread is None
    assert not s.stable
    with pytest.raises(UsageError, match="no latencies"):
        LatencyStats.of([])


class Clock:
    """A clock that each call of the measured function moves by ``cost`` nanoseconds."""

    def __init__(self, cost: int):
        self.now, self.cost, self.calls = 0, cost, 0

    def __call__(self) -> int:
        return self.now

    def work(self) -> None:
        self.calls += 1
        self.now += self.cost


def test_iterations_and_warmup_are_counted() -> None:
    clock = Clock(5_000_000)
    s = measure(clock.work, warmup=3, iterations=20, clock=clock)
    assert clock.calls == 23
    assert (s.n, s.median, s.spread) == (20, 5, 0)


def test_duration_bounds_the_measurement() -> None:
    clock = Clock(100_000_000)
    assert measure(clock.work, warmup=2, duration=1.05, clock=clock).n == 11
    assert clock.calls == 13
    slow = Clock(10**12)
    assert measure(slow.work, warmup=0, duration=0.01, clock=slow).n == 1  # at least one


@pytest.mark.parametrize(
    "bounds",
    [{"iterations": 0}, {"duration": 0.0}, {"duration": 1.0, "iterations": 1}, {"iterations": 1, "warmup": -1}],
)
def test_contradicting_bounds_are_refused(bounds: Any) -> None:
    with pytest.raises(UsageError, match=r"nothing to measure|not both"):
        sample(lambda: None, **bounds)


def test_garbage_collection_is_off_while_measuring_and_back_on_after() -> None:
    seen = []
    sample(lambda: seen.append(gc.isenabled()), warmup=1, iterations=3)
    assert seen == [True, False, False, False]
    assert gc.isenabled()
    counter = itertools.count()
    with pytest.raises(ZeroDivisionError):
        sample(lambda: 1 // (2 - next(counter)), warmup=0, iterations=5)
    assert gc.isenabled()


def test_report_holds_the_contract() -> None:
    engine = Engine(mlp())
    report = bench.bench(engine, {"x": X}, warmup=2, iterations=30, with_profile=True)
    assert report == json.loads(json.dumps(report))
    assert list(report["latency_ms"]) == ["min", "mean", "median", "p90", "p95", "p99", "max"]
    assert 0 < report["latency_ms"]["min"] <= report["latency_ms"]["median"] <= report["latency_ms"]["max"]
    assert report["throughput_per_s"] > 0
    assert (report["target"], report["precision"], report["iterations"]) == ("reference", "fp32", 30)
    assert report["inputs"] == {"x": [2, 5]}
    assert report["facts"][0]["library"] == "numpy"
    assert [row["src"] for row in report["profile"]] == [["dense1"], ["dense1"], ["relu1"], ["dense2"]]
    assert sum(row["share"] for row in report["profile"]) == pytest.approx(1)
    assert all(row["median_ms"] > 0 for row in report["profile"])


def test_machine_and_versions_are_told() -> None:
    m = machine()
    assert m["cpu"]
    assert 1 <= m["usable_cores"] <= m["logical_cores"]
    assert m["memory_gib"] is None or m["memory_gib"] > 0
    v = versions()
    assert v["numpy"] == np.__version__
    assert set(v) >= {"optdnn", "python", "numpy", "ml_dtypes"}
    assert "networkx" in v


def test_a_package_that_is_absent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from optdnn.runtime import machine as module

    monkeypatch.setattr(module, "PACKAGES", ("numpy", "surely-not-installed"))
    assert set(versions()) == {"optdnn", "python", "numpy"}


def test_random_feeds_fit_the_engine_and_repeat() -> None:
    specs = [
        TensorSpec("x", np.dtype(np.float32), ("n", 5)),
        TensorSpec("h", BF16, ("n", "m")),
        TensorSpec("i", np.dtype(np.int64), (2,)),
        TensorSpec("b", np.dtype(np.bool_), ()),
        TensorSpec("c", np.dtype(np.complex64), (1,)),
    ]
    feeds = random_feeds(specs, sizes={"n": 3})
    assert {n: a.shape for n, a in feeds.items()} == {"x": (3, 5), "h": (3, 1), "i": (2,), "b": (), "c": (1,)}
    assert all(feeds[s.name].dtype == s.dtype for s in specs)
    again = random_feeds(specs, sizes={"n": 3})
    other = random_feeds(specs, sizes={"n": 3}, seed=1)
    assert all((feeds[k] == again[k]).all() for k in feeds)
    assert (feeds["x"] != other["x"]).any()
    assert Engine(mlp()).run({"x": feeds["x"]})["y"].shape == (3, 3)
    with pytest.raises(UsageError, match="no input has a dimension batch; there are m, n"):
        random_feeds(specs, sizes={"batch": 3})
