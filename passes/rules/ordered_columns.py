"""Parts of a product's columns that a Reshape makes lie one after the other, as a Split of the product.

Queries, keys and values of a joint projection alternate: head by head in GPT-NeoX, Bloom and Persimmon, and by the devices of its
training in CodeGen, whose heads a Reshape then had to copy together. With its matrix's columns in another order, each part's columns
follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, operand, producer, reshaped, shape_of
from optdnn.passes.support.products import PRODUCTS, added_vector, constant_matrix
from optdnn.types import Array, normalize_axis

VIEWS = RESHAPES | {"Transpose"}
_MOST_ADDITIONS = 4


@rule("ordered_columns", {"Reshape"})
def ordered_columns(graph: Graph, op: Op) -> Match | Miss | None:
    """``split(reshape(x W))`` or ``gather(reshape(x W), k)`` of columns that do not follow one another: of ``x W'``, before the Reshape."""
    before, after, value = shape_of(graph, operand(op)), shape_of(graph, op.value), operand(op)
    if before is None or after is None or any(not isinstance(n, int) for n in (*before, *after)):
        return None
    rows = len(after)
    while rows and math.prod(after[rows:]) < before[-1]:
        rows -= 1
    if math.prod(after[rows:]) != before[-1] or len(after) - rows < 2:
        return None
    parts = sorted(
        _parts(graph, op, np.arange(before[-1]).reshape(after[rows:]), rows), key=lambda p: not _turns(graph, p[0])
    )
    order = np.concatenate([columns.reshape(-1) for _, columns in parts]) if parts else np.empty(0, np.int64)
    ascending = np.arange(before[-1])
    if len(parts) < 2 or not np.array_equal(np.sort(order), ascending) or np.array_equal(order, ascending):
        return None
    ops, vectors = [op], list[Array]()
    while (addition := producer(graph, value, {"Add"}, alone=True)) is not None:
        found = added_vector(graph, addition)
        if found is None or len(vectors) == _MOST_ADDITIONS:
            return None
        value = found[0]
        vectors.insert(0, found[1])
        ops.append(addition)
    product = producer(graph, value, PRODUCTS, alone=True)
    matrix = None if product is None else constant_matrix(graph, product)
    if product is None or matrix is None:
        return Miss("its rows are not those of a product with a constant matrix alone")
    given, bias = matrix
    weight = graph.constant_value(given) if isinstance(given, Value) else given
    assert weight is not None
    users = {graph.op(v).id: graph.op(v) for v, _ in parts}

    def build(patch: Patch) -> None:
        y = patch.add(
            "MatMul",
            [product.inputs[0], patch.constant(np.ascontiguousarray(weight[:, order]), "weight")],
            MatMulAttrs(),
        )
        for vector in [*([] if bias is None else [bias]), *vectors]:
            y = patch.add(
                "Add", [y, patch.constant(np.ascontiguousarray(np.broadcast_to(vector, order.shape)[order]), "bias")]
            )
        sizes = patch.constant(np.array([columns.size for _, columns in parts], np.int64), "sizes")
        split = patch.add_op("Split", [y, sizes], SplitAttrs(len(before) - 1), outputs=len(parts))
        for k, (old, columns) in enumerate(parts):
            patch.replace(old, reshaped(patch, Value(split.id, k), (*after[:rows], *columns.shape)))

    return Match((*users.values(), *ops, product), build)


def _turns(graph: Graph, value: Value) -> bool:
    """Whether it is heads that turn by their positions, which come first: the product's launch turns them."""
    user = graph.sole_user(value)
    while user is not None and user.kind in VIEWS:
        user = graph.sole_user(user.value)
    return user is not None and user.kind == "RotaryEmbedding"


def _parts(graph: Graph, op: Op, columns: Array, rows: int) -> Iterator[tuple[Value, Array]]:
    """The values that are parts of a Reshape's result, and their columns; none where something else reads it."""
    found: list[tuple[Value, Array]] = []
    for user in graph.users(op.value):
        axis = normalize_axis(user.attrs.axis, rows + columns.ndim) - rows if user.kind in ("Split", "Gather") else -1
        if axis < 0:
            return
        if user.kind == "Split":
            ends = np.cumsum([out.type.static_shape[axis + rows] for out in user.outputs])[:-1]
            found += [(Value(user.id, k), part) for k, part in enumerate(np.split(columns, ends, axis))]
            continue
        index = graph.constant_value(user.inputs[1])
        if index is None or index.ndim:
            return
        found.append((user.value, columns.take(int(index), axis)))
    yield from found
