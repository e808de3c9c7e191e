"""The best of selected rows are the best of all rows, if the scores of others are minus infinity.

Detectors keep the best ``min(K, n)`` of the boxes that suppressions of several classes keep (TensorFlow's combined suppression,
PaddleDetection's ``multiclass_nms``). The number ``n`` depends on data. If the suppressions' results are padded, only a Slice of
the best boxes depends on it.
"""

from __future__ import annotations

import numpy as np

from optdnn.dim import INF, Dim, bounds, dim_min
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import integers, operand
from optdnn.passes.support.lower_bounds import has_lower_bound
from optdnn.passes.support.selected_rows import SelectedRows
from optdnn.types import is_float, normalize_axis


@rule("best_selected", {"TopK"})
def best_selected(graph: Graph, op: Op) -> Match | Miss | None:
    """A TopK of at most K kept boxes, by whose indices rows of the same selection are gathered."""
    scores, dims = operand(op), op.outputs[0].type.dims
    count = graph.type(scores).dims[0] if len(dims) == 1 else None
    if not isinstance(count, Dim) or not op.attrs.largest or not is_float(graph.type(scores).dtype):
        return None
    most = bounds(dims[0])[1]
    if most >= INF or dims[0] != dim_min(most, count):
        return None
    found = SelectedRows(graph, kept=True)
    reason = found.collect([scores])
    if reason is not None or count not in found.parts or not any(part.kept for part in found.parts[count]):
        return None
    ends = graph.users(Value(op.id, 1))
    if any(not _gathers(graph, end, op, count) for end in ends):
        return Miss("its indices do not only gather rows of the same selection")
    found = SelectedRows(graph, kept=True)
    reason = found.collect([scores, *(operand(end) for end in ends)])
    if reason is not None:
        return Miss(reason)
    if not has_lower_bound(graph, scores):
        return Miss("a score may be minus infinity, which does not tell it from the other rows")

    def build(patch: Patch) -> None:
        new = found.copied(patch)
        least = patch.constant(np.array(-np.inf, graph.type(scores).dtype), "least")
        given = patch.add("Where", [found.mask(patch, scores), new[scores], least])
        number = integers(patch, [most], "most")
        top = patch.add_op("TopK", [given, number], op.attrs, outputs=2)
        taken = patch.add("Min", [found.number(patch, count), number])
        patch.replace(op.value, _first(patch, top.value, taken, 0, op))
        for end in ends:
            rows = patch.add("Gather", [new[operand(end)], Value(top.id, 1)], end.attrs, src=end.src)
            axis = normalize_axis(end.attrs.axis, len(patch.type(rows).dims))
            patch.replace(end.value, _first(patch, rows, taken, axis, end))

    return Match((op, *ends, *found.ops), build)


def _gathers(graph: Graph, end: Op, top: Op, count: Dim) -> bool:
    """Whether ``end`` gathers some of ``count`` rows by the indices that ``top`` returns."""
    if end.kind != "Gather" or operand(end, 1) != Value(top.id, 1):
        return False
    dims = graph.type(operand(end)).dims
    return dims[normalize_axis(end.attrs.axis, len(dims))] == count


def _first(patch: Patch, x: Value, count: Value, axis: int, op: Op) -> Value:
    """Add a Slice of the first ``count`` rows, with the provenance of ``op``."""
    limits = integers(patch, [0], "start"), count, integers(patch, [axis], "axis")
    return patch.add("Slice", [x, *limits], src=op.src)
