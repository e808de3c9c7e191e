"""position_features: biases of relative positions along several axes become features of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import PadAttrs
from optdnn.passes.relative_positions import RelativePositions

PASS = RelativePositions()
BATCH, HEADS, FEATURES = 2, 3, 24
Size = tuple[int, ...]


def stack(n: Net, queries: int, keys: int, depth: int = FEATURES) -> Value:
    """Embeddings of the distances of queries and keys along an axis: for each query a matrix (features, keys)."""
    ratio = max(keys / queries, 1.0), max(queries / keys, 1.0)
    far = np.arange(queries)[:, None] * ratio[0] - (np.arange(keys) - keys + 1) * ratio[1]
    table = n.rng.standard_normal((int(far.max()) + 1, depth))
    return n.const(table[far.astype(int)].transpose(0, 2, 1))


def term(n: Net, x: Value, size: Size, keys: Size, axis: int, matrices: Value | None = None) -> Value:
    """The bias of an axis as exporters write it: queries of one position along it are the rows of one product."""
    rank = 2 + len(size)
    turned = [2 + axis, *(i for i in range(rank) if i != 2 + axis)]
    rows = n.transposed(n.reshaped(x, BATCH, HEADS, *size, FEATURES), *turned, rank)
    rows = n.reshaped(rows, size[axis], -1, FEATURES)
    y = n.op("MatMul", rows, stack(n, size[axis], keys[axis]) if matrices is None else matrices)
    others = [s for i, s in enumerate(size) if i != axis]
    y = n.reshaped(y, size[axis], BATCH, HEADS, *others, keys[axis])
    back = n.transposed(y, *(turned.index(i) for i in range(rank)), rank)
    axes = (*(k if i == axis else 1 for i, k in enumerate(keys)),)
    return n.reshaped(back, BATCH, HEADS, *size, *axes)


def network(
    size: Size = (3, 4),
    keys: Size = (3, 2),
    *,
    token: bool = False,
    softcap: float = 0.0,
    added: Callable[[Net, Value, Value], Value] | None = None,
    source: Callable[[Net, Value], Value] = lambda n, q: q,
    scale: float | None = 0.3,
    projected: bool = False,
) -> Graph:
    """Attention with a bias of all axes. ``token``: the first query and key have none. ``added``: what is added to the bias, made
    from it and the queries; ``source``: the rows that the terms multiply, made from the queries. ``projected``: queries are a
    view of a product, whose rows have the features of all heads."""
    n = Net()
    more, count, seen = int(token), math.prod(size), math.prod(keys)
    if projected:
        rows = n.matmul(n.input(BATCH, count + more, 16, name="q"), HEADS * FEATURES)
        q = n.transposed(n.reshaped(rows, BATCH, count + more, HEADS, FEATURES), 0, 2, 1, 3)
    else:
        q = n.op("Relu", n.input(BATCH, HEADS, count + more, FEATURES, name="q"))
    k, v = (n.input(BATCH, HEADS, seen + more, FEATURES, name=name) for name in "kv")
    x = source(n, n.sliced(q, 1, count + 1, 2) if token else q)
    bias = term(n, x, size, keys, 0)
    for axis in range(1, len(size)):
        bias = n.op("Add", bias, term(n, x, size, keys, axis))
    bias = bias if added is None else n.op("Add", bias, added(n, bias, x))
    bias = n.reshaped(bias, BATCH, HEADS, count, seen)
    if token:
        bias = n.op("Pad", bias, n.ints(0, 0, 1, 1, 0, 0, 0, 0), attrs=PadAttrs())
    return n.done(n.op("Attention", q, k, v, bias, attrs=AttentionAttrs(scale=scale, softcap=softcap)))


NETS = {
    "an image": network,
    "fewer queries than keys": lambda: network((2, 2), (4, 6)),
    "a video": lambda: network((2, 3, 4), (2, 3, 2)),
    "an image with a class token": lambda: network(token=True),
    "queries that are a view of a projection": lambda: network(projected=True),
    "a video with a class token": lambda: network((2, 4, 4), (2, 2, 2), token=True),
}


@pytest.mark.parametrize("name", NETS)
def test_a_bias_is_features(name: str) -> None:
    graph, _ = check_pass(PASS, NETS[name](), changes=1, rules={"position_features": 1})
    found = graph.kinds()
    projections = 1 if "projection" in name else 0
    assert found["MatMul"] == 1 + projections
    assert (found["GatherElements"], found["Concat"], found["Attention"]) == (1, 2, 1)
    assert not {"Add", "Pad"} & set(found)
    assert found.get("Transpose", 0) == projections
    (op,) = graph.of_kind("Attention")
    assert op.attrs.scale == 0.3
    assert len([v for v in op.inputs if v is not None]) == 3


def test_each_embedding_is_multiplied_once() -> None:
    graph, _ = check_pass(PASS, network((3, 4), (3, 2)), changes=1)
    (product,) = graph.of_kind("MatMul")
    # distances: 5 along the rows, 2 * 2 + 2 along the columns; a column of zeros; and as many as fill 16 bytes
    assert graph.type(product.value).dims[-1] == 16


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32", "fp32"])
def test_norms_write_beside_their_features(precision: str) -> None:
    n = Net()
    size, keys = (4, 4), (2, 2)
    q, k = (n.input(BATCH, HEADS, count, FEATURES, name=name) for name, count in (("q", 16), ("k", 4)))
    q, k = (n.op("LayerNormalization", x, n.random(FEATURES), n.random(FEATURES)) for x in (q, k))
    bias = n.op("Add", term(n, q, size, keys, 0), term(n, q, size, keys, 1))
    mask = n.reshaped(bias, BATCH, HEADS, 16, 4)
    y = n.op("Attention", q, k, n.input(BATCH, HEADS, 4, FEATURES, name="v"), mask, attrs=AttentionAttrs(scale=0.3))
    found = kinds(check_simulated(n.done(y), precision, tolerance=2e-2))
    assert found.count("GatherElements") == 1
    assert "Concat" not in found


def one_of_all_axes(n: Net, bias: Value, x: Value) -> Value:
    return n.random(BATCH, HEADS, 3, 4, 3, 2)


def of_other_heads(n: Net, bias: Value, x: Value) -> Value:
    """A product whose rows have a matrix for each head."""
    rows = n.reshaped(n.transposed(x, 1, 0, 2, 3), HEADS, -1, FEATURES)
    y = n.reshaped(n.op("MatMul", rows, n.random(HEADS, FEATURES, 2)), HEADS, BATCH, 12, 2)
    return n.reshaped(n.transposed(y, 1, 0, 2, 3), BATCH, HEADS, 3, 4, 1, 2)


def in_another_order(n: Net, bias: Value, x: Value) -> Value:
    """The bias of columns, with queries and columns exchanged."""
    rows = n.reshaped(n.transposed(n.reshaped(x, BATCH, HEADS, 3, 4, FEATURES), 3, 0, 1, 2, 4), 4, -1, FEATURES)
    return n.reshaped(n.op("MatMul", rows, n.random(4, FEATURES, 2)), BATCH, HEADS, 3, 4, 1, 2)


def of_turned_features(n: Net, bias: Value, x: Value) -> Value:
    """A product whose rows are not those of a tensor."""
    turned = n.reshaped(n.transposed(x, 0, 1, 3, 2), 3, -1, FEATURES)
    return n.reshaped(n.op("MatMul", turned, n.random(3, FEATURES, 2)), BATCH, HEADS, 3, 4, 1, 2)


def of_another_tensor(n: Net, bias: Value, x: Value) -> Value:
    return term(n, n.input(BATCH, HEADS, 12, FEATURES, name="z"), (3, 4), (3, 2), 1)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (lambda: network(added=one_of_all_axes), "is no product with a constant stack of matrices"),
        (lambda: network(added=of_other_heads), "has other matrices for other heads"),
        (lambda: network(added=in_another_order), "are in another order than the queries"),
        (lambda: network(added=of_turned_features), "do not come from one tensor, whole"),
        (lambda: network(added=of_another_tensor), "are products of different tensors"),
        (lambda: network((13, 2), (13, 13)), "queries of 24 features would get 26 more"),
        (lambda: network(scale=0.0), "the scale 0.0: no feature of a key in 16 bits undoes it"),
        (lambda: network(scale=1e-5), "the scale 1e-05: no feature of a key in 16 bits undoes it"),
        (lambda: network(scale=1e5), "the scale 100000.0: no feature of a key in 16 bits undoes it"),
        (
            lambda: network(token=True, source=lambda n, x: n.op("Relu", x)),
            "the queries with a bias are not a Slice of all queries",
        ),
    ],
)
def test_other_biases_stay(graph: Callable[[], Graph], reason: str) -> None:
    check_refused(PASS, graph(), because=reason)


@pytest.mark.parametrize("graph", [lambda: network(softcap=20.0), lambda: network((12,), (6,))])
def test_not_a_sum_of_axes(graph: Callable[[], Graph]) -> None:
    check_untouched(PASS, graph())
