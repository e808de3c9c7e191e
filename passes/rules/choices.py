"""Choices by a comparison with a number: bounds become Max or Min, and numbers under a threshold of zero a ThresholdedRelu."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.unary import AlphaAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, producer, scalar
from optdnn.types import is_float

_LESS = frozenset({"Less", "LessOrEqual"})
_COMPARISONS = frozenset({*_LESS, "Greater", "GreaterOrEqual"})


@dataclass(frozen=True)
class Choice:
    """A Where whose condition compares ``x`` with one number: the operands that it chooses."""

    x: Value
    threshold: Value
    below: Value
    above: Value
    equal: Value
    nan: Value
    """A comparison with NaN is false."""


def choice(graph: Graph, op: Op) -> Choice | None:
    """The choices of a Where; None if its condition has another form."""
    condition, (true, false) = operand(op), (operand(op, 1), operand(op, 2))
    while (negation := producer(graph, condition, {"Not"})) is not None:
        condition, true, false = operand(negation), false, true
    test = producer(graph, condition, _COMPARISONS)
    if test is None:
        return None
    slot = 1 if scalar(graph, test.inputs[1]) is not None else 0
    x, threshold = operand(test, 1 - slot), operand(test, slot)
    number = scalar(graph, threshold)
    if number is None or np.isnan(number):
        return None
    less = (test.kind in _LESS) == (slot == 1)
    below, above = (true, false) if less else (false, true)
    return Choice(x, threshold, below, above, true if test.kind.endswith("OrEqual") else false, false)


@rule("choice_is_bound", {"Where"})
def choice_is_bound(graph: Graph, op: Op) -> Match | Miss | None:
    """``where(x < c, c, x)`` is ``max(x, c)``, and ``where(x > c, c, x)`` is ``min(x, c)``: ONNX defines its Clip so.

    ``where(x > c, x, c)`` is no maximum: it gives c for NaN. With 0 in place of the last c, it is a ThresholdedRelu.
    """
    found = choice(graph, op)
    if found is None or not {found.below, found.above} & {found.x}:
        return None
    x, number, dtype = found.x, scalar(graph, found.threshold), op.outputs[0].type.dtype
    other = scalar(graph, found.below if found.above == x else found.above)
    if other is None or number is None or graph.type(x).shape != op.outputs[0].type.shape:
        return None
    if other == number and (found.nan == x or not is_float(dtype)):
        kind = "Max" if found.above == x else "Min"
        return Match((op,), lambda patch: patch.add(kind, [x, found.threshold]))
    if found.above == x and other == 0 and found.nan != x and (found.equal != x or number == 0) and is_float(dtype):
        return Match((op,), lambda patch: patch.add("ThresholdedRelu", [x], AlphaAttrs(number)))
    return Miss("it gives the bound for NaN, and a minimum gives NaN") if other == number else None
