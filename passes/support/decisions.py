"""Operators that decide (rank scores, suppress boxes, compute indices), and the operators on which their decisions depend.

Rounding changes a feature a little, but a decision completely. Detectors offset the boxes of a class by the class's number times
the picture's size, so that boxes of two classes never overlap. At an offset of 29,000 the next fp16 number is 16 pixels away, and
the wrong boxes would be suppressed. So the operators between a decision and the convolutions and products that compute features
stay in fp32, unless the plan names them. This is little work, since it comes after the features.

A comparison with selected elements decides, too: ``x == max(x)`` finds the peaks of a heat map, or the pairs of points that choose
each other (LoFTR). A kernel may compute ``x`` again in its registers, and then the rounded maximum equals none of its elements.
"""

from __future__ import annotations

from dataclasses import fields

from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.table import OPDEFS
from optdnn.passes.support.facts import is_pointwise, operand
from optdnn.passes.support.open_stages import steps_of
from optdnn.types import is_float

DECIDES = frozenset({"FarthestPoints", "NonMaxSuppression", "NonZero", "SVMDecision", "TopK", "TreeEnsemble"})
"""Kinds that compare the elements of their operands, and whose results are indices, or depend on comparisons alone."""

SELECTS = frozenset({"GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMin"})
"""Kinds whose results are elements of their operand, besides operators that only move elements."""

TAKES = frozenset({"Gather", "GatherElements", "GatherND"})
"""Kinds of moving operators that take elements at positions."""

COMPARES = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})

CARRIES = SELECTS | {"LogSoftmax", "ScatterElements", "ScatterND", "Softmax"}
"""Kinds between features and decisions, besides pointwise operators and operators that only move elements."""


def decisions(graph: Graph) -> dict[int, Op]:
    """Op id -> the op that decides, for every op that a decision depends on."""
    found: dict[int, Op] = {}
    compares = _compares(graph)
    for decider in graph.order():
        if decider.id not in compares and not decides(graph, decider):
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


def _compares(graph: Graph) -> set[int]:
    """The ids of the ops that compare two computed floats, as an op or as a stage: with a float that is selected from pointwise
    results, or for equality with such a result. A kernel may compute one of the two in its registers. Values that a layer stored
    are the same for all readers."""
    found = set[int]()
    for op in graph.order():
        if op.kind not in COMPARES and (
            op.kind != "Pointwise" or COMPARES.isdisjoint(s.kind for s in op.attrs.epilogue)
        ):
            continue
        for step in steps_of(op):
            read = [v for v in step.args if isinstance(v, Value)]
            if step.kind not in COMPARES or any(not _is_computed_float(graph, v) for v in read):
                continue
            known = [_is_selected(graph, v) for v in read if is_pointwise(_source(graph, v))]
            if any(known) or (step.kind == "Equal" and (known or len(read) < len(step.args))):
                found.add(op.id)
    return found


def _is_computed_float(graph: Graph, value: Value) -> bool:
    return is_float(graph.type(value).dtype) and graph.constant_value(value) is None


def _source(graph: Graph, value: Value) -> Op:
    """The op that computes the elements of a value."""
    op = graph.op(value)
    while op.kind in SELECTS or _moves(op):
        op = graph.op(operand(op))
    return op


def _is_selected(graph: Graph, value: Value) -> bool:
    """Whether a value's elements are selected from those of another value."""
    op = graph.op(value)
    while _moves(op) and op.kind not in TAKES:
        op = graph.op(operand(op))
    return op.kind in SELECTS | TAKES


def _moves(op: Op) -> bool:
    return op.kind in OPDEFS and OPDEFS[op.kind].traits.movement


def _carries(op: Op) -> bool:
    traits = OPDEFS[op.kind].traits if op.kind in OPDEFS else None
    return op.kind in CARRIES or (traits is not None and (traits.pointwise or traits.movement))
