"""What decides: the scores that rank, the boxes that suppress one another, the numbers that become indices.

Rounding moves a feature a little, but a decision altogether. Detectors offset the boxes of a class by the class's number times the
picture's size, so that boxes of two classes never overlap: at 29,000 the next fp16 number is 16 pixels away, and suppression
is of other boxes. So what a decision is computed from, back to the convolutions and products that features come out of, is left in
fp32, unless the plan names it. It is little work: it comes after the features.
"""

from __future__ import annotations

from dataclasses import fields

from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Graph, Op
from optdnn.ops.table import OPDEFS
from optdnn.types import is_float

DECIDES = frozenset({"NonMaxSuppression", "NonZero", "TopK"})
"""Kinds whose results are places: which they are follows from comparisons of their operands' elements."""

CARRIES = frozenset({"LogSoftmax", "ReduceMax", "ReduceMin", "ScatterElements", "ScatterND", "Softmax"})
"""What stands between features and decisions, beside arithmetic on elements and what only moves data."""


def decisions(graph: Graph) -> dict[int, Op]:
    """The ops (by id) that decisions are computed by, each with the op that decides."""
    found: dict[int, Op] = {}
    for decider in graph.order():
        if not _decides(graph, decider):
            continue
        left = [decider]
        while left:
            op = left.pop()
            if op.id in found:
                continue
            found[op.id] = decider
            producers = (graph.op(v) for v in op.inputs if v is not None)
            left += [p for p in producers if p.id not in found and _carries(p)]
    return found


def _decides(graph: Graph, op: Op) -> bool:
    """Whether an op's result is a place; an If or Loop does that in which something decides on what it captures."""
    if op.kind in DECIDES:
        return True
    if op.kind == "Cast":
        value = op.inputs[0]
        assert value is not None
        return is_float(graph.type(value).dtype) and op.outputs[0].type.dtype.kind in "iu"
    bodies = (getattr(op.attrs, f.name) for f in fields(op.attrs))
    return any(_decides(b.graph, inner) for b in bodies if isinstance(b, GraphBody) for inner in b.graph.ops())


def _carries(op: Op) -> bool:
    traits = OPDEFS[op.kind].traits if op.kind in OPDEFS else None
    return op.kind in CARRIES or (traits is not None and (traits.pointwise or traits.movement))
