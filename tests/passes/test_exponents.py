"""Running sums stay in fp32 up to their exponentials; other exponentials do not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.check import from_text

import optdnn
from optdnn.ir.graph import Value
from optdnn.ir.verify import verify
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.exponents import exponents
from optdnn.types import FP16, FP32

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'
SCAN = (
    HEAD
    + """g (float[1,256,4] c, float[1,256,4] v) => (float[1,256,4] y) <int64 one = {1}>
{ a = CumSum(c, one) b = Sub(v, a) e = Exp(b) s = CumSum(e, one) l = Log(s) h = Add(a, l) y = Exp(h) }"""
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (SCAN, {"a", "b", "e", "s", "l", "h", "y"}),
        (HEAD + "g (float[1,9] x, float[9,9] w) => (float[1,9] y) <int64 one = {1}> "
         "{ m = MatMul(x, w) n = Neg(m) a = CumSum(n, one) y = Exp(a) }", {"n", "a", "y"}),
        (HEAD + "g (float[1,9] x) => (float[1,9] y) <int64 one = {1}> { e = Exp(x) y = CumSum(e, one) }", set()),
        (HEAD + "g (float[1,9] x) => (float[1,9] y) { y = Exp(x) }", set()),
    ],
    ids=["a scan of logarithms", "decays", "a sum of exponentials", "no sum"],
)  # fmt: skip
def test_operators_that_compute_exponents(text: str, kept: set[str]) -> None:
    graph = from_text(text)
    assert {graph.op(i).outputs[0].name for i in exponents(graph)} == kept


VIEWS = (
    HEAD
    + """g (float[1,16,9] x, float[9,9] w) => (float[16,4] y, float[1,16,5] z)
<int64 one = {1}, int64[2] sizes = {4, 5}, int64[2] rows = {16, 4}>
{ m = MatMul(x, w) a, b = Split<axis = 2>(m, sizes) z = Relu(b) n = Neg(a) r = Reshape(n, rows) zero = Sub(one, one)
c = CumSum(r, zero) y = Exp(c) }"""
)


def test_views_of_rounded_numbers_are_not_widened() -> None:
    """The Split moves values that the product has rounded: only the operators that compute exponents are fp32."""
    graph = from_text(VIEWS)
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", precision="fp16"))
    verify(graph)
    (split,) = graph.of_kind("Split")
    assert [o.type.dtype for o in split.outputs] == [FP16, FP16]
    (neg,) = graph.of_kind("Pointwise")
    assert neg.inputs == (Value(split.id, 0),), "it widens in registers"
    assert [stage.kind for stage in neg.attrs.epilogue] == ["Cast", "Neg"]
    for kind in ("Pointwise", "Reshape", "CumSum", "Exp"):  # the Reshape moves numbers that are not rounded
        (op,) = graph.of_kind(kind)
        assert op.outputs[0].type.dtype == FP32, kind


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_scans_of_logarithms_are_right(precision: str) -> None:
    rng = np.random.default_rng(0)
    feeds = {"c": -rng.uniform(0.1, 0.4, (1, 256, 4)), "v": rng.uniform(-2, 0, (1, 256, 4))}
    feeds = {k: v.astype(np.float16).astype(np.float32) for k, v in feeds.items()}
    sums = np.cumsum(feeds["c"].astype(np.float64), 1)
    want = np.exp(sums) * np.cumsum(np.exp(feeds["v"] - sums), 1)
    found = optdnn.build(onnx.parser.parse_model(SCAN), target="simulate", precision=precision).run(feeds)["y"]
    np.testing.assert_allclose(found, want, rtol=1e-2)
