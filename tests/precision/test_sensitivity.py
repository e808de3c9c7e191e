"""Errors of single ops, and their effect on the outputs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from precision.nets import data, perceptron

from optdnn.calibration import calibrate
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph, Op
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.precision import PrecisionPlan, key
from optdnn.precision.inject import Injector, noise
from optdnn.precision.metrics import metric_of
from optdnn.precision.samples import Samples
from optdnn.precision.sensitivity import (
    Sensitivities,
    Sensitivity,
    StoredSensitivities,
    batches_of,
    mean_sensitivity,
    measure_sensitivities,
)
from optdnn.types import Array

pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")

DATA = data()


def ops(graph: Graph) -> list[Op]:
    return graph.of_kind("Gemm")


def measured(graph: Graph, precisions: tuple[str, ...], target: str = "cpu", **options: Any) -> Sensitivities:
    calibration = calibrate(graph, {"x": DATA["x"]}, "minmax")
    return measure_sensitivities(
        graph,
        [(op, ("fp32", *precisions)) for op in ops(graph)],
        [Samples({"x": DATA["x"][:32]}, DATA["labels"][:32])],
        metric_of("top1", DATA["labels"]),
        target=target,
        calibration=calibration,
        **options,
    )


def whole(graph: Graph, node: str, precision: str) -> dict[str, Array]:
    """The results of the whole network with one op at a precision, which the sensitivity predicts."""
    copy = graph.copy()
    calibration = calibrate(graph, {"x": DATA["x"]}, "minmax")
    plan = PrecisionPlan(nodes={node: precision})
    AssignPrecision()(copy, PassContext(target="cpu", plan=plan, calibration=calibration))
    return evaluate(copy, {"x": DATA["x"][:32]})


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_noise_is_that_of_the_network_with_this_op_alone_at_the_precision(precision: str) -> None:
    graph = perceptron()
    found = measured(graph, (precision,))
    clean = evaluate(graph, {"x": DATA["x"][:32]})
    for op in ops(graph):
        got = found.table[key(op), precision]
        want = noise(whole(graph, key(op), precision), clean)
        assert got.noise == pytest.approx(want, rel=0.02)
        assert 0 < got.noise < 0.05
        assert got.error > 0
        assert found.table[key(op), "fp32"].noise == 0.0
    assert found.library in ("openvino", "onnxruntime")


def test_int8_disturbs_more_than_bf16() -> None:
    found = measured(perceptron(), ("bf16", "int8"))
    for op in ops(perceptron()):
        assert found.table[key(op), "int8"].noise > 2 * found.table[key(op), "bf16"].noise


def test_an_overflow_of_fp16_is_named_with_its_size_and_node() -> None:
    graph = perceptron(scale=1e5)
    found = measured(graph, ("fp16", "bf16"), target="cuda:sm_90a")
    hit = found.table["second.out", "fp16"]
    assert hit.noise == float("inf")
    assert hit.hazard is not None
    assert hit.hazard.startswith("overflow at ")
    assert "second" in hit.hazard
    assert found.table["second.out", "bf16"].hazard is None
    assert np.isfinite(found.table["second.out", "bf16"].noise)
    assert found.table["first.out", "fp16"].hazard is None


def test_an_underflow_of_fp16_is_named() -> None:
    found = measured(perceptron(scale=1e-9), ("fp16",), target="cuda:sm_90a")
    assert "underflow" in (found.table["second.out", "fp16"].hazard or "")


def test_operators_left_at_the_deadline_are_judged_by_their_own_error() -> None:
    found = measured(perceptron(), ("bf16",), deadline=time.perf_counter() - 1)
    assert found.skipped == 3
    for op in ops(perceptron()):
        s = found.table[key(op), "bf16"]
        assert s.noise == pytest.approx(s.error**2)
        assert np.isnan(s.drop)


def test_an_injected_error_arrives_as_if_it_had_been_there() -> None:
    graph = perceptron()
    feeds = {"x": DATA["x"][:8]}
    first = ops(graph)[0]
    injector = Injector(graph, [op.value for op in ops(graph)], [], feeds)
    error = np.full_like(injector.recorded["first.out"], 0.25)
    got = injector.outputs("first.out", error)["y"]
    after = Graph("rest")
    value = after.add_input("h", graph.type(first.value))
    for op in ops(graph)[1:]:
        constants = [after.add_constant(graph.constant_value(v), "c") for v in op.inputs[1:]]  # type: ignore[arg-type]
        value = after.add("Gemm", [value, *constants], op.attrs).value
    after.add_output(value, "y")
    want = evaluate(after, {"h": injector.recorded["first.out"] + error})["y"]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert not np.allclose(got, injector.clean["y"], atol=1e-3)


def test_noise_counts_variation_not_power() -> None:
    """For an output of 100 +- 1, only errors well below 1 are small."""
    clean = {"y": 100 + np.array([[1.0], [-1.0], [1.0], [-1.0]])}
    off = {"y": clean["y"] + 0.5}
    assert noise(off, clean) == pytest.approx(0.25)
    bad = {"y": np.array([[np.nan], [99.0], [101.0], [99.0]])}
    assert noise(bad, clean) == float("inf")


def test_sensitivities_are_kept_for_the_same_network_and_data(tmp_path: Path) -> None:
    graph, path = perceptron(scale=1e5), tmp_path / "c.sensitivity.json"
    first = measured(graph, ("fp16", "bf16"), target="cuda:sm_90a", stored=StoredSensitivities(path, "one"))
    again = measured(graph, ("fp16", "bf16"), target="cuda:sm_90a", stored=StoredSensitivities(path, "one"))
    assert again.library == "the cache"
    assert again.table == first.table  # including infinite ones and their hazards
    assert StoredSensitivities(path, "other").table == {}
    path.write_text("{")
    assert StoredSensitivities(path, "one").table == {}
    late = measured(graph, ("bf16",), stored=StoredSensitivities(path, "one"), deadline=time.perf_counter() - 1)
    assert late.skipped == 3
    assert all(p == "fp32" for _, p in StoredSensitivities(path, "one").table)  # estimates are not kept


def test_sensitivities_of_several_batches_are_averaged() -> None:
    found = mean_sensitivity([Sensitivity(0.3, 0.1, 1.0), Sensitivity(0.4, 0.3, 0.0, "overflow")])
    assert found.error == pytest.approx(np.sqrt(0.125))
    assert (found.noise, found.drop, found.hazard) == (pytest.approx(0.2), 0.5, "overflow")


@pytest.mark.slow
def test_a_network_of_a_small_batch_is_measured_on_several() -> None:
    samples = Samples({"x": DATA["x"]}, DATA["labels"])
    assert [len(part) for part in batches_of(perceptron(), samples)] == [32]
    small = import_model(export_model(perceptron()).proto, shapes={"x": (3, 16)})
    parts = batches_of(small, samples)
    assert [len(part) for part in parts] == [3] * 4
    wanted = [(op, ("bf16",)) for op in small.of_kind("Gemm")]
    facts: dict[str, Any] = {"target": "cpu", "calibration": None}
    metric = metric_of("top1", DATA["labels"])
    found = measure_sensitivities(small, wanted, parts, metric, **facts).table
    each = [measure_sensitivities(small, wanted, [part], metric, **facts).table for part in parts]
    for item, one in found.items():
        assert one.noise == pytest.approx(np.mean([t[item].noise for t in each]))
