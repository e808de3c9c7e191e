"""Rows of several tables, and columns of a matrix as indices of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.support.facts import integers, ints, producer, shape_of
from optdnn.types import INT64, Array, is_float, normalize_axis

LEAST = 4
"""Fewest bags, or embeddings, that are joined."""
MOST_BYTES = 1 << 30
"""Largest size of joined tables."""


def gathered_table(graph: Graph, op: Op) -> Array | None:
    """The constant floating matrix whose rows a Gather takes; None for other operators."""
    table = graph.constant_value(op.inputs[0]) if op.kind == "Gather" else None
    if table is None or table.ndim != 2 or not is_float(table.dtype) or normalize_axis(op.attrs.axis, 2) != 0:
        return None
    return table


def column_of(graph: Graph, index: Value | None) -> tuple[Value, int] | None:
    """The matrix that ``index`` is a column of, up to views and casts to int64, and the column's number; else None."""
    while (view := producer(graph, index, {"Cast", "Reshape", "Squeeze", "Unsqueeze"})) is not None:
        if view.kind == "Cast" and view.attrs.to != INT64:
            return None
        index = view.inputs[0]
    taken = producer(graph, index, {"Gather", "Slice"})
    source = None if taken is None else taken.inputs[0]
    shape = shape_of(graph, source)
    if taken is None or source is None or shape is None or len(shape) != 2 or not isinstance(shape[1], int):
        return None
    if taken.kind == "Gather":
        at = ints(graph, taken.input(1))
        axis, number = taken.attrs.axis, at[0] if at is not None and len(at) == 1 else None
    else:
        starts, axes = ints(graph, taken.input(1)), ints(graph, taken.input(3))
        axis, number = (axes or (0,))[0], starts[0] if starts is not None and len(starts) == 1 else None
        if taken.outputs[0].type.shape != (shape[0], 1):
            return None
    if number is None or normalize_axis(axis, 2) != 1:
        return None
    return source, number % shape[1]


def columns_of(patch: Patch, source: Value, columns: Sequence[int]) -> Value:
    """Add the columns of a matrix (B, F) as indices (B, K)."""
    index = patch.add("Gather", [source, integers(patch, columns, "columns")], GatherAttrs(1))
    return index if patch.graph.type(source).dtype == INT64 else patch.add("Cast", [index], CastAttrs(INT64))


def rows_of_tables(patch: Patch, index: Value, tables: Sequence[Array]) -> Value:
    """The rows ``index`` (B, K, ...) of K tables. Negative indices count from the end of their own table."""
    rank = len(patch.type(index).dims)
    ends = np.cumsum([len(t) for t in tables])
    shape = (len(tables), *(1,) * (rank - 2))
    starts = np.array([0, *ends[:-1]])
    first, last = (
        patch.constant(v.astype(np.int64).reshape(shape), name) for v, name in ((starts, "starts"), (ends, "ends"))
    )
    below = patch.add("Less", [index, patch.constant(np.array(0, np.int64), "zero")])
    place = patch.add("Add", [index, patch.add("Where", [below, last, first])])
    return patch.add("Gather", [patch.constant(np.concatenate(tables), "tables"), place], GatherAttrs(0))
