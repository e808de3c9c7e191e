"""Scatters of whole rows with an index for each element become a ScatterND with one index for each row.

PyTorch's ``scatter_add`` of messages to the nodes of a graph repeats the index of the node for each feature. With a ScatterND, a
GPU finds the rows of a node once for several features.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import ScatterNDAttrs
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import operand, reshaped
from optdnn.types import normalize_axis


@rule("scatter_rows", {"ScatterElements"})
def scatter_rows(graph: Graph, op: Op) -> Match | None:
    """A ScatterElements along axis 0 of rows as wide as the result's rows, whose indices are equal along each row."""
    x, indices, rows = (operand(op, slot) for slot in range(3))
    shape, index = graph.type(x), graph.type(indices)
    if (
        not shape.is_static
        or not index.is_static
        or len(shape.dims) < 2
        or normalize_axis(op.attrs.axis, len(shape.dims))
    ):
        return None
    if shape.static_shape[1:] != index.static_shape[1:] or not _is_equal_along_rows(graph, indices):
        return None
    count = index.static_shape[0]

    def build(patch: Patch) -> Value:
        column = reshaped(patch, _column(graph, patch, indices), (count, 1))
        return patch.add("ScatterND", [x, column, rows], ScatterNDAttrs(op.attrs.reduction))

    return Match((op,), build)


def _is_column(graph: Graph, value: Value) -> bool:
    """Whether a value has one element per row, or a single element."""
    dims = graph.type(value).dims
    return all(d == 1 for d in dims[1:]) if dims else True


def _is_equal_along_rows(graph: Graph, value: Value) -> bool:
    """Whether ``value`` is an Expand of a column, or a Where of columns and such values."""
    op = graph.op(value)
    if op.kind == "Expand":
        rank = len(graph.type(value).dims)
        return len(graph.type(operand(op)).dims) == rank and _is_column(graph, operand(op))
    if op.kind != "Where" or _is_column(graph, value):
        return False
    return all(_is_column(graph, v) or _is_equal_along_rows(graph, v) for v in op.inputs if v is not None)


def _column(graph: Graph, patch: Patch, value: Value) -> Value:
    """The column of a value that is equal along rows (:func:`_is_equal_along_rows`)."""
    op = graph.op(value)
    if _is_column(graph, value):
        return value
    if op.kind == "Expand":
        return operand(op)
    return patch.add("Where", [_column(graph, patch, v) for v in op.inputs if v is not None])
