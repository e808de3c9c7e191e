"""Rows that a mask chose, written to computed places, become all rows: the others are written to a row that is cut off.

Graph networks with weights of edges (GCN's edge weights, PyTorch Geometric's ``add_remaining_self_loops``) write the weights of the
loops among the edges to the loops' nodes: ``y[i[chosen]] = w[chosen]``, with ``chosen = NonZero(mask)``. The order of the rows
stays, so of several that are written to one place, the same one is there in the end.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.rules.masked_sums import Chosen, count_of
from optdnn.passes.support.facts import integers, operand
from optdnn.types import normalize_axis


@rule("masked_writes", {"ScatterElements", "ScatterND"})
def masked_writes(graph: Graph, op: Op) -> Match | Miss | None:
    """A scatter without a reduction, of places and rows that a mask chose."""
    base, places, rows = (operand(op, slot) for slot in range(3))
    count = count_of(graph, places)
    if (
        op.attrs.reduction != "none"
        or not op.outputs[0].type.is_static
        or count is None
        or count_of(graph, rows) is None
    ):
        return None
    found = Chosen(graph)
    reason = found.collect([places, rows])
    if reason is not None or not found.masks:
        return None
    dims = graph.type(places).dims
    coordinates = dims[-1] if op.kind == "ScatterND" else 1
    if not isinstance(coordinates, int):
        return None
    axis = 0 if op.kind == "ScatterND" else normalize_axis(op.attrs.axis, len(dims))
    if op.kind == "ScatterElements" and dims[axis] != count:
        return Miss("it writes along another axis than that of the rows that the mask selected")
    size = graph.type(base).static_shape[axis]

    def build(patch: Patch) -> Value:
        new = found.copied(patch)
        wide = list(graph.type(base).static_shape)
        wide[axis] = 1
        spare = patch.constant(np.zeros(wide, graph.type(base).dtype), "spare")
        longer = patch.add("Concat", [base, spare], ConcatAttrs(axis))
        beyond = np.zeros(coordinates, graph.type(places).dtype)
        beyond[0] = size
        at = patch.constant(beyond, "beyond")
        index = patch.add("Where", [found.mask(patch, places), new[places], at])
        y = patch.add(op.kind, [longer, index, new[rows]], op.attrs)
        return patch.add("Slice", [y, *(integers(patch, [n], "bounds") for n in (0, size, axis))])

    return Match((op, *found.ops), build)
