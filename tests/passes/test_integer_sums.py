"""Sums of integers are scaled in fp32: they leave fp16's range (ONNX Runtime's dynamic quantization)."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.check import from_text

import optdnn
from optdnn.ir.verify import verify
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.integer_sums import integer_sums
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.types import FP16, FP32

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'
PRODUCT = (
    HEAD
    + """g (float[4,6] x, int8[6,5] w) => (float[4,5] y) <float scale = {0.01}, int8 zero = {0}, float[5] bias = {1,2,3,4,5}>
{ q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, w, z, zero) f = Cast<to = 1>(p) both = Mul(s, scale)
  m = Mul(f, both) a = Add(m, bias) y = Relu(a) }"""
)


def names(text: str) -> set[str]:
    graph = from_text(text)
    return {graph.op(i).outputs[0].name for i in integer_sums(graph)}


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("", "", {"f", "both", "m"}),
        ("both = Mul(s, scale)\n  m = Mul(f, both)", "g = Mul(f, s) m = Mul(g, scale)", {"f", "g", "m"}),
        ("m = Mul(f, both)", "m = Div(f, both)", {"f", "both", "m"}),
        ("m = Mul(f, both)", "m = Mul(both, both)", {"f"}),
        (
            "MatMulInteger(q, w, z, zero) f = Cast<to = 1>(p)",
            "Cast<to = 1>(q) v = Cast<to = 1>(w) f = MatMul(p, v)",
            set(),
        ),
    ],
    ids=["a scale of two", "two scales", "a division", "no scale", "no integers"],
)
def test_scales_of_sums_of_integers(old: str, new: str, kept: set[str]) -> None:
    assert names(PRODUCT.replace(old, new)) == kept


BETWEEN = {
    "a view": "j = Transpose<perm = [1, 0]>(p) f0 = Cast<to = 1>(j) f = Transpose<perm = [1, 0]>(f0)",
    "a sum": "j = Add(p, p) f = Cast<to = 1>(j)",
    "a larger integer": "j = Cast<to = 7>(p) f = Cast<to = 1>(j)",
    "an extreme": "one = Constant<value_ints = [1]>() j = ReduceMax<axes = [1]>(p) f0 = Cast<to = 1>(j) f = Add(f0, f0)",
}


@pytest.mark.parametrize("name", BETWEEN)
def test_operators_between_the_sums_and_their_scale(name: str) -> None:
    text = PRODUCT.replace("f = Cast<to = 1>(p)", BETWEEN[name])
    kept = {"f", "both", "m"} | ({"f0"} if "f0" in BETWEEN[name] else set())
    assert names(text) == kept


def test_a_comparison_of_sums_is_small() -> None:
    assert names(PRODUCT.replace("f = Cast<to = 1>(p)", "j = Greater(p, p) f = Cast<to = 1>(j)")) == set()
    assert names(PRODUCT.replace("f = Cast<to = 1>(p)", "j = Cast<to = 3>(p) f = Cast<to = 1>(j)")) == set()


@pytest.mark.parametrize("name", ["a view", "a sum", "a larger integer"])
def test_long_sums_that_are_read_by_others_are_right(name: str) -> None:
    text = PRODUCT.replace("f = Cast<to = 1>(p)", BETWEEN[name]).replace("a = Add(m, bias) y = Relu(a)", "y = Relu(m)")
    text = text.replace("float[4,6] x, int8[6,5] w", "float[16,512] x").replace("float[4,5] y", "float[16,64] y")
    proto = onnx.parser.parse_model(text)
    w = np.random.default_rng(0).integers(-127, 128, (512, 64)).astype(np.int8)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    feeds = {"x": np.random.default_rng(1).uniform(-1, 3, (16, 512)).astype(np.float32)}
    want = optdnn.build(proto, target="reference").run(feeds)["y"]
    found = optdnn.build(proto, target="simulate", precision="fp16").run(feeds)["y"]
    np.testing.assert_allclose(found, want, atol=2e-2 * want.std())


def test_they_are_scaled_in_fp32_and_stored_in_fp16() -> None:
    graph = from_text(PRODUCT)
    report = AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=PrecisionPlan("fp16")))
    verify(graph)
    types = {
        op.outputs[0].name: op.outputs[0].type.dtype for op in graph.order() if op.kind not in ("Input", "Constant")
    }
    assert types["f"] == FP32
    assert types["a"] == FP16
    assert any("leave fp16's range" in r.reason for r in report.refused)


@pytest.mark.slow
def test_a_long_sum_is_right() -> None:
    """Sums of 2048 products; fp16 would overflow after three. The trial run skips networks of this size."""
    rng = np.random.default_rng(0)
    w = rng.integers(-127, 128, (2048, 2048)).astype(np.int8)
    text = PRODUCT.replace("float[4,6] x, int8[6,5] w", "float[16,2048] x").replace("float[4,5] y", "float[16,2048] y")
    proto = onnx.parser.parse_model(text.replace(" a = Add(m, bias) y = Relu(a)", " y = Relu(m)"))
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    feeds = {"x": rng.uniform(-1, 3, (16, 2048)).astype(np.float32)}
    want = optdnn.build(proto, target="reference").run(feeds)["y"]
    found = optdnn.build(proto, target="simulate", precision="fp16").run(feeds)["y"]
    assert np.abs(want).max() > 100
    np.testing.assert_allclose(found, want, atol=2e-2 * want.std())


def test_a_plan_that_names_the_operator_is_obeyed() -> None:
    graph = from_text(PRODUCT)
    named = {next(iter(graph.op(i).src)): "fp16" for i in integer_sums(graph)}
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=PrecisionPlan("fp16", nodes=named)))
    assert graph.of_kind("Cast")[0].outputs[0].type.dtype == FP16
