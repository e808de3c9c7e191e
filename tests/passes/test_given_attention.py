"""given_attention: attention that the model holds as one operator reads plain masks, and heads once per group of queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.passes.fuse_attention import FuseAttention

B, H, L, D = 2, 4, 8, 4
EARLIER = np.tril(np.ones((L, L), bool))


def given(
    mask: Any = None, *, tokens: int = L, layers: int = 1, shared: int = H, results: int = 1, **attrs: Any
) -> Graph:
    """Attentions of inputs; ``shared`` heads of keys and values are repeated.

    ``mask``: an array, or the number of rows of one of booleans that is computed."""
    n = Net(np.float64)
    if isinstance(mask, int):
        mask = n.op("Greater", n.input(B, 1, mask, tokens, name="m"), -1.0)
    elif mask is not None:
        mask = n.const(mask, mask.dtype)
    x = n.input(B, H, tokens, D, name="q")
    k, v = (n.input(B, shared, tokens, D, name=name) for name in "kv")
    if shared != H:
        k, v = (repeated(n, value) for value in (k, v))
    for _ in range(layers):
        operands = [x, k, v, *([] if mask is None else [mask])]
        y = n.op("Attention", *operands, attrs=AttentionAttrs(**attrs), outputs=results)
        x = y[0] if results > 1 else y
    return n.done(*(y if results > 1 else [x]))


def repeated(n: Net, x: Value) -> Value:
    b, g, s, d = n.dims(x)
    wide = n.op("Expand", n.op("Unsqueeze", x, n.ints(2)), n.ints(1, 1, H // g, 1, 1))  # type: ignore[operator]
    return n.op("Reshape", wide, n.ints(b, H, s, d))  # type: ignore[arg-type]


def attention(graph: Graph) -> Op:
    (op,) = graph.of_kind("Attention")
    return op


@pytest.mark.parametrize("mask", [EARLIER, np.where(EARLIER, 0.0, -np.inf)[None, None]], ids=["booleans", "added"])
def test_a_constant_mask_of_later_keys_is_causal_order(mask: Any) -> None:
    graph, _ = check_pass(FuseAttention(), given(mask), changes=1, rules={"given_mask": 1}, kinds={"Attention": 1})
    op = attention(graph)
    assert op.attrs.is_causal
    assert all(v is None for v in op.inputs[3:])


def test_a_constant_mask_of_far_keys_is_a_window() -> None:
    graph, _ = check_pass(FuseAttention(), given(EARLIER & ~np.tri(L, k=-2, dtype=bool)), changes=1)
    a = attention(graph).attrs
    assert (a.is_causal, a.left_window_size, a.right_window_size) == (True, 1, -1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_that_hides_nothing_goes(causal: bool) -> None:
    graph, _ = check_pass(FuseAttention(), given(np.ones((1, L), bool), is_causal=causal), changes=1)
    assert all(v is None for v in attention(graph).inputs[3:])
    assert attention(graph).attrs.is_causal == causal


@pytest.mark.parametrize("attrs", [{"is_causal": True}, {"left_window_size": 2}], ids=str)
def test_a_second_order_of_keys_stays_a_mask(attrs: dict[str, Any]) -> None:
    graph, _ = check_pass(FuseAttention(), given(EARLIER, **attrs), changes=1)
    mask = graph.constant_value(attention(graph).inputs[3])  # type: ignore[arg-type]
    assert mask is not None
    assert (mask == np.where(EARLIER, 0.0, -np.inf)).all()


def test_a_constant_mask_that_lacks_keys_is_added() -> None:
    """Keys behind the end of the mask are hidden."""
    graph, _ = check_pass(FuseAttention(), given(np.ones((L, L - 2), bool)), changes=1)
    assert graph.type(attention(graph).inputs[3]).dims == (L, L - 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "tokens"), [(L, L), (1, 5)])
def test_layers_add_one_mask(rows: int, tokens: int) -> None:
    graph, _ = check_pass(FuseAttention(), given(rows, tokens=tokens, layers=2), changes=2, rules={"given_mask": 2})
    masks = [graph.op(op.inputs[3]) for op in graph.of_kind("Attention")]  # type: ignore[arg-type]
    assert {op.kind for op in masks} == {"Where"}
    assert len({op.inputs[0] for op in masks}) == 1


def test_rows_that_need_padding_stay_booleans() -> None:
    check_refused(FuseAttention(), given(5, tokens=5), because="kernels make the mask themselves, with padded rows")


def test_results_are_handed_over() -> None:
    graph, _ = check_pass(FuseAttention(), given(L, results=4), changes=1, rules={"given_mask": 1})
    assert len(attention(graph).outputs) == 4


def test_positions_behind_the_past_keep_the_mask() -> None:
    n = Net(np.float64)
    q, k, v, past_k, past_v = (n.input(B, H, L, D, name=name) for name in ("q", "k", "v", "pk", "pv"))
    mask = n.const(np.concatenate([np.ones((L, L), bool), EARLIER], -1), EARLIER.dtype)
    y = n.op("Attention", q, k, v, mask, past_k, past_v, attrs=AttentionAttrs(), outputs=3)
    graph, _ = check_pass(FuseAttention(), n.done(*y), changes=1)
    assert not attention(graph).attrs.is_causal


def test_other_added_masks_stay() -> None:
    check_untouched(FuseAttention(), given(np.arange(L * L, dtype=float).reshape(L, L)))


@pytest.mark.parametrize("shared", [1, 2])
def test_repeated_heads_are_read_once(shared: int) -> None:
    graph, _ = check_pass(
        FuseAttention(), given(shared=shared), changes=1, rules={"repeated_heads": 1}, kinds={"Attention": 1}
    )
    assert [graph.type(v).dims[1] for v in attention(graph).inputs[:3]] == [H, shared, shared]  # type: ignore[arg-type]


def test_values_alone_are_repeated() -> None:
    n = Net(np.float64)
    q, k = (n.input(B, H, L, D, name=name) for name in "qk")
    y = n.op("Attention", q, k, repeated(n, n.input(B, 2, L, D, name="v")), attrs=AttentionAttrs())
    check_refused(FuseAttention(), n.done(y), because="keys and values are not repeated equally often")


def test_repeated_heads_that_join_the_past_stay() -> None:
    graph = given(shared=2, results=3)
    check_refused(FuseAttention(), graph, because="its keys and values are joined to those of the past, or are results")
