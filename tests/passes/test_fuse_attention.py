"""fuse_attention: each form in which exporters write attention becomes one op; other graphs stay, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.attention_nets import ONE, B, D, H, L, added, attention, net
from support.check import check_pass, check_refused, check_untouched, from_text
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.norm import LpNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_attention import FuseAttention

HEADS_OUT = TransposeAttrs((2, 0, 1, 3))


CUDA = PassContext("cuda:sm_90a")


def triangle(low: float) -> Any:
    return np.triu(np.full((L, L), low), 1)


@pytest.mark.parametrize("low", [-np.inf, -3.4e38, -1e9])
def test_a_constant_mask_of_later_keys_is_causal_order(low: float) -> None:
    graph, _ = check_pass(FuseAttention(), net(mask=added(triangle(low))), changes=1, kinds=ONE)
    assert attention(graph).attrs.is_causal


def band(left: int, right: int, low: float = -np.inf) -> Any:
    """Hides keys that lie more than ``left`` before or ``right`` after a query."""
    behind = np.arange(L)[:, None] - np.arange(L)
    return np.where((behind <= left) & (-behind <= right), 0.0, low)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (band(1, 2), (False, 1, 2)),
        (band(2, 0), (True, 2, -1)),
        (band(0, L - 1), (False, 0, -1)),
        (band(L - 1, 1), (False, -1, 1)),
        (np.stack([band(1, 1, -1e9)] * H)[None], (False, 1, 1)),
    ],
)
def test_a_constant_mask_of_keys_outside_of_a_window_is_a_window(array: Any, expected: tuple[bool, int, int]) -> None:
    """As in ModernBERT's local layers. Kernels skip the hidden keys, and read no mask."""
    graph, _ = check_pass(FuseAttention(), net(mask=added(array)), changes=1, kinds=ONE)
    a = attention(graph).attrs
    assert (a.is_causal, a.left_window_size, a.right_window_size) == expected


def holed() -> Any:
    array = band(2, 2)
    array[3, 2] = -np.inf
    return array


@pytest.mark.parametrize(
    "array",
    [
        triangle(-4.0),
        triangle(-1e9) + 0.5,
        holed(),
        np.tril(np.full((L, L), -1e9)) * (1 - np.eye(L, k=1 - L)),
        np.stack([band(1, 1), *[band(2, 2)] * (H - 1)])[None],
    ],
    ids=["finite", "lifted", "a hole", "queries that do not see themselves", "heads of their own"],
)
def test_other_triangles_stay_masks(array: Any) -> None:
    graph, _ = check_pass(FuseAttention(), net(mask=added(array)), changes=1)
    a = attention(graph).attrs
    assert (a.is_causal, a.left_window_size, a.right_window_size) == (False, -1, -1)
    assert len(attention(graph).inputs) == 4


def test_a_mask_of_zeros_goes() -> None:
    graph, _ = check_pass(FuseAttention(), net(mask=added(np.zeros((B, 1, L, L)))), changes=1)
    assert len(attention(graph).inputs) == 3


def test_biases_add_up_and_equal_ones_of_a_batch_are_one() -> None:
    bias = np.random.default_rng(0).standard_normal((1, H, L, L))

    def two(n: Net, s: Value) -> Value:
        return n.op("Add", n.const(np.full((B, 1, L, L), 1.5)), n.op("Add", s, n.const(bias)))

    graph, _ = check_pass(FuseAttention(), net(mask=two), changes=1)
    mask = graph.constant_value(attention(graph).inputs[3])
    assert mask is not None
    np.testing.assert_allclose(mask, bias + 1.5)


def test_a_scale_after_the_mask_holds_for_the_mask_too() -> None:
    check_pass(
        FuseAttention(),
        net(mask=lambda n, s: n.op("Div", n.op("Add", s, n.input(B, 1, L, L, name="m")), 0.8)),
        changes=1,
    )


def test_swin_adds_its_mask_in_five_dimensions() -> None:
    def mask(n: Net, s: Value) -> Value:
        wide = n.op("Reshape", n.op("Add", s, n.random(1, H, L, L)), n.ints(1, B, H, L, L))
        return n.op("Reshape", n.op("Add", wide, n.random(1, B, 1, L, L)), n.ints(B, H, L, L))

    graph, _ = check_pass(FuseAttention(), net(mask=mask), changes=1)
    assert graph.type(attention(graph).inputs[3]).shape == (B, H, L, L)  # type: ignore[arg-type]


def test_swin_adds_its_mask_in_five_dimensions_to_a_symbolic_batch() -> None:
    """Four windows an image: the mask is repeated for as many images as come."""

    def mask(n: Net, s: Value) -> Value:
        n.input(symbol("N", 1), 3, name="pictures")
        wide = n.op("Reshape", n.op("Add", s, n.random(1, H, L, L)), n.ints(-1, 4, H, L, L))
        return n.op("Reshape", n.op("Add", wide, n.random(1, 4, 1, L, L)), n.ints(-1, H, L, L))

    graph, _ = check_pass(FuseAttention(), net(mask=mask, batch=4 * symbol("N", 1)), changes=1, sizes={"N": 3})
    assert graph.kinds()["Expand"] == 1


