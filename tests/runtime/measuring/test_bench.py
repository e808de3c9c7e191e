"""Measuring: the statistics, the test of stability, and the report."""

from __future__ import annotations

import gc
import itertools
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from programs import mlp

from optdnn import Engine
from optdnn.errors import RunError, UsageError
from optdnn.ranges import DimRange
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.measuring import bench
from optdnn.runtime.measuring.latency import LatencyStats, measure, sample
from optdnn.runtime.measuring.machine import machine, versions
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
    assert outliers.stable  # single spikes affect max and p99, but not the ranking


def test_too_few_samples_cannot_be_called_stable() -> None:
    s = LatencyStats.of([1000] * 9)
    assert s.spread is None
    assert not s.stable
    with pytest.raises(UsageError, match="no latencies"):
        LatencyStats.of([])


class Clock:
    """A clock that each call of the measured function advances by ``cost`` nanoseconds."""

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


def test_machine_and_versions_are_reported() -> None:
    m = machine()
    assert m["cpu"]
    assert 1 <= m["usable_cores"] <= m["logical_cores"]
    assert m["memory_gib"] is None or m["memory_gib"] > 0
    v = versions()
    assert v["numpy"] == np.__version__
    assert set(v) >= {"optdnn", "python", "numpy", "ml_dtypes"}
    assert "networkx" in v


def test_a_package_that_is_absent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from optdnn.runtime.measuring import machine as module

    monkeypatch.setattr(module, "PACKAGES", ("numpy", "surely-not-installed"))
    assert set(versions()) == {"optdnn", "python", "numpy"}


def test_a_size_is_the_users_then_the_profiles_then_the_typical_one() -> None:
    specs = [TensorSpec("x", np.dtype(np.float32), ("n", "m"))]
    profile = {"n": DimRange(1, 4, 8)}

    def shape(**options: Any) -> tuple[int, ...]:
        return random_feeds(specs, **options)["x"].shape

    typical = {"n": 2, "m": 32, "other": 5}
    assert shape() == (1, 1)
    assert shape(typical=typical) == (2, 32)
    assert shape(typical=typical, profiles=[profile]) == (4, 32)
    assert shape(typical=typical, profiles=[profile], sizes={"n": 6, "m": 7}) == (6, 7)


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


# ---------------------------------------------------------------- further percentiles, and many calls at once


def test_percentiles_that_are_asked_for() -> None:
    s = LatencyStats.of([ms * 1_000_000 for ms in range(1, 102)], [99.9, 50, 99])
    assert s.to_plain()["p99.9"] == pytest.approx(100.9)
    assert list(s.to_plain()) == ["min", "mean", "median", "p90", "p95", "p99", "max", "p99.9", "p50"]


def test_throughput_of_calls_that_ran_at_once_is_over_the_time_of_all() -> None:
    assert LatencyStats.of([10**9] * 4, wall_ns=2 * 10**9).throughput_per_s == pytest.approx(2.0)
    assert LatencyStats.of([10**9] * 4).throughput_per_s == pytest.approx(1.0)


class Slow:
    """An engine whose calls take some time, and that counts concurrent calls."""

    def __init__(self, error: Exception | None = None):
        self.under_way = self.most = self.contexts = 0
        self.lock = threading.Lock()
        self.error = error

    def context(self) -> Slow:
        self.contexts += 1
        return self

    def run(self, feeds: object) -> dict[str, object]:
        if self.error is not None:
            raise self.error
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        time.sleep(0.02)
        with self.lock:
            self.under_way -= 1
        return {}


def test_calls_overlap_and_are_all_counted() -> None:
    slow: Any = Slow()
    found = bench.concurrent([slow], {}, 3, warmup=1, iterations=5)
    assert (found.n, slow.contexts) == (15, 3)
    assert slow.most > 1
    assert found.throughput_per_s > 1.2 / 0.02  # more than sequential calls could reach


def test_a_duration_bounds_every_thread() -> None:
    one, other = Slow(), Slow()
    found = bench.concurrent([one, other], {}, 1, warmup=0, duration=0.1)  # type: ignore[list-item]
    assert 4 <= found.n <= 14


def test_an_error_of_a_call_is_raised() -> None:
    failing: Any = Slow(RunError("it does not run"))
    with pytest.raises(RunError, match="it does not run"):
        bench.concurrent([Slow(), failing], {}, 2, iterations=2)  # type: ignore[list-item]


def test_nothing_at_once_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be measured"):
        bench.concurrent([], {}, 1)


def test_several_calls_at_once_are_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cuda_context", lambda context, feeds: object())
    with pytest.raises(UsageError, match="measure engines for a CPU"):
        bench.bench(Slow(), {}, streams=2)  # type: ignore[arg-type]


def test_layers_are_counted_on_the_cpu_only() -> None:
    from optdnn.runtime.cpu.layers import layer_times

    program: Any = SimpleNamespace(target="reference")
    with pytest.raises(UsageError, match="this engine is for reference"):
        layer_times(program, {}, [1.0], None, 1)


def test_the_names_of_layers_are_those_of_the_model() -> None:
    from optdnn.runtime.cpu import layers

    assert layers._of_model(["a/WithoutBiases", "a", "a/Relu", "b"]) == "a + b"
    assert layers._of_model([]) == layers.LAYOUT
    assert layers.operator_of("a/Add", {"a", "a/Add"}) == "a"
    assert layers.operator_of("/x/Add", {"/Add", "/x/Add"}) == "/x/Add"
    assert layers._written("/patches/Conv_nchwc") == "/patches/Conv"
    assert layers._merged([("a", "k", 1.0), ("b", "l", 0.0), ("a", "m", 3.0)]) == [("a", "m", 4.0)]
