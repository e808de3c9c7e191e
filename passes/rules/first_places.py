"""The first rows that a mask selects, ``x[NonZero(mask)][:k]``, are the first of k rows that are always there.

Detectors of rotated boxes (Ultralytics' export with a suppression) keep the first 300 of the boxes that no better box overlaps. A
scatter lists their places, and behind them the places of the other boxes. So the number of places is known, and only the number of
boxes that are kept depends on data.
"""

from __future__ import annotations

from optdnn.dim import bounds
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import ShapeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import integers, operand, slice_limits, sliced
from optdnn.passes.support.places import MOST_PLACES, ones_of, places_of, total_of
from optdnn.passes.support.rows import chosen_by


@rule("first_places", {"Slice"})
def first_places(graph: Graph, op: Op) -> Match | Miss | None:
    """A Slice of the first places that a NonZero of a vector lists, or of the rows that a Gather takes from there."""
    limits = slice_limits(graph, op)
    rows = graph.op(operand(op))
    gather = rows if rows.kind == "Gather" else None
    places = operand(op) if gather is None else operand(gather, 1)
    chooser = chosen_by(graph, places) if len(graph.type(places).dims) == 1 else None
    if chooser is None or limits is None or len(limits) != 1:
        return None
    ((axis, start, end, step),) = limits
    if start != 0 or end <= 0 or step != 1:
        return None
    (size,) = graph.type(operand(chooser)).dims
    if not isinstance(size, int) or size == 0 or (gather is not None and gather.attrs.axis != axis):
        return None
    if gather is not None and bounds(graph.type(operand(gather)).dims[axis])[0] < size:
        return Miss(f"{gather.name} takes rows of a table that may have fewer than {size}")
    if size > MOST_PLACES:
        return Miss(
            f"it lists the places of {size} elements; a scan of more than {MOST_PLACES} takes longer than the CPU"
        )
    most = min(end, size)

    def build(patch: Patch) -> Value:
        ones = ones_of(patch, operand(chooser))
        first = sliced(patch, places_of(patch, ones, total_of(patch, ones)), 0, most, 0)
        if gather is not None:
            first = patch.add("Gather", [operand(gather), first], gather.attrs, src=gather.src)
        number = patch.add("Shape", [chooser.value], ShapeAttrs(1, 2))
        last = patch.add("Min", [number, integers(patch, [most], "most")])
        return patch.add("Slice", [first, integers(patch, [0], "start"), last, integers(patch, [axis], "axis")])

    return Match((op, *([] if gather is None else [gather])), build)
