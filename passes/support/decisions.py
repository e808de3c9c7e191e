"""Operators that decide (rank scores, suppress boxes, compute indices), and the operators on which their decisions depend.

Rounding changes a feature a little, but a decision completely. Detectors offset the boxes of a class by the class's number times
the picture's size, so that boxes of two classes never overlap. At an offset of 29,000 the next fp16 number is 16 pixels away, and
the wrong boxes would be suppressed. So the operators between a decision and the convolutions and products that compute features
stay in fp32, unless the plan names them. This is little work, since it comes after the features.
"""

from __future__ import annotations

from dataclasses import fields

from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Graph, Op
from optdnn.ops.table import OPDEFS
from optdnn.passes.support.facts import operand
from optdnn.types import is_float

DECIDES = frozenset({"NonMaxSuppression", "NonZero", "SVMDecision", "TopK", "TreeEnsemble"})
"""Kinds that compare the elements of their operands, and whose results are indices, or depend on comparisons alone."""

CARRIES = frozenset(
    {"GlobalMaxPool", "LogSoftmax", "MaxPool", "ReduceMax", "ReduceMin", "ScatterElements", "ScatterND", "Softmax"}
)
"""Kinds between features and decisions, besides pointwise operators and operators that only move elements."""


def decisions(graph: Graph) -> dict[int, Op]:
    """Op id -> the op that decides, for every op that a decision depends on."""
    found: dict[int, Op] = {}
    for decider in graph.order():
        if not decides(graph, decider):
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


def decides(graph: Graph, op: Op) -> bool:
    """Whether an op's result is an index that depends on a comparison or a rounding; or an If or Loop has such an op in a body."""
    if op.kind in DECIDES:
        return True
    if op.kind == "Cast":
        return is_float(graph.type(operand(op)).dtype) and op.outputs[0].type.dtype.kind in "iu"
    bodies = (getattr(op.attrs, f.name) for f in fields(op.attrs))
    return any(decides(b.graph, inner) for b in bodies if isinstance(b, GraphBody) for inner in b.graph.ops())


def _carries(op: Op) -> bool:
    traits = OPDEFS[op.kind].traits if op.kind in OPDEFS else None
    return op.kind in CARRIES or (traits is not None and (traits.pointwise or traits.movement))
