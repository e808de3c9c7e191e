"""Products that are divided by their own sums stay in fp32 in an fp16 build; other products do not."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import from_text
from support.net import Net

from optdnn.ir.graph import Graph
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.own_sums import MARGIN, own_sums
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.trial import largest_values
from optdnn.types import FP16, FP32

HEAD = """<ir_version: 9, opset_import: ["": 17]>
g (float[9,4] q, float[4,9] k, float[9,5] v, float[9,1] one) => (float[9,a] y)
<int64[1] first = {0}, int64[1] fourth = {4}, int64[1] fifth = {5}, int64[1] axis = {1}, float eps = {0.5}, float unit = {1},
float zero = {0}, bool[9] mask = {1, 0, 1, 1, 0, 1, 1, 1, 1},
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
TRANSPOSED_KEYS = (
    HEAD
    + """{ kv = MatMul(k, v) top = MatMul(q, kv) ksum = ReduceSum<keepdims=1>(k, axis) across = Transpose(ksum)
turned = Transpose(q) low = MatMul(across, turned) up = Transpose(low) y = Div(top, up) }"""
)
SUM_OF_PRODUCTS = (
    HEAD
    + """{ kv = MatMul(k, v) top = MatMul(q, kv) ksum = ReduceSum<keepdims=1>(k, axis) across = Transpose(ksum)
each = Mul(q, across) low = ReduceSum<keepdims=1>(each, axis) y = Div(top, low) }"""
)
SCORES = HEAD + "{ s = MatMul(q, k) top = MatMul(s, v) low = ReduceSum<keepdims=1>(s, axis) y = Div(top, low) }"
QUERIES = (
    HEAD
    + """{ ksum = ReduceSum<keepdims=1>(k, axis) low = MatMul(q, ksum) less = Div(q, low) kv = MatMul(k, v)
y = MatMul(less, kv) }"""
)
SCALED = HEAD + "{ s = MatMul(q, k) half = Mul(s, eps) low = ReduceSum<keepdims=1>(half, axis) y = Div(half, low) }"
RETENTION = HEAD + "{ s = MatMul(q, k) sum = ReduceL1<axes=[1], keepdims=1>(s) low = Clip(sum, unit) y = Div(s, low) }"
MASKED = (
    HEAD
    + """{ s = MatMul(q, k) seen = Where(mask, s, zero) some = Relu(seen) size = Abs(some)
low = ReduceSum<keepdims=1>(size, axis) y = Div(some, low) }"""
)
SQUARES = HEAD + "{ s = MatMul(q, k) squares = Mul(q, q) low = ReduceSum<keepdims=1>(squares, axis) y = Div(s, low) }"
TURNED_SOFTMAX = (
    HEAD
    + """{ p = Softmax<axis=0>(q) t = Transpose(p) s = MatMul(t, q) low = ReduceSum<keepdims=1>(s, axis)
y = Div(s, low) }"""
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
        (PERFORMER, {"kv", "ksum", "top", "low", "less", "y"}),
        (SUMMED_KEYS, {"kv", "top", "low", "less", "y"}),
        (TRANSPOSED_KEYS, {"kv", "top", "low", "up", "y"}),
        (SUM_OF_PRODUCTS, {"kv", "top", "each", "low", "y"}),
        (SCORES, {"s", "top", "low", "y"}),
        (QUERIES, {"low", "less"}),
        (SCALED, {"s", "half", "low", "y"}),
        (RETENTION, {"s", "sum", "low", "y"}),
        (MASKED, {"s", "seen", "some", "size", "low", "y"}),
        (SQUARES, set()),
        (TURNED_SOFTMAX, set()),
        (SOFTMAX, set()),
        (WEIGHTS, set()),
        (UNLIKE, set()),
        (ROOT, set()),
        (PRODUCT, set()),
    ],
    ids=[
        *(
            "efficientvit",
            "performer",
            "summed keys",
            "transposed keys",
            "sum of products",
            "scores",
            "queries",
            "scaled",
        ),
        *("retention", "masked", "squares", "turned softmax", "softmax", "weights", "unlike", "root", "product"),
    ],
)
def test_operators_that_stay(text: str, kept: set[str]) -> None:
    graph = from_text(text)
    assert {graph.op(i).outputs[0].name for i in own_sums(graph, None)} == kept


def with_epilogues(residual: bool) -> Graph:
    """Linear attention, fused: the product of the sums adds an epsilon and inverts. ``residual``: the other one adds a tensor."""
    n = Net()
    q, k, v = n.input(9, 4, name="q"), n.input(4, 9, name="k"), n.input(9, 5, name="v")
    ksum = n.op("ReduceSum", k, n.ints(1))
    inverse = Stage("Add", (-1, 2), Attrs()), Stage("Reciprocal", (-2,), Attrs())
    less = n.op("MatMul", q, ksum, n.const(0.5), attrs=MatMulAttrs(epilogue=inverse), name="less")
    kv = n.op("MatMul", k, v, name="kv")
    if residual:
        sums = MatMulAttrs(epilogue=(Stage("Add", (-1, 2), Attrs()),))
        top = n.op("MatMul", q, kv, n.input(9, 5, name="r"), attrs=sums, name="top")
    else:
        top = n.op("MatMul", q, kv, name="top")
    return n.done(n.op("Mul", top, less, name="y"))


@pytest.mark.parametrize("residual", [False, True])
def test_epilogues_are_stages(residual: bool) -> None:
    graph = with_epilogues(residual)
    kept = {"kv", "top", "less", "y"}
    assert {graph.op(i).outputs[0].name for i in own_sums(graph, None)} == kept
    sizes = largest_values(graph)  # of the inverse, not of the sum
    assert sizes is not None
    assert {graph.op(i).outputs[0].name for i in own_sums(graph, sizes)} == kept


def test_an_activation_in_an_epilogue_bounds_a_product() -> None:
    n = Net()
    gate = MatMulAttrs(epilogue=(Stage("Sigmoid", (-1,), Attrs()),))
    s = n.op("MatMul", n.input(9, 4, name="q"), n.input(4, 9, name="k"), attrs=gate)
    assert not own_sums(n.done(n.op("Div", s, n.op("ReduceSum", s, n.ints(1)))), None)


def test_products_with_one_epsilon_are_unlike() -> None:
    """A constant of an epilogue is no factor."""
    n = Net()
    q, k, eps = n.input(9, 4, name="q"), n.input(4, 9, name="k"), n.const(0.5)
    more = MatMulAttrs(epilogue=(Stage("Add", (-1, 2), Attrs()),))
    a = n.op("MatMul", q, k, eps, attrs=more)
    b = n.op("MatMul", n.input(9, 3, name="v"), n.input(3, 9, name="w"), eps, attrs=more)
    assert not own_sums(n.done(n.op("Div", a, b)), None)


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
