"""Fewer elements are sorted: those that are read, and of a very long line the largest ones of its parts.

Networks on points find neighbors by sorting all distances and keeping the first ones (``argsort()[..., :k]``: Point Transformer,
PointNet++). Only the first ones have to be selected.

RetinaNet selects 1,000 of eight million scores. A kernel that cannot hold a line in registers reads it again and again with one
block. The parts of a line are lines of their own, with a block each, and what they keep is a shorter line. Equal elements keep
their order: the parts are in order, and so are the equal elements that a part keeps.

Some detectors sort the scores of the best boxes once more before a suppression. They are in order already.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.sort import TopKAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import in_shape, integers, ints, operand, sliced
from optdnn.passes.support.parts import span
from optdnn.types import INT64, normalize_axis

HELD = 1 << 15
"""Elements of a line that one block holds in registers, and that parts of a line may keep together."""


@rule("long_top_k", {"TopK"})
def long_top_k(graph: Graph, op: Op) -> Match | Miss | None:
    """A TopK along the last axis of lines from which parts of half of :data:`HELD` elements would keep more than that."""
    t, kept = graph.type(operand(op)), ints(graph, operand(op, 1))
    if kept is None or not t.is_static:
        return None
    *lines, size = shape = t.static_shape
    if normalize_axis(op.attrs.axis, len(shape)) != len(lines) or size <= HELD or 2 * size * kept[0] <= HELD * HELD:
        return None
    parts = -(-size // HELD)
    length = size // parts
    rest = size - parts * length
    if 2 * (parts * kept[0] + rest) > size:
        return Miss("its parts would keep most of the elements")

    def build(patch: Patch) -> None:
        axis = len(lines)
        x = operand(op)
        whole = sliced(patch, x, 0, parts * length, axis) if rest else x
        attrs = TopKAttrs(axis + 1, op.attrs.largest)
        each = patch.add_op("TopK", [in_shape(patch, whole, (*lines, parts, length)), operand(op, 1)], attrs, outputs=2)
        starts = patch.constant(length * np.arange(parts, dtype=INT64)[:, None], "starts")
        numbers = patch.add("Add", [Value(each.id, 1), starts])
        values, numbers = (in_shape(patch, v, (*lines, parts * kept[0])) for v in (each.value, numbers))
        if rest:
            last = np.broadcast_to(np.arange(parts * length, size, dtype=INT64), (*lines, rest))
            values = patch.add("Concat", [values, sliced(patch, x, parts * length, size, axis)], ConcatAttrs(axis))
            numbers = patch.add("Concat", [numbers, patch.constant(np.array(last), "last")], ConcatAttrs(axis))
        best = patch.add_op("TopK", [values, operand(op, 1)], op.attrs, names=[o.name for o in op.outputs], outputs=2)
        patch.replace(op.value, best.value)
        if graph.uses(Value(op.id, 1)):
            patch.replace(Value(op.id, 1), patch.add("GatherElements", [numbers, Value(best.id, 1)], GatherAttrs(axis)))

    return Match((op,), build)


@rule("first_of_sorted", {"TopK"})
def first_of_sorted(graph: Graph, op: Op) -> Match | Miss | None:
    """A TopK whose first elements alone are read, by Slices: it selects no others."""
    kept = ints(graph, operand(op, 1))
    rank = graph.type(operand(op)).rank
    if kept is None or rank is None:
        return None
    axis = normalize_axis(op.attrs.axis, rank)
    results = op.values
    readers = [(value, user) for value in results for user in graph.users(value)]
    spans = [span(graph, user, kept[0], axis - rank) for _, user in readers]
    ends = [s[1] for s in spans if s is not None and s[0] == 0 and s[2] == 1]
    if len(ends) < len(spans) or not ends or not 0 < max(ends) < kept[0]:
        return None

    def build(patch: Patch) -> None:
        names = [o.name for o in op.outputs]
        count = integers(patch, [max(ends)], "count")
        first = patch.add_op("TopK", [operand(op), count], op.attrs, names=names, outputs=len(names))
        for (value, user), end in zip(readers, ends, strict=True):
            made = Value(first.id, value.port)
            patch.replace(user.value, made if end == max(ends) else sliced(patch, made, 0, end, axis))

    return Match((op, *dict.fromkeys(user for _, user in readers)), build)


@rule("sorted_again", {"TopK"})
def sorted_again(graph: Graph, op: Op) -> Match | None:
    """A TopK of elements that another TopK sorted: they are in order. Equal elements keep their order."""
    kept, before, t = ints(graph, operand(op, 1)), _sorting(graph, operand(op)), graph.type(operand(op))
    if (
        kept is None
        or before is None
        or not t.is_static
        or (op.attrs.largest, op.attrs.sorted) != (before.attrs.largest, True)
    ):
        return None
    axis = normalize_axis(op.attrs.axis, len(t.dims))
    if normalize_axis(before.attrs.axis, len(t.dims)) != axis or not before.attrs.sorted:
        return None
    size, shape = t.static_shape[axis], [kept[0] if k == axis else n for k, n in enumerate(t.static_shape)]
    places = np.arange(kept[0]).reshape([-1 if k == axis else 1 for k in range(len(shape))])

    def build(patch: Patch) -> None:
        patch.replace(op.value, before.value if kept[0] == size else sliced(patch, before.value, 0, kept[0], axis))
        if len(op.outputs) > 1:  # their places are read, too
            patch.replace(Value(op.id, 1), patch.constant(np.array(np.broadcast_to(places, shape), INT64), "places"))

    return Match((op,), build)


def _sorting(graph: Graph, value: Value) -> Op | None:
    """The TopK whose values ``value`` holds: its result, or the elements of its operand at the places that it lists."""
    op = graph.op(value)
    if op.kind == "TopK" and value.port == 0:
        return op
    if op.kind not in ("Gather", "GatherElements"):
        return None
    before, places = graph.op(operand(op, 1)), operand(op, 1)
    if (
        before.kind != "TopK"
        or places.port != 1
        or operand(before) != operand(op)
        or op.attrs.axis != before.attrs.axis
    ):
        return None
    return before if op.kind == "GatherElements" or len(graph.type(operand(op)).dims) == 1 else None


class LongTopK(RulePass):
    name = "long_top_k"
    rules = (sorted_again, first_of_sorted, long_top_k)
