"""Angles that grow with an input stay in fp32 up to their sines; angles that a layer computes do not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.check import from_text

import optdnn
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.angles import angles
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.types import FP16, FP32

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'
EMBEDDING = (
    HEAD
    + """g (float[2] t, float[2,4] x, float[8,8] w) => (float[2,8] y)
<float[4] f = {1.0, 0.5, 0.25, 0.125}, float thousand = {1000}, int64[1] one = {1}>
{ s = Mul(t, thousand) u = Unsqueeze(s, one) a = Mul(u, f) b = Sin(a) c = Cos(a) e = Concat<axis = 1>(b, c)
  d = Concat<axis = 1>(x, x) h = Add(e, d) y = MatMul(h, w) }"""
)


def names(text: str) -> set[str]:
    graph = from_text(text)
    return {graph.op(i).outputs[0].name for i in angles(graph)}


def test_time_steps_stay_fp32_up_to_their_sines() -> None:
    graph = from_text(EMBEDDING)
    assert {graph.op(i).outputs[0].name for i in angles(graph)} == {"s", "u", "a", "b", "c"}
    report = AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=PrecisionPlan("fp16")))
    verify(graph)
    types = {
        op.outputs[0].name: op.outputs[0].type.dtype for op in graph.order() if op.kind not in ("Input", "Constant")
    }
    assert types["a"] == FP32
    assert types["h"] == FP16
    assert any("angle of Sin b from inputs" in r.reason for r in report.refused)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_sines_of_large_angles_are_right(precision: str) -> None:
    """Rounded angles would differ by up to half a radian in fp16, and by four in bf16."""
    proto = onnx.parser.parse_model(
        EMBEDDING.replace("y = MatMul(h, w)", "y = Identity(h)").replace(", float[8,8] w", "")
    )
    x = np.zeros((2, 4), np.float32)
    feeds = {"t": np.array([0.999, 0.7171], np.float32), "x": x}
    found = optdnn.build(proto, target="simulate", precision=precision).run(feeds)["y"]
    want = np.outer(feeds["t"] * 1000, [1.0, 0.5, 0.25, 0.125])
    np.testing.assert_allclose(found, np.concatenate([np.sin(want), np.cos(want)], 1), atol=5e-3)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("g (int64[1,6] p, float[1,1,4] f) => (float[1,6,4] y) <int64[1] two = {2}> "
         "{ q = Cast<to = 1>(p) u = Unsqueeze(q, two) a = MatMul(u, f) y = Cos(a) }", {"q", "u", "a", "y"}),
        ("g (float[1,9] f0) => (float[1,9] y) <int64 one = {1}> { a = CumSum(f0, one) y = Sin(a) }", {"a", "y"}),
        ("g (float[6] t) => (float[3] y) <int64[2] n = {3, 3}> { a, b = Split(t, n) c = Mul(a, b) y = Sin(c) }",
         {"a", "c", "y"}),
        ("g (float[5,4] x, float[4,4] w) => (float[5,4] y) { a = MatMul(x, w) y = Sin(a) }", set()),
        ("g (float[1,2,6] x, float[2,2,1] w, float[2,1] s) => (float[1,2,6] y) { c = Conv(x, w) a = Mul(c, s) y = Sin(a) }",
         set()),
        ("g (float[5,4] x) => (float[5,4] y) { y = Tanh(x) }", set()),
    ],
    ids=["positions", "phases", "parts of an input", "a product", "a convolution", "no sine"],
)  # fmt: skip
def test_operators_that_compute_angles(text: str, kept: set[str]) -> None:
    assert names(HEAD + text) == kept


def test_a_plan_that_names_the_operator_is_obeyed() -> None:
    graph: Graph = from_text(EMBEDDING)
    (sine,) = graph.of_kind("Sin")
    plan = PrecisionPlan("fp16", nodes={next(iter(sine.src)): "fp16"})
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=plan))
    assert graph.of_kind("Sin")[0].outputs[0].type.dtype == FP16
