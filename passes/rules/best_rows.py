"""The best scores above a threshold, which detectors select at each level (RetinaNet, FCOS), become a TopK of all scores.

Detectors compute ``i = NonZero(scores > t)``, the ``min(K, len(i))`` largest of ``scores[i]``, and their positions ``i[best]``. The
size of ``i`` depends on data. If scores that are not above ``t`` are replaced by a very small number, the K largest of all scores
begin with the same scores. Then only the number of selected rows depends on data.
"""

from __future__ import annotations

import numpy as np

from optdnn.dim import INF, Dim, bounds, dim_min
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import PadAttrs
from optdnn.ops.shape import ShapeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import integers, operand, producer, scalar
from optdnn.passes.support.rows import chosen_by

GATHERS = frozenset({"Gather", "GatherND"})
LEAST = -65504.0
"""The lowest number of fp16. It replaces scores that are not above the threshold."""


@rule("best_rows", {"TopK"})
def best_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """A TopK of at most K scores above a constant, whose indices only serve to find the positions of these scores."""
    gather, dims = producer(graph, operand(op), GATHERS), op.outputs[0].type.dims
    if gather is None or len(dims) != 1 or not isinstance(dims[0], Dim) or not op.attrs.largest:
        return None
    chooser, scores = chosen_by(graph, operand(gather, 1)), operand(gather)
    compared = None if chooser is None else producer(graph, operand(chooser), {"Greater"})
    if chooser is None or compared is None or operand(compared) != scores:
        return None
    least = scalar(graph, operand(compared, 1))
    total = graph.type(scores).dims[0]
    count, above = bounds(dims[0])[1], chooser.outputs[0].type.dims[1]
    if least is None or float(least) < LEAST:
        return Miss("its threshold is no constant of fp16")
    if not isinstance(total, int) or count >= INF or dims[0] != dim_min(count, above):
        return Miss("it does not take all scores above the threshold up to a fixed number, or their number is unknown")
    ends = graph.users(Value(op.id, 1))
    if any(not _picks(graph, end, op, chooser) for end in ends):
        return Miss("its indices do not only select the positions of these scores")

    def build(patch: Patch) -> None:
        dtype = graph.type(scores).dtype
        kept = patch.add("Where", [operand(chooser), scores, patch.constant(np.array(LEAST, dtype), "least")])
        if total < count:  # the added scores come last, and are never taken
            missing = patch.constant(np.array(LEAST, dtype), "least")
            kept = patch.add("Pad", [kept, integers(patch, [0, count - total], "missing"), missing], PadAttrs())
        top = patch.add_op("TopK", [kept, integers(patch, [count], "count")], op.attrs, outputs=2)
        indices = Value(top.id, 1)
        if total < count:
            indices = patch.add("Min", [indices, patch.constant(np.array(total - 1, np.int64), "last")])
        found = patch.add("Shape", [chooser.value], ShapeAttrs(1, 2), src=chooser.src)
        taken = patch.add("Min", [found, integers(patch, [count], "most")], src=chooser.src)
        patch.replace(op.value, _first(patch, Value(top.id, 0), taken, op))
        for end in ends:
            patch.replace(end.value, _first(patch, indices, taken, end))

    return Match((op, *ends, gather), build)


def _picks(graph: Graph, end: Op, top: Op, chooser: Op) -> bool:
    """Whether ``end`` gathers the positions of the best scores by the indices that ``top`` returns."""
    return (
        end.kind == "Gather"
        and operand(end, 1) == Value(top.id, 1)
        and graph.type(operand(end)).rank == 1
        and chosen_by(graph, operand(end)) == chooser
    )


def _first(patch: Patch, x: Value, count: Value, op: Op) -> Value:
    """Add a Slice of the first ``count`` elements, with the provenance of ``op``."""
    return patch.add("Slice", [x, integers(patch, [0], "start"), count, integers(patch, [0], "axis")], src=op.src)
