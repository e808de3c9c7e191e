"""Automatic precision on the CPU's own libraries: times, mixtures, the cost of casts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from precision.nets import perceptron
from precision.numpy_driver import CAST, DATA, Numpy
from support.needs import needs_libraries

from optdnn.config import BuildOptions
from optdnn.ir.evaluate import evaluate
from optdnn.passes.support import quantize
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.precision import search
from optdnn.precision.cpu_target import CpuTarget
from optdnn.precision.latency import Timed
from optdnn.precision.plans import Node, Problem
from optdnn.precision.search_report import Candidate, NodeFacts, Reasons
from optdnn.precision.sensitivity import Sensitivity
from optdnn.precision.targets import assigned
from optdnn.runtime.engine import Engine
from optdnn.tuning.timing_cache import TimingCache

needs_libraries()


@pytest.fixture(autouse=True)
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have eight bits on every processor."""
    monkeypatch.setattr(quantize, "bytes_saturate", lambda: False)


def test_a_mixture_of_bf16_and_fp32_on_the_cpu_runs_as_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CpuTarget(BuildOptions(target="cpu", threads=1), TimingCache(), calibrated=False)
    if "bf16" not in driver.offers:
        pytest.skip("this processor has no native bf16 arithmetic")
    graph = perceptron()
    plan = PrecisionPlan(nodes={"first.out": "bf16", "second.out": "fp32", "head.out": "bf16"})
    mixed, _ = assigned(graph, plan, "cpu", None)
    engine = driver.quick(mixed, plan, "openvino")
    feeds = {"x": DATA["x"][:8]}
    np.testing.assert_allclose(engine.run(feeds)["y"], evaluate(mixed, feeds)["y"], rtol=2e-2, atol=1e-2)
    executed = engine.facts[0]["executed"]
    assert executed["bf16"] >= 2
    assert executed["f32"] >= 1


def test_the_cpu_target_times_ops_and_keeps_the_times() -> None:
    cache = TimingCache()
    graph = perceptron()
    driver = CpuTarget(BuildOptions(target="cpu", threads=1, tactics="openvino"), cache, calibrated=False)
    (times,) = driver.operator_times(graph, None, lambda text: None)
    assert times.library == "openvino"
    assert {"first.out", "second.out", "head.out"} <= set(times.table)
    total = sum(row["fp32"].us for row in times.table.values())
    assert total <= next(us for k, us in cache.entries.items() if k.endswith(" whole")) * 1.001
    again = CpuTarget(BuildOptions(target="cpu", threads=1, tactics="openvino"), cache, calibrated=False)
    (kept,) = again.operator_times(graph, None, lambda text: None)
    assert kept.table == times.table


def test_a_precision_that_the_library_lacks_is_no_reason_to_fail() -> None:
    """OpenVINO offers bf16, ONNX Runtime does not. The reasons of a mixture of ONNX Runtime name this."""
    key = "first.out"
    node = NodeFacts(
        key=key, kind="Gemm", nodes=("first",), precision="int8", times={"fp32": Timed(10.0), "int8": Timed(3.0)},
        sensitivity={p: Sensitivity(0.1, 0.01, 0.0) for p in ("int8", "bf16")}, refused={}, pin=None, follows=False,
    )  # fmt: skip
    problem = Problem([Node(key, {"fp32": 10.0, "int8": 3.0}, {"fp32": 0.0, "int8": 0.01})], [], lambda a, b, n: 0.0)
    mixture = Candidate("mixture 1", PrecisionPlan(), {key: "int8"}, library="onnxruntime")
    reason = Reasons(mixture, [mixture], problem, 0.5, "points").of(node)
    assert "int8 is faster than fp32 here: 3.0 µs against 10.0 µs" in reason
    assert reason.endswith("; bf16 is not a precision of onnxruntime here")


def test_the_cost_of_casts_is_learned_from_whole_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts are first assumed to take half a microsecond, but take 6: the first mixture loses to that of a second search."""
    times = {
        "first.out": {"fp32": 10.0, "bf16": 8.0, "int8": 5.0},
        "second.out": {"fp32": 10.0, "bf16": 8.0, "int8": 30.0},
        "head.out": {"fp32": 20.0, "bf16": 9.0, "int8": 30.0},
    }
    believed, real = CAST, 6.0

    class Dear(Numpy):
        def milliseconds(self, plan: PrecisionPlan) -> float:
            asked = ["fp32", *(plan.nodes.get(k, plan.default) for k in self.times), "fp32"]
            casts = sum(a != b for a, b in itertools.pairwise(asked)) if len({*asked[1:-1]}) > 1 else 0
            return super().milliseconds(plan) + casts * (real - believed) / 1e3

        def race(self, engines: Mapping[str, Engine], say: Any) -> dict[str, float]:
            races.append(set(engines))
            return super().race(engines, say)

    races: list[set[str]] = []
    said: list[str] = []
    monkeypatch.setattr(search, "target_of", lambda *a, **k: Dear(offers=("fp32",), times=times))
    options = BuildOptions(target="cpu", precision="auto", calib=DATA, budget=30.0, metric="cosine", max_drop=0.5)
    found = search.search_precisions(perceptron(), options, "cpu", TimingCache(), said.append)
    assert any("casts cost" in text for text in said)
    assert len(races) > 1
    assert all(a <= b for a, b in itertools.pairwise(races)), "times of one race are compared"
    tried = [c for c in found.report.candidates if not c.single and c.ms is not None]
    chosen = found.report.candidate()
    assert chosen.ms == min(c.ms for c in tried if c.ms is not None)
    assert chosen.assignment["first.out"] != "int8"  # the times of single ops would have chosen it
    assert tried[0].assignment["first.out"] == "int8"
