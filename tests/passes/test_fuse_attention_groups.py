"""fuse_attention: queries that share heads of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.attention_nets import B, D, H, L, added, attention, net, repeated
from support.check import check_pass, check_refused
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fuse_attention import FuseAttention


@pytest.mark.parametrize("shared", [1])
def test_grouped_queries(shared: int) -> None:
    graph, _ = check_pass(FuseAttention(), net(shared=shared), changes=1)
    assert "Expand" not in graph.kinds()
    assert graph.type(attention(graph).inputs[1]).shape == (B, shared, L, D)  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "shared"), [(B, 1), (B, 2), (1, 2)])
@pytest.mark.parametrize("kind", ["Expand", "Concat"])
def test_heads_repeated_before_they_come_first(batch: int, shared: int, kind: str) -> None:
    """Keras and JAX repeat the heads of (batch, sequence, heads, features)."""
    n = Net(np.float64)
    heads, q = 2 * shared, n.input(batch, L, 2 * shared, D, name="q")

    def first(x: Value) -> Value:
        return n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1, 3)))

    def again(x: Value) -> Value:
        alone = n.op("Unsqueeze", x, n.ints(3))
        if kind == "Expand":
            wide = n.op("Expand", alone, n.ints(1, 1, 1, 2, 1))
        else:
            wide = n.op("Concat", alone, alone, attrs=ConcatAttrs(3))
        return first(n.op("Reshape", wide, n.ints(batch, L, heads, D)))

    k, v = (again(n.input(batch, L, shared, D, name=name)) for name in "kv")
    scores = n.op("MatMul", first(q), n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", n.op("Softmax", scores), v)), changes=1)
    assert not graph.kinds().keys() & {"Expand", "Concat"}
    assert graph.type(attention(graph).inputs[1]).shape == (batch, shared, L, D)  # type: ignore[arg-type]


def test_values_alone_are_repeated() -> None:
    """Falcon rotates its keys after it repeats their heads: the values have as many heads as the keys."""
    n = Net(np.float64)
    q = n.input(B, 4, L, D, name="q")
    k, v = (repeated(n, n.input(B, 2, L, D, name=name), 2) for name in "kv")
    k = n.op("Transpose", n.op("Sin", k), attrs=TransposeAttrs((0, 1, 3, 2)))
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", n.op("Softmax", n.op("MatMul", q, k)), v)), changes=1)
    assert graph.type(attention(graph).inputs[1]).shape == graph.type(attention(graph).inputs[2]).shape


def test_one_head_of_keys_for_other_heads_of_values() -> None:
    n = Net(np.float64)
    q, k = n.input(B, 4, L, D, name="q"), n.input(B, 1, D, L, name="k")
    v = repeated(n, n.input(B, 2, L, D, name="v"), 2)
    y = n.op("MatMul", n.op("Softmax", n.op("MatMul", q, k)), v)
    check_refused(FuseAttention(), n.done(y), because="keys and values have different heads")


def test_heads_in_another_order_are_not_shared() -> None:
    """All heads once, and then all heads again: no head is read twice in a row."""
    n = Net(np.float64)
    q = n.input(B, 4, L, D, name="q")
    k, v = (n.op("Unsqueeze", n.input(B, L, 2, D, name=name), n.ints(2)) for name in "kv")
    k, v = (n.op("Reshape", n.op("Expand", x, n.ints(1, 1, 2, 1, 1)), n.ints(B, L, 4, D)) for x in (k, v))
    k, v = (
        n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 3, 1))),
        n.op("Transpose", v, attrs=TransposeAttrs((0, 2, 1, 3))),
    )
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", n.op("Softmax", n.op("MatMul", q, k)), v)), changes=1)
    assert graph.kinds()["Expand"] == 2


GROUPS, PER_GROUP = 2, 3


def grouped(mask: Callable[[Net, Value], Value] | None = None, *, inside: bool = False) -> Graph:
    """Grouped queries as JAX's einsums give them: the heads of a group are rows of one matrix in both products.

    ``inside``: a bias is added to the rows of that matrix."""
    n = Net(np.float64)
    q = n.input(B, GROUPS, PER_GROUP, L, D, name="q")
    k, v = (n.input(B, GROUPS, L, D, name=name) for name in "kv")
    rows = n.op("Reshape", q, n.ints(B, GROUPS, PER_GROUP * L, D))
    s = n.op("MatMul", rows, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    s = n.op("Add", s, n.random(PER_GROUP * L, L)) if inside else s
    s = n.op("Mul", n.op("Reshape", s, n.ints(B, GROUPS, PER_GROUP, L, L)), 0.5)
    p = n.op("Softmax", s if mask is None else mask(n, s))
    p = n.op("Reshape", p, n.ints(B, GROUPS, PER_GROUP * L, L))
    return n.done(n.op("Reshape", n.op("MatMul", p, v), n.ints(B, GROUPS, PER_GROUP, L, D)))


@pytest.mark.parametrize(
    ("mask", "more"),
    [
        (None, 0),
        (added(np.random.default_rng(3).standard_normal((GROUPS, PER_GROUP, L, L))), 1),
        (added(np.random.default_rng(3).standard_normal((L, L))), 1),
        (lambda n, s: n.op("Add", s, n.input(B, 1, 1, L, L, name="mask")), 1),
        (lambda n, s: n.op("Where", n.const(np.tril(np.ones((L, L), bool)), bool), s, -1e9), 0),
    ],
)
def test_grouped_queries_that_are_rows_of_one_matrix(mask: Any, more: int) -> None:
    graph, _ = check_pass(FuseAttention(), grouped(mask), changes=1)
    op = attention(graph)
    assert [graph.type(v).shape for v in op.inputs[:3] if v is not None] == [
        (B, GROUPS * PER_GROUP, L, D),
        *[(B, GROUPS, L, D)] * 2,
    ]
    assert len(op.inputs) == 3 + more
    assert "MatMul" not in graph.kinds()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, B])
def test_one_head_of_keys_for_all_queries(batch: int, masked: bool) -> None:
    """Multi-query attention as ``einsum("b h i d, b j d -> b h i j")`` gives it: keys and values without an axis of heads."""
    n = Net(np.float64)
    q, (k, v) = n.input(batch, H, L, D, name="q"), (n.input(batch, L, D, name=name) for name in "kv")
    s = n.op(
        "MatMul", n.op("Reshape", q, n.ints(batch, H * L, D)), n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 1)))
    )
    s = n.op("Mul", n.op("Reshape", s, n.ints(batch, H, L, L)), 0.5)
    if masked:
        s = n.op("Add", s, n.input(1, H, L, L, name="mask"))
    p = n.op("Reshape", n.op("Softmax", s), n.ints(batch, H * L, L))
    graph, _ = check_pass(
        FuseAttention(), n.done(n.op("Reshape", n.op("MatMul", p, v), n.ints(batch, H, L, D))), changes=1
    )
    op = attention(graph)
    assert [graph.type(v).shape for v in op.inputs[1:3] if v is not None] == [(batch, 1, L, D)] * 2
    assert "MatMul" not in graph.kinds()


def test_rows_of_one_matrix_with_a_bias_are_no_grouped_queries() -> None:
    check_refused(FuseAttention(), grouped(inside=True), because="does not read only a product of queries and keys")


def test_rows_of_one_matrix_in_one_product_are_no_grouped_queries() -> None:
    n = Net(np.float64)
    q = n.input(B, GROUPS, PER_GROUP, L, D, name="q")
    k, v = n.input(B, GROUPS, L, D, name="k"), n.input(B, GROUPS, PER_GROUP, L, D, name="v")
    rows = n.op("Reshape", q, n.ints(B, GROUPS, PER_GROUP * L, D))
    s = n.op("MatMul", rows, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    p = n.op("Softmax", n.op("Reshape", s, n.ints(B, GROUPS, PER_GROUP, L, L)))
    check_refused(
        FuseAttention(), n.done(n.op("MatMul", p, v)), because="rows of its two products belong to different heads"
    )


def test_keys_that_broadcast_over_heads_are_shared() -> None:
    n = Net(np.float64)
    q, kt, v = n.input(B, H, L, D, name="q"), n.input(B, 1, D, L, name="k"), n.input(B, 1, L, D, name="v")
    p = n.op("Softmax", n.op("MatMul", q, kt))
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", p, v)), changes=1)
    assert graph.type(attention(graph).inputs[1]).shape == (B, 1, L, D)  # type: ignore[arg-type]
