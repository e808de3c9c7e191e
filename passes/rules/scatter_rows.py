"""Scatters of whole rows that name the row again for each of its elements.

PyTorch's ``scatter_add`` of messages to the nodes of a graph expands the number of the node over the features. As a ScatterND, each
row has one number, and a GPU looks for the rows of a node once for several features.
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
    """A scatter along axis 0 of rows as wide as the result's, whose places are equal along each row."""
    x, places, rows = (operand(op, slot) for slot in range(3))
    shape, index = graph.type(x), graph.type(places)
    if (
        not shape.is_static
        or not index.is_static
        or len(shape.dims) < 2
        or normalize_axis(op.attrs.axis, len(shape.dims))
    ):
        return None
    if shape.static_shape[1:] != index.static_shape[1:] or not _is_equal_along_rows(graph, places):
        return None
    count = index.static_shape[0]

    def build(patch: Patch) -> Value:
        narrow = _narrow(graph, patch, places)
        return patch.add(
            "ScatterND", [x, reshaped(patch, narrow, (count, 1)), rows], ScatterNDAttrs(op.attrs.reduction)
        )

    return Match((op,), build)


def _is_column(graph: Graph, value: Value) -> bool:
    """Whether a value has one element for each row, or one in all."""
    dims = graph.type(value).dims
    return all(d == 1 for d in dims[1:]) if dims else True


def _is_equal_along_rows(graph: Graph, value: Value) -> bool:
    """An Expand of a column, or a choice between such values."""
    op = graph.op(value)
    if op.kind == "Expand":
        rank = len(graph.type(value).dims)
        return len(graph.type(operand(op)).dims) == rank and _is_column(graph, operand(op))
    if op.kind != "Where" or _is_column(graph, value):
        return False
    return all(_is_column(graph, v) or _is_equal_along_rows(graph, v) for v in op.inputs if v is not None)


def _narrow(graph: Graph, patch: Patch, value: Value) -> Value:
    """The column of numbers of such a value."""
    op = graph.op(value)
    if _is_column(graph, value):
        return value
    if op.kind == "Expand":
        return operand(op)
    return patch.add("Where", [_narrow(graph, patch, v) for v in op.inputs if v is not None])