def test_a_mask_in_five_dimensions_that_is_not_constant() -> None:
    def mask(n: Net, s: Value) -> Value:
        wide = n.op("Reshape", s, n.ints(1, B, H, L, L))
        return n.op("Reshape", n.op("Add", wide, n.input(1, B, 1, L, L, name="m")), n.ints(B, H, L, L))

    check_pass(FuseAttention(), net(mask=mask), changes=1)


def hidden(low: float, keeps: bool = True) -> Callable[[Net, Value], Value]:
    def mask(n: Net, s: Value) -> Value:
        seen = n.op("Greater", n.input(B, 1, L, L, name="m"), -0.7)
        return n.op("Where", seen, *((s, low) if keeps else (low, s)))

    return mask


@pytest.mark.parametrize("keeps", [True, False])
def test_scores_hidden_by_where(keeps: bool) -> None:
    check_pass(FuseAttention(), net(mask=hidden(-1e38, keeps)), changes=1)


def test_scores_hidden_by_a_constant_where() -> None:
    def mask(n: Net, s: Value) -> Value:
        return n.op("Where", n.const(np.tril(np.ones((L, L), bool)), bool), s, -1e9)

    graph, _ = check_pass(FuseAttention(), net(mask=mask), changes=1)
    assert attention(graph).attrs.is_causal


def test_symbolic_batch_and_length() -> None:
    graph = net(batch=symbol("N", 1), length=symbol("S", 1))
    check_pass(FuseAttention(), graph, changes=1, sizes={"N": 2, "S": 6})


def test_half_precision_with_a_softmax_in_single() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    attention (float16[2,3,5,4] q, float16[2,3,4,5] kt, float16[2,3,5,4] v) => (float16[2,3,5,4] y)
    { s = MatMul(q, kt) w = Cast<to=1>(s) p = Softmax(w) h = Cast<to=10>(p) y = MatMul(h, v) }"""
    graph = from_text(text)
    report = FuseAttention()(graph, CUDA)
    assert report.changes == 1
    assert attention(graph).attrs.softmax_precision == np.float32


def test_two_dimensions_are_one_head() -> None:
    n = Net(np.float64)
    p = n.op("Softmax", n.op("MatMul", n.input(L, D, name="q"), n.input(D, 7, name="k")))
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", p, n.input(7, D, name="v"))), changes=1)
    assert graph.type(attention(graph).inputs[0]).shape == (1, 1, L, D)  # type: ignore[arg-type]


def test_heads_in_front_of_the_batch() -> None:
    """Set Transformer's pooling: constant queries, and heads of keys and values joined along the batch."""
    n = Net(np.float64)
    q = n.random(H * B, L, D)
    x = n.input(B, 7, H * D, name="x")
    k, v = (
        n.op("Reshape", n.op("Transpose", n.op("Reshape", y, n.ints(B, 7, H, D)), attrs=HEADS_OUT), n.ints(H * B, 7, D))
        for y in (x, n.op("Exp", x))
    )
    kt = n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 1)))
    y = n.op("MatMul", n.op("Softmax", n.op("MatMul", q, kt)), v)
    graph, _ = check_pass(FuseAttention(), n.done(y), changes=1)
    assert [graph.type(operand).dims[:2] for operand in attention(graph).inputs[:3] if operand] == [(H, B)] * 3


# ---------------------------------------------------------------- what is refused


