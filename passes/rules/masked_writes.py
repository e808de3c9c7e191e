"""Rows that a mask selects and that are written to computed positions become all rows: the others go to an extra row.

Graph networks with weights of edges (GCN's edge weights, PyTorch Geometric's ``add_remaining_self_loops``) write the weights of
self-loops to the nodes of these loops: ``y[i[selected]] = w[selected]``, with ``selected = NonZero(mask)``. The order of the rows
stays, so if several rows are written to one position, the same row remains. The extra row is cut off at the end.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.rules.masked_sums import SelectedRows, count_of
from optdnn.passes.support.facts import operand, sliced
from optdnn.types import normalize_axis


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
    found = SelectedRows(graph)
    reason = found.collect([positions, rows])
    if reason is not None or not found.masks:
        return None
    dims = graph.type(positions).dims
    coordinates = dims[-1] if op.kind == "ScatterND" else 1
    if not isinstance(coordinates, int):
        return None
    axis = 0 if op.kind == "ScatterND" else normalize_axis(op.attrs.axis, len(dims))
    if op.kind == "ScatterElements" and dims[axis] != count:
        return Miss("it writes along another axis than the axis of the rows that the mask selects")
    size = graph.type(base).static_shape[axis]

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

    return Match((op, *found.ops), build)
