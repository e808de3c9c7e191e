"""Reductions over rows that a mask selects become reductions over all rows. The other rows hold the neutral element.

Graph networks (GCN: Kipf and Welling, 2017; GAT: Velickovic et al., 2018) select the edges that are no self-loops by
``i = NonZero(mask)``, and append a self-loop for each node. They compute each edge by itself, and scatter the results onto the
nodes. The number of edges depends on data, so no kernel can be planned for these operators. If all edges are computed, edges
outside of the mask scatter a number that changes nothing: 0 for a sum, infinity for a minimum.

Operators may also read the positions that a mask of several axes selects (mixtures of experts). All positions are known when the
network is built.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand
from optdnn.passes.support.rows import zero
from optdnn.passes.support.selected_rows import SelectedRows, count_of
from optdnn.types import Array, DType, is_float

REDUCES = {"ReduceSum": "add", "ReduceMin": "min", "ReduceMax": "max"}
"""Kind that reduces over rows -> the reduction."""


@rule("masked_sums", {"ScatterElements", "ScatterND", *REDUCES})
def masked_sums(graph: Graph, op: Op) -> Match | Miss | None:
    """A reduction over rows that a mask selects, or a scatter of such rows with a reduction."""
    reduction = REDUCES.get(op.kind) or op.attrs.reduction
    slots = (0,) if op.kind in REDUCES else (1, 2)
    values = [operand(op, slot) for slot in slots]
    if reduction == "none" or not op.outputs[0].type.is_static or any(count_of(graph, v) is None for v in values):
        return None
    found = SelectedRows(graph, edges=True)
    reason = found.collect(values)
    if reason is not None:
        return None if not found.choosers else Miss(reason)

    def build(patch: Patch) -> Value:
        new = found.copied(patch)
        given = list(op.inputs)
        for slot in slots:
            value = operand(op, slot)
            filler = zero(patch, graph.type(value).dtype)
            if slot == slots[-1]:
                dtype = graph.type(value).dtype
                filler = patch.constant(_neutral(reduction, dtype), "neutral")
            given[slot] = patch.add("Where", [found.mask(patch, value), new[value], filler])
        return patch.add(op.kind, given, op.attrs)

    return Match((op, *found.ops), build)


def _neutral(reduction: str, dtype: DType) -> Array:
    """The neutral element of a reduction."""
    if reduction in ("add", "mul"):
        return np.array(reduction == "mul", dtype)
    if is_float(dtype):
        return np.array(np.inf if reduction == "min" else -np.inf, dtype)
    limits = np.iinfo(dtype)
    return np.array(limits.max if reduction == "min" else limits.min, dtype)
