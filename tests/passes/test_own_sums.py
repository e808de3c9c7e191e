"""Products that are divided by their own sums stay in fp32 in an fp16 build; other products do not."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import from_text

from optdnn.ir.graph import Graph
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.overflows import largest_values
from optdnn.passes.support.own_sums import MARGIN, own_sums
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.types import FP16, FP32

HEAD = """<ir_version: 9, opset_import: ["": 17]>
g (float[9,4] q, float[4,9] k, float[9,5] v, float[9,1] one) => (float[9,a] y)
<int64[1] first = {0}, int64[1] fourth = {4}, int64[1] fifth = {5}, int64[1] axis = {1}, float eps = {0.5}, float unit = {1},
float[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}> """
EFFICIENT_VIT = (
    HEAD
    + """{ kv = MatMul(k, v) s = MatMul(q, kv) top = Slice(s, first, fourth, axis) low = Slice(s, fourth, fifth, axis)
guarded = Add(low, eps) y = Div(top, guarded) }"""
)
PERFORMER = (
    HEAD
    + """{ kv = MatMul(k, v) ksum = MatMul(k, one) top = MatMul(q, kv) low = MatMul(q, ksum) less = Reciprocal(low)
y = Mul(less, top) }"""
)
SUMMED_KEYS = (
    HEAD
    + """{ kv = MatMul(k, v) top = MatMul(q, kv) ksum = ReduceSum<keepdims=1>(k, axis) low = MatMul(q, ksum)
less = Div(unit, low) y = Mul(top, less) }"""
)
SOFTMAX = HEAD + "{ p = Softmax(q) c = Softmax(k) kv = MatMul(c, v) s = MatMul(p, kv) y = Div(s, s) }"
WEIGHTS = HEAD + "{ s = MatMul(q, w) y = Div(s, s) }"
UNLIKE = (
    HEAD
    + "{ top = MatMul(q, k) t = Transpose(v) low = MatMul(v, t) n = ReduceSum<keepdims=1>(low, axis) y = Div(top, n) }"
)
ROOT = HEAD + "{ kv = MatMul(k, v) s = MatMul(q, kv) r = Sqrt(s) y = Div(s, r) }"
PRODUCT = HEAD + "{ kv = MatMul(k, v) s = MatMul(q, kv) y = Mul(s, s) }"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (EFFICIENT_VIT, {"kv", "s", "top", "low", "guarded", "y"}),
        (PERFORMER, {"kv", "ksum", "top", "low", "y"}),
        (SUMMED_KEYS, {"kv", "top", "low", "y"}),
        (SOFTMAX, set()),
        (WEIGHTS, set()),
        (UNLIKE, set()),
        (ROOT, set()),
        (PRODUCT, set()),
    ],
    ids=["efficientvit", "performer", "summed keys", "softmax", "weights", "unlike", "root", "product"],
)
def test_operators_that_stay(text: str, kept: set[str]) -> None:
    graph = from_text(text)
    assert {graph.op(i).outputs[0].name for i in own_sums(graph, None)} == kept


def assigned(graph: Graph, plan: PrecisionPlan, target: str = "cuda:sm_90a") -> None:
    AssignPrecision()(graph, PassContext(target=target, precision="fp16", plan=plan))


def test_a_trial_far_below_the_limit_allows_fp16() -> None:
    graph = from_text(EFFICIENT_VIT)
    sizes = largest_values(graph)
    assert sizes is not None
    assert not own_sums(graph, sizes)
    (kv, s) = graph.of_kind("MatMul")
    limit = float(np.finfo(np.float16).max) / MARGIN
    assert own_sums(graph, {**sizes, s.value: limit}).keys() >= {kv.id, s.id}


def test_they_compute_in_fp32() -> None:
    graph = from_text(EFFICIENT_VIT.replace("[9,4] q", "[n,4] q"))  # without sizes there is no trial
    assigned(graph, PrecisionPlan("fp16", base="fp16"))
    assert {op.outputs[0].type.dtype for op in graph.of_kind("MatMul", "Slice", "Div")} == {FP32}


def test_a_named_product_is_fp16() -> None:
    graph = from_text(EFFICIENT_VIT.replace("[9,4] q", "[n,4] q"))
    name = next(iter(graph.of_kind("MatMul")[0].src), "")
    assigned(graph, PrecisionPlan("fp16", {name: "fp16"}, base="fp16"))
    assert [op.outputs[0].type.dtype for op in graph.of_kind("MatMul")] == [FP16, FP32]