def refused() -> dict[str, tuple[Graph, str]]:
    def column(n: Net, s: Value) -> Value:
        return n.op("Add", s, n.input(B, H, L, 1, name="m"))

    def gated(n: Net, s: Value) -> Value:
        return n.op("Mul", s, n.input(B, H, L, L, name="m"))

    def scaled(n: Net, s: Value) -> Value:
        return n.op("Mul", s, n.input(H, 1, 1, name="heads"))

    def biased(n: Net, s: Value) -> Value:
        return scaled(n, n.op("Add", s, n.input(L, L, name="m")))

    def capped(n: Net, s: Value) -> Value:
        return n.op("Mul", n.op("Tanh", scaled(n, s)), 1.0)

    def from_mask(n: Net, s: Value) -> Value:
        return n.op("Sub", n.input(B, 1, 1, L, name="m"), s)

    no_product = "does not read only a product of queries and keys with scales and masks"
    cases = {
        "bias scaled by heads": (net(mask=biased), no_product),
        "taken from the mask": (net(mask=from_mask), no_product),
        "heads scaled in a softcap": (net(mask=capped), no_product),
        "used twice": (net(extra=True), "is an output of the network"),
        "negative": (net(mask=lambda n, s: n.op("Mul", s, -2.0)), "a scale is positive"),
        "column": (net(mask=column), "does not have a number for each key"),
        "gated": (net(mask=gated), no_product),
        "weak where": (net(mask=hidden(-1e9)), "a query without keys gets equal weights"),
    }
    n = Net(np.float64)
    s = n.op("MatMul", n.input(B, H, L, D, name="q"), n.input(B, H, D, L, name="k"))
    p = n.op("Softmax", s)
    cases["inner use"] = n.done(n.op("MatMul", p, n.input(B, H, L, D, name="v")), n.op("Relu", s)), "is used elsewhere"
    n = Net(np.float64)
    s = n.op("MatMul", n.input(B, H, L, D, name="q"), n.input(B, H, D, L, name="k"))
    p = n.op("Softmax", s, attrs=SoftmaxAttrs(2))
    cases["axis"] = n.done(n.op("MatMul", p, n.input(B, H, L, D, name="v"))), "not over the last axis"
    n = Net(np.float64)
    p = n.op("Softmax", n.op("MatMul", n.input(B, H, L, D, name="q"), n.input(B, H, D, L, name="k")))
    masked = n.op("Where", n.op("Greater", n.input(B, 1, L, L, name="m"), 0.0), p, 0.0)
    again = "masked again after the softmax"
    cases["masked again"] = n.done(n.op("MatMul", masked, n.input(B, H, L, D, name="v"))), f"{again}, by something else"
    n = Net(np.float64)
    p = n.op("Softmax", n.op("MatMul", n.input(B, H, L, D, name="q"), n.input(B, H, D, L, name="k")))
    masked = n.op("Where", n.op("Greater", n.input(B, 1, L, L, name="m"), 0.0), p, 0.5)
    cases["masked by a half"] = n.done(n.op("MatMul", masked, n.input(B, H, L, D, name="v"))), again
    return cases


@pytest.mark.parametrize("name", refused())
def test_refused(name: str) -> None:
    graph, reason = refused()[name]
    check_refused(FuseAttention(), graph, because=reason)


def test_other_products_are_no_candidates() -> None:
    n = Net()
    check_untouched(FuseAttention(), n.done(n.matmul(n.op("Relu", n.matmul(n.input(2, 3, 4), 5)), 6)))
    n = Net()
    x = n.op("Reshape", n.op("Softmax", n.input(2, 3, 4)), n.ints(2, 12))
    check_untouched(FuseAttention(), n.done(n.op("MatMul", x, n.random(12, 3), attrs=MatMulAttrs())))


def blind(guarded: bool) -> Graph:
    """Attention under a constant mask that hides every key of the second query, with or without PyTorch's guard."""
    hidden = np.zeros((L, L))
    hidden[1] = -np.inf
    n = Net(np.float64)
    q, k, v = (n.input(B, H, L, D, name=name) for name in "qkv")
    s = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    p = n.op("Softmax", n.op("Add", s, n.const(hidden)))
    if guarded:
        p = n.op("Where", n.op("IsNaN", p), 0.0, p)
    return n.done(n.op("MatMul", p, v))


def test_a_query_that_a_constant_mask_leaves_no_key() -> None:
    check_refused(FuseAttention(), blind(guarded=False), because="hides every key of a query, which gives NaN")
    check_pass(FuseAttention(), blind(guarded=True), changes=1)


def normalized(axis: int, readers: int = 1) -> Graph:
    """Attention of keys that are normalized before they are transposed."""
    n = Net(np.float64)
    q, k, v = (
        n.op("Exp", n.input(2, 3, *shape, name=name))
        for name, shape in zip("qkv", ((4, 8), (8, 5), (5, 8)), strict=True)
    )
    k = n.op("LpNormalization", k, attrs=LpNormAttrs(axis, 2, 1e-6))
    turned = n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))
    y = n.op("Attention", q, turned, v, attrs=AttentionAttrs(scale=1.0))
    return n.done(y, *(n.op("Neg", k) for _ in range(readers - 1)))


def test_keys_are_transposed_before_they_are_normalized() -> None:
    graph = normalized(2)
    after, _ = check_pass(FuseAttention(), graph, changes=1, rules={"normalized_keys": 1}, kinds=graph.kinds())
    (norm,) = after.of_kind("LpNormalization")
    assert norm.attrs.axis == 3
    assert after.op(norm.inputs[0]).kind == "Transpose"  # type: ignore[arg-type]
    assert after.of_kind("Attention")[0].inputs[1] == norm.value


@pytest.mark.parametrize(("axis", "readers"), [(3, 1), (2, 2)])
def test_keys_normalized_along_another_axis_or_read_elsewhere_stay(axis: int, readers: int) -> None:
    check_untouched(FuseAttention(), normalized(axis, readers))
