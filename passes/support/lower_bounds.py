"""Lower bounds of values: elements that cannot be minus infinity, and elements that a comparison selects."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.passes.support.facts import VIEWS, non_negative, operand, scalar

_TAKES = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "TopK", *VIEWS})
"""Kinds that take elements of operand 0."""


def level_of(graph: Graph, mask: Value, x: Value) -> float | None:
    """A finite number that elements of ``x`` reach where ``mask`` holds; None if the mask does not say so."""
    op = graph.op(mask)
    if op.kind == "And":
        levels = [level_of(graph, operand(op, slot), x) for slot in range(2)]
        return next((level for level in levels if level is not None), None)
    if op.kind not in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
        return None
    over, least = (operand(op, i) for i in ((0, 1) if op.kind.startswith("Greater") else (1, 0)))
    level = scalar(graph, least)
    return level if over == x and level is not None and np.isfinite(level) else None


def has_lower_bound(graph: Graph, value: Value) -> bool:
    """Whether no element is minus infinity (NaN aside)."""
    known, op = graph.constant_value(value), graph.op(value)
    if known is not None:
        return not bool(np.isneginf(known.astype(np.float64)).any())
    if non_negative(graph, value):
        return True
    if op.kind in _TAKES and not value.port:
        return has_lower_bound(graph, operand(op))
    if op.kind in ("Concat", "Max"):
        return all(has_lower_bound(graph, v) for v in op.inputs if v is not None)
    if op.kind != "Where":
        return False
    chosen = operand(op, 1)
    above = level_of(graph, operand(op), chosen) is not None
    return (above or has_lower_bound(graph, chosen)) and has_lower_bound(graph, operand(op, 2))
