"""The best of the scores above a threshold, which detectors take at each level (RetinaNet, FCOS).

``i = NonZero(scores > t)``, then the ``min(K, len(i))`` largest of ``scores[i]``, and their numbers ``i[best]``. The size of ``i``
depends on data. The largest K of all scores, where those that are not above t count as less than all others, are the same in
front; the operators after them then read rows of a tensor of a known size.
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
"""Less than all scores above a threshold: the least number of fp16."""


@rule("best_rows", {"TopK"})
def best_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """A TopK of the scores above a constant, up to a number, whose indices only pick the positions of these scores."""
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
        return Miss("it does not take all scores above the threshold up to a number, or how many there are is unknown")
    ends = graph.users(Value(op.id, 1))
    if any(not _picks(graph, end, op, chooser) for end in ends):
        return Miss("its indices do not only select the positions of these scores")

    def build(patch: Patch) -> None:
        dtype = graph.type(scores).dtype
        kept = patch.add("Where", [operand(chooser), scores, patch.constant(np.array(LEAST, dtype), "least")])
        if total < count:  # numbers of the missing ones are only behind those that are taken
            missing = patch.constant(np.array(LEAST, dtype), "least")
            kept = patch.add("Pad", [kept, integers(patch, [0, count - total], "missing"), missing], PadAttrs())
        top = patch.add_op("TopK", [kept, integers(patch, [count], "count")], op.attrs, outputs=2)
        numbers = Value(top.id, 1)
        if total < count:
            numbers = patch.add("Min", [numbers, patch.constant(np.array(total - 1, np.int64), "last")])
        there = patch.add("Shape", [chooser.value], ShapeAttrs(1, 2), src=chooser.src)
        taken = patch.add("Min", [there, integers(patch, [count], "most")], src=chooser.src)
        patch.replace(op.value, _first(patch, Value(top.id, 0), taken, op))
        for end in ends:
            patch.replace(end.value, _first(patch, numbers, taken, end))

    return Match((op, *ends, gather), build)


def _picks(graph: Graph, end: Op, top: Op, chooser: Op) -> bool:
    """Whether it picks positions of scores by the indices of the best."""
    return (
        end.kind == "Gather"
        and operand(end, 1) == Value(top.id, 1)
        and graph.type(operand(end)).rank == 1
        and chosen_by(graph, operand(end)) == chooser
    )


def _first(patch: Patch, x: Value, count: Value, op: Op) -> Value:
    """The first elements, on behalf of ``op``."""
    return patch.add("Slice", [x, integers(patch, [0], "start"), count, integers(patch, [0], "axis")], src=op.src)
