"""fuse_linear_attention: where normalized linear attention becomes one op, where it refuses, and that results stay exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.normalized_attention import NormalizedAttentionAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.fuse_linear_attention import MOST_FEATURES, FuseLinearAttention

FP16 = PassContext("cuda:sm_90a", "fp16")
KIND = "NormalizedLinearAttention"
CONSTANTS = """int64[1] axis = {2}, int64[1] last = {3}, int64[1] third = {2}, int64[1] first = {0}, int64[1] four = {4},
int64[1] five = {5}, int64[1] far = {-6}, int64[1] unit = {1},
int64[8] right = {0, 0, 0, 0, 0, 0, 0, 1}, int64[8] below = {0, 0, 0, 0, 0, 0, 1, 0}, float eps = {0.5},
float half = {0.5}, float one = {1},
float[2,3,9,1] ones = {""" + ", ".join(["1"] * 54) + "}"  # fmt: skip
SHAPES = "float[2,3,9,4] q, float[2,3,9,4] k, float[2,3,9,4] v"


def text(body: str, shapes: str = SHAPES, result: str = "float[2,3,a,b] y") -> str:
    """A network of positive queries ``p`` and keys ``r``, and values ``v``."""
    return f"""<ir_version: 9, opset_import: ["": 18]> g ({shapes}) => ({result}) <{CONSTANTS}>
    {{ p = Exp(q) r = Exp(k) {body} }}"""


TURNED = "t = Transpose<perm=[0, 1, 3, 2]>(r) "
APPENDED = (
    TURNED
    + """w = Pad(v, right, one) kv = MatMul(t, w) s = MatMul(p, kv) top = Slice(s, first, four, last)
low = Slice(s, four, five, last) safe = Add(low, eps) y = Div(top, safe)"""
)
JOINED = (
    TURNED
    + """w = Concat<axis=3>(v, ones) kv = MatMul(t, w) s = MatMul(p, kv) top = Slice(s, first, four, last)
low = Slice(s, four, five, last) y = Div(top, low)"""
)
UPRIGHT = """u = Transpose<perm=[0, 1, 3, 2]>(v) w = Pad(u, below, one) kv = MatMul(w, r) t = Transpose<perm=[0, 1, 3, 2]>(p)
s = MatMul(kv, t) top = Slice(s, first, four, axis) low = Slice(s, four, five, axis) safe = Add(eps, low) y = Div(top, safe)"""
SUMMED = (
    TURNED
    + """kv = MatMul(t, v) top = MatMul(p, kv) sum = ReduceSum<keepdims=1>(r, axis) c = Transpose<perm=[0, 1, 3, 2]>(sum)
low = MatMul(p, c) safe = Add(low, eps) less = Reciprocal(safe) y = Mul(less, top)"""
)
MEAN = """half_r = Mul(r, half) t = Transpose<perm=[0, 1, 3, 2]>(half_r) kv = MatMul(t, v) top = MatMul(p, kv)
sum = ReduceMean<keepdims=1>(r, axis) c = Transpose<perm=[0, 1, 3, 2]>(sum) low = MatMul(p, c) safe = Add(low, eps)
y = Div(top, safe)"""
VALUES_FIRST = """u = Transpose<perm=[0, 1, 3, 2]>(v) vk = MatMul(u, r) kv = Transpose<perm=[0, 1, 3, 2]>(vk) top = MatMul(p, kv)
sum = ReduceSum<keepdims=1>(r, axis) c = Transpose<perm=[0, 1, 3, 2]>(sum) low = MatMul(p, c) y = Div(top, low)"""
REST = {"Exp": 2, KIND: 1}


@pytest.mark.parametrize(
    ("body", "attrs", "kinds"),
    [
        (APPENDED, NormalizedAttentionAttrs(0.5), REST),
        (JOINED, NormalizedAttentionAttrs(), REST),
        (UPRIGHT, NormalizedAttentionAttrs(0.5), {**REST, "Transpose": 1}),
        (SUMMED, NormalizedAttentionAttrs(0.5), REST),
        (MEAN, NormalizedAttentionAttrs(4.5, 4.5), REST),
        (VALUES_FIRST, NormalizedAttentionAttrs(), REST),
    ],
    ids=["appended ones", "joined ones", "transposed", "summed keys", "mean of scaled keys", "values first"],
)
def test_forms(body: str, attrs: NormalizedAttentionAttrs, kinds: dict[str, int]) -> None:
    graph, _ = check_pass(FuseLinearAttention(), text(body), changes=1, kinds=kinds, context=FP16)
    (op,) = graph.of_kind(KIND)
    assert op.attrs.rectified is attrs.rectified
    np.testing.assert_allclose((op.attrs.epsilon, op.attrs.scale), (attrs.epsilon, attrs.scale), rtol=1e-6)


def heads(rank: int = 4, *, relu: str = "both", dtype: type = np.float32) -> Graph:
    """Katharopoulos et al. as einsums: heads behind the tokens (``rank`` 4), or merged with the batch, as one (3) or more axes."""
    n = Net(dtype)
    size, axis, order = ((2, 9, 3, 4), 1, (0, 2, 1, 3)) if rank == 4 else ((2,) * (rank - 2) + (9, 4), rank - 2, None)
    q, k, v = (n.input(*size, name=name) for name in "qkv")
    q, k = (n.op("Relu" if relu in ("both", name) else "Exp", x) for x, name in ((q, "q"), (k, "k")))
    lead = (2, 3) if rank == 4 else size[:-2]
    total = n.op("ReduceSum", k, n.ints(axis), attrs=ReduceAttrs(keepdims=False))

    def ordered(x: Value) -> Value:
        return x if order is None else n.op("Transpose", x, attrs=TransposeAttrs(order))

    turned = TransposeAttrs((*range(rank - 2), rank - 1, rank - 2))
    matrix = n.op("MatMul", n.op("Transpose", ordered(k), attrs=turned), ordered(v))
    low = n.op("Add", n.op("MatMul", ordered(q), n.op("Reshape", total, n.ints(*lead, 4, 1))), 1e-6)
    less = n.op("Reciprocal", n.op("Reshape", low, n.ints(*lead, 9)))
    less = n.op("Transpose", less, attrs=TransposeAttrs((0, 2, 1))) if rank == 4 else less
    return n.done(n.op("Mul", n.op("Unsqueeze", less, n.ints(-1)), ordered(n.op("MatMul", ordered(q), matrix))))


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_einsums_and_other_ranks(rank: int) -> None:
    graph, _ = check_pass(FuseLinearAttention(), heads(rank), changes=1, context=FP16)
    (op,) = graph.of_kind(KIND)
    assert op.outputs[0].type.shape == ((1, 2, 9, 4) if rank == 3 else (2, 3, 9, 4) if rank == 4 else (4, 2, 9, 4))
    assert op.attrs.rectified
    assert "Relu" not in graph.kinds()


@pytest.mark.parametrize("relu", ["q", "k", ""])
def test_a_relu_of_one_operand_stays(relu: str) -> None:
    graph, _ = check_pass(FuseLinearAttention(), heads(relu=relu), changes=1, context=FP16)
    (op,) = graph.of_kind(KIND)
    assert not op.attrs.rectified
    assert ("Relu" in graph.kinds()) == bool(relu)


def test_queries_that_are_read_elsewhere_stay() -> None:
    """The Relu is in the op, and another one is left for its other reader."""
    body = APPENDED.replace("MatMul(p,", "MatMul(x,").replace("(r)", "(z)").replace("y = Div", "d = Div")
    net = text("x = Relu(q) z = Relu(k) " + body + " y = Add(d, x)")
    graph, _ = check_pass(FuseLinearAttention(), net, changes=1, context=FP16)
    (op,) = graph.of_kind(KIND)
    assert op.attrs.rectified
    assert graph.kinds()["Relu"] == 1


@pytest.mark.parametrize(
    ("net", "because"),
    [
        (text(APPENDED, SHAPES.replace("9,4] q", "7,4] q")), "different shapes"),
        (text(SUMMED, SHAPES.replace("9,4] v", "9,5] v")), "different shapes"),
        (text(SUMMED, SHAPES.replace("4]", f"{MOST_FEATURES + 1}]")), f"2 to {MOST_FEATURES} features, these have 129"),
        (text(SUMMED, result="float[2,3,a,b] y, float[2,3,c,d] kv"), "an output of the network: kv"),
        (text(SUMMED.replace("y = Mul(less, top)", "z = Mul(less, top) y = Add(z, low)")), "used elsewhere: low, by"),
    ],
)
def test_refusals(net: str, because: str) -> None:
    check_refused(FuseLinearAttention(), net, because=because, rule="normalized_attention", context=FP16)


@pytest.mark.parametrize(
    "body",
    [
        SUMMED.replace("sum = ReduceSum<keepdims=1>(r,", "sum = ReduceSum<keepdims=1>(p,"),
        SUMMED.replace("low = MatMul(p, c)", "low = MatMul(q, c)"),
        SUMMED.replace("ReduceSum<keepdims=1>(r, axis)", "ReduceMax<keepdims=1>(r, axis)"),
        APPENDED.replace("right, one", "right, eps"),
        APPENDED.replace("right, one", "below, one").replace("(t, w)", "(t, v)").replace("four, five", "third, last"),
        APPENDED.replace("Slice(s, four, five, last)", "Slice(s, third, last, last)"),
        APPENDED.replace("Slice(s, four, five, last)", "Slice(s, far, unit, last)"),
        APPENDED.replace("Add(low, eps)", "Add(low, q1)").replace("w = Pad", "q1 = Slice(q, first, four, last) w = Pad"),
        APPENDED.replace("Add(low, eps)", "Sub(low, eps)"),
        APPENDED.replace("y = Div(top, safe)", "y = Div(safe, top)"),
        "s = Softmax(p) y = Div(s, r)",
    ],
)  # fmt: skip
def test_other_arithmetic(body: str) -> None:
    check_untouched(FuseLinearAttention(), text(body), FP16)


def test_divisors_in_another_order() -> None:
    """Each element is divided by the sum of another head."""
    body = SUMMED.replace("low = MatMul(p, c)", "sums = MatMul(p, c) low = Transpose<perm=[1, 0, 2, 3]>(sums)")
    check_untouched(FuseLinearAttention(), text(body, SHAPES.replace("2,3", "2,2"), "float[2,2,a,b] y"), FP16)


def test_a_negative_divisor() -> None:
    body = SUMMED.replace("low = MatMul(p, c)", "minus = Neg(one) d = Mul(c, minus) low = MatMul(p, d)")
    graph = from_text(text(body))
    FoldConstants()(graph)
    check_untouched(FuseLinearAttention(), graph, FP16)


def test_an_epsilon_beyond_fp32() -> None:
    """Tiny factors of queries and keys would make a huge epsilon."""
    body = SUMMED.replace("MatMul(p,", "MatMul(a,").replace("(r)", "(c1)").replace("(r,", "(c1,")
    body = "a = Mul(p, tiny) c1 = Mul(r, tiny) " + body
    for tiny, kept in (("1e-10", False), ("1e-20", True)):
        net = text(body).replace("float half = {0.5}", f"float half = {{0.5}}, float tiny = {{{tiny}}}")
        graph = from_text(net)
        FuseLinearAttention()(graph, FP16)
        assert (KIND not in graph.kinds()) == kept


def test_products_with_stages_stay() -> None:
    graph = from_text(text(SUMMED))
    (product,) = (op for op in graph.of_kind("MatMul") if op.outputs[0].name == "kv")
    graph.set_op(replace(product, attrs=MatMulAttrs(epilogue=(Stage("Relu", (~0,), Attrs()),))))
    check_untouched(FuseLinearAttention(), graph, FP16)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp64"])
def test_there_is_no_kernel_for_wide_floats(precision: str) -> None:
    check_untouched(FuseLinearAttention(), text(SUMMED), PassContext("cuda:sm_90a", precision))


def test_a_model_in_16_bits_needs_no_precision() -> None:
    assert FuseLinearAttention()(heads(dtype=np.float16), PassContext("cuda:sm_90a", "fp32")).changes == 1


def test_sizes_must_be_known() -> None:
    check_untouched(FuseLinearAttention(), text(APPENDED, SHAPES.replace("[2,3,9", "[n,3,9"), "float[n,3,a,b] y"), FP16)
