"""Operators that decide (rank scores, suppress boxes, compute indices), and the operators on which their decisions depend.

Rounding changes a feature a little, but a decision completely. Detectors offset the boxes of a class by the class's number times
the picture's size, so that boxes of two classes never overlap. At an offset of 29,000 the next fp16 number is 16 pixels away, and
the wrong boxes would be suppressed. So the operators between a decision and the convolutions and products that compute features
stay in fp32, unless the plan names them. This is little work, since it comes after the features.

An Equal of two computed floats decides, too: ``x == max(x)`` finds the peaks of a heat map, or the pairs of points that choose each
other (LoFTR). A kernel may compute ``x`` again in its registers, and then the rounded maximum equals none of its elements.
"""

from __future__ import annotations

from dataclasses import fields

from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.table import OPDEFS
from optdnn.passes.support.facts import is_pointwise, operand
from optdnn.passes.support.open_stages import steps_of
from optdnn.types import is_float

DECIDES = frozenset({"NonMaxSuppression", "NonZero", "SVMDecision", "TopK", "TreeEnsemble"})
"""Kinds that compare the elements of their operands, and whose results are indices, or depend on comparisons alone."""

SELECTS = frozenset({"GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMin"})
"""Kinds whose results are elements of their operand, besides operators that only move elements."""

CARRIES = SELECTS | {"LogSoftmax", "ScatterElements", "ScatterND", "Softmax"}
"""Kinds between features and decisions, besides pointwise operators and operators that only move elements."""


def decisions(graph: Graph) -> dict[int, Op]:
    """Op id -> the op that decides, for every op that a decision depends on."""
    found: dict[int, Op] = {}
    equals = _equals(graph)
    for decider in graph.order():
        if decider.id not in equals and not decides(graph, decider):
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


def _equals(graph: Graph) -> set[int]:
    """The ids of the ops that ask, as an op or as a stage, whether two computed floats are equal, of which a kernel may compute one
    in its registers. Values that a layer stored are the same for all readers."""
    found = set[int]()
    for op in graph.order():
        if op.kind != "Equal" and (op.kind != "Pointwise" or all(s.kind != "Equal" for s in op.attrs.epilogue)):
            continue
        for step in steps_of(op):
            read = [v for v in step.args if isinstance(v, Value)]
            computed = all(graph.constant_value(v) is None and is_float(graph.type(v).dtype) for v in read)
            if step.kind == "Equal" and computed and (len(read) < 2 or any(_is_pointwise(graph, v) for v in read)):
                found.add(op.id)
    return found


def _is_pointwise(graph: Graph, value: Value) -> bool:
    """Whether a value is a pointwise operator's result, or elements selected from one."""
    op = graph.op(value)
    while op.kind in SELECTS or (op.kind in OPDEFS and OPDEFS[op.kind].traits.movement):
        op = graph.op(operand(op))
    return is_pointwise(op)


def _carries(op: Op) -> bool:
    traits = OPDEFS[op.kind].traits if op.kind in OPDEFS else None
    return op.kind in CARRIES or (traits is not None and (traits.pointwise or traits.movement))
