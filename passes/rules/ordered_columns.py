"""Interleaved parts of a product's columns become consecutive: the matrix's columns are reordered, and a Split takes the parts.

In a joint projection, the columns of queries, keys and values alternate: head by head in GPT-NeoX, Bloom and Persimmon, and by
training device in CodeGen. Each part then has to be gathered by copies. With reordered columns, each part is consecutive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import VIEWS, operand, producer, reshaped, sizes_of, split_along
from optdnn.passes.support.paths import reader_after
from optdnn.passes.support.products import PRODUCTS, added_vector, constant_matrix, multiplied
from optdnn.types import Array, normalize_axis


@rule("ordered_columns", {"Reshape"})
def ordered_columns(graph: Graph, op: Op) -> Match | Miss | None:
    """``split(reshape(x W))`` becomes ``reshape(split(x W'))``, where W' has reordered columns.

    ``gather(reshape(x W), k)`` for each k is another form of the Split."""
    given, found = sizes_of(graph, operand(op)), sizes_of(graph, op.value)
    if not given or not found or (rows := _axes_of_rows(given[-1], found)) is None:
        return None
    parts = list(_parts(graph, op, np.arange(given[-1]).reshape(found[rows:]), rows))
    parts.sort(key=lambda part: not _is_rotated(graph, part[0]))
    order = np.concatenate([columns.reshape(-1) for _, columns in parts]) if parts else np.empty(0, np.int64)
    ascending = np.arange(given[-1])
    if len(parts) < 2 or not np.array_equal(np.sort(order), ascending) or np.array_equal(order, ascending):
        return None
    addition = producer(graph, op.inputs[0], {"Add"}, alone=True)
    added = None if addition is None else added_vector(graph, addition)
    product = producer(graph, op.inputs[0] if added is None else added[0], PRODUCTS, alone=True)
    matrix = None if product is None else constant_matrix(graph, product)
    if product is None or matrix is None:
        return Miss("its operand is not a product with a constant matrix that only it reads")
    vectors = [v for v in (matrix.bias, None if added is None else added[1]) if v is not None]

    def build(patch: Patch) -> None:
        biases = (np.broadcast_to(vector, order.shape)[order] for vector in vectors)
        y = multiplied(patch, operand(product), matrix.array[:, order].copy(), *biases)
        apart = split_along(patch, y, len(given) - 1, [columns.size for _, columns in parts])
        for (old, columns), part in zip(parts, apart, strict=True):
            patch.replace(old, reshaped(patch, part, (*found[:rows], *columns.shape)))

    users = {v.op: graph.op(v) for v, _ in parts}
    return Match((*users.values(), op, *([] if added is None or addition is None else [addition]), product), build)


def _axes_of_rows(columns: int, shape: tuple[int, ...]) -> int | None:
    """The number of axes of ``shape`` before the axes that ``columns`` are split into; None if columns are not split."""
    rows = len(shape)
    while rows and math.prod(shape[rows:]) < columns:
        rows -= 1
    return rows if math.prod(shape[rows:]) == columns and len(shape) - rows > 1 else None


def _is_rotated(graph: Graph, value: Value) -> bool:
    """Whether a RotaryEmbedding reads the value after views. Such parts come first: the product's launch can rotate them."""
    user = reader_after(graph, value, VIEWS)
    return user is not None and user.kind == "RotaryEmbedding"


def _parts(graph: Graph, op: Op, columns: Array, rows: int) -> Iterator[tuple[Value, Array]]:
    """The values that are parts of a Reshape's result, with their columns. Empty if the Reshape has other readers."""
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
