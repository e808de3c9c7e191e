"""Rows that a mask selects and that are written to computed positions become all rows: the others go to an extra row.

Graph networks with weights of edges (GCN's edge weights, PyTorch Geometric's ``add_remaining_self_loops``) write the weights of
self-loops to the nodes of these loops: ``y[i[selected]] = w[selected]``, with ``selected = NonZero(mask)``. The order of the rows
stays, so if several rows are written to one position, the same row remains. The extra row is cut off at the end.

Mixtures of experts (Mixtral, Qwen 3) write to positions of the mask itself: ``choice, token = NonZero(mask)`` with a row of the
mask for each choice, and ``y[token] = f(x[token])``. Then row ``token`` of the result is that of the last choice that the mask
selects, and no row is scattered.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, operand, sliced
from optdnn.passes.support.selected_rows import SelectedRows, count_of
from optdnn.types import normalize_axis

MOST_CHOICES = 16
"""Most selections of one row."""


@rule("masked_writes", {"ScatterElements", "ScatterND"})
def masked_writes(graph: Graph, op: Op) -> Match | Miss | None:
    """A scatter without a reduction whose positions and rows a mask selects."""
    base, positions, rows = (operand(op, slot) for slot in range(3))
    count = count_of(graph, positions)
    if (
        op.attrs.reduction != "none"
        or not op.outputs[0].type.is_static
        or count is None
        or count_of(graph, rows) is None
    ):
        return None
    found = SelectedRows(graph, edges=True)
    reason = found.collect([positions, rows])
    if reason is not None or not found.choosers:
        return None
    dims = graph.type(positions).dims
    coordinates = dims[-1] if op.kind == "ScatterND" else 1
    if not isinstance(coordinates, int):
        return None
    axis = 0 if op.kind == "ScatterND" else normalize_axis(op.attrs.axis, len(dims))
    if op.kind == "ScatterElements" and dims[axis] != count:
        return Miss("it writes along another axis than the axis of the rows that the mask selects")
    size = graph.type(base).static_shape[axis]
    whole = all(
        n == m for k, (n, m) in enumerate(zip(graph.type(rows).dims, graph.type(base).dims, strict=True)) if k != axis
    )
    choices = _choices(graph, positions, size) if whole else 0

    def selected(patch: Patch) -> Value:
        new, y = found.copied(patch), base
        flags = found.mask(patch, rows)
        for k in range(choices):
            flag, row = (sliced(patch, v, k * size, (k + 1) * size, axis) for v in (flags, new[rows]))
            y = patch.add("Where", [flag, row, y])
        return y

    def build(patch: Patch) -> Value:
        new = found.copied(patch)
        extra_shape = list(graph.type(base).static_shape)
        extra_shape[axis] = 1
        extra_row = patch.constant(np.zeros(extra_shape, graph.type(base).dtype), "spare")
        longer = patch.add("Concat", [base, extra_row], ConcatAttrs(axis))
        beyond = np.zeros(coordinates, graph.type(positions).dtype)
        beyond[0] = size
        at = patch.constant(beyond, "beyond")
        index = patch.add("Where", [found.mask(patch, positions), new[positions], at])
        y = patch.add(op.kind, [longer, index, new[rows]], op.attrs)
        return sliced(patch, y, 0, size, axis)

    return Match((op, *found.ops), selected if 0 < choices <= MOST_CHOICES else build)


def _choices(graph: Graph, positions: Value, size: int) -> int:
    """The number of rows of a mask of ``size`` columns, if ``positions`` are the columns that its NonZero selects; 0 for others."""
    made, column = graph.op(positions), 0
    while made.kind in (*RESHAPES, "Expand", "Split", "Transpose"):
        if made.kind == "Split":  # of pairs of numbers: each part is a number
            column = positions.port
        positions = operand(made)
        made = graph.op(positions)
    if made.kind != "NonZero":
        return 0
    shape = graph.type(operand(made)).static_shape
    return math.prod(shape[:-1]) if (column, shape[-1]) == (len(shape) - 1, size) else 0
