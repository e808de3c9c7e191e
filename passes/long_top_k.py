"""The largest elements of a very long line are selected among the largest ones of its parts.

RetinaNet selects 1,000 of eight million scores. A kernel that cannot hold a line in registers reads it again and again with one
block. The parts of a line are lines of their own, with a block each, and what they keep is a shorter line. Equal elements keep
their order: the parts are in order, and so are the equal elements that a part keeps.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.sort import TopKAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import in_shape, ints, operand, sliced
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


class LongTopK(RulePass):
    name = "long_top_k"
    rules = (long_top_k,)
