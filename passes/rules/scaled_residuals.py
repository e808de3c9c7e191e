"""Sums and differences of a tensor and a linear op take forms that the weights and the epilogue of the linear op can compute.

Examples are learned mixtures: ``lerp`` (EfficientViM), and MetaFormer's factors of the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.affine import IDENTITY, ONE, ZERO, Affine, read, round_to, variable
from optdnn.passes.support.facts import operand, producer
from optdnn.passes.support.linear import Linear
from optdnn.target_name import TargetName
from optdnn.types import FP64, Array, is_float

LEAST, MOST = 1 / 64, 64.0
"""Limits for a residual's factors. Weights are divided by them: beyond the limits, 16-bit weights would lose precision or
overflow."""


@dataclass(frozen=True)
class _Term:
    """``linear(…) * scale + shift`` with one reader. ``links``: the operators after the linear op, the last one first."""

    linear: Linear
    affine: Affine
    links: tuple[Op, ...]

    @staticmethod
    def of(graph: Graph, value: Value | None) -> _Term | Miss | None:
        """``value`` as a term; None if it has another form, a Miss if its constants do not fit."""
        links, end = list[Op](), value
        while end is not None and graph.sole_user(end) is not None and (x := variable(graph, link := graph.op(end))):
            links.append(link)
            end = x
        linear = None if end is None or graph.sole_user(end) is None else Linear.of(graph, graph.op(end))
        if linear is None:
            return None
        affine = IDENTITY
        for link in reversed(links):
            step = read(graph, link, linear.axis, linear.channels)
            if isinstance(step, Miss):
                return step
            affine = affine.then(step)
        return _Term(linear, affine, tuple(links))

    def times(self, factor: Array) -> _Factored | Miss:
        """The term times a factor. A Miss if the weights cannot absorb the factor."""
        affine, op = self.affine.then(Affine(factor, ZERO)), self.linear.op
        if (why := self.linear.refuses_after(Affine(affine.scale, ZERO))) is not None:
            return Miss(why)
        total = op.outputs[0].type
        shape = (-1,) + (1,) * (len(total.dims) - 1 - self.linear.axis)
        scale, shift = (round_to(a.reshape(shape), total.dtype) for a in (affine.scale, affine.shift))
        if scale is None or shift is None:
            return Miss(f"the scale or shift of {op.name} would overflow {total.dtype}")
        return _Factored(op.value, scale, shift if affine.shifts else None)


@dataclass(frozen=True)
class _Factored:
    """``value * scale + shift`` as a Mul and an Add. Later passes fold them into the weights of the producer of ``value``."""

    value: Value
    scale: Array
    shift: Array | None

    def add_to(self, patch: Patch) -> Value:
        y = patch.add("Mul", [self.value, patch.constant(self.scale, "scale")])
        return y if self.shift is None else patch.add("Add", [y, patch.constant(self.shift, "shift")])


@rule("subtracted_linear", {"Sub"})
def subtracted_linear(graph: Graph, op: Op) -> Match | Miss | None:
    """``x - (y W + b)`` becomes ``x + (-(y W + b))`` (DnCNN): the weights absorb the sign, and a kernel's epilogue adds ``x``."""
    total = op.outputs[0].type
    constant = graph.constant_value(op.inputs[0]) is not None
    if constant or graph.type(operand(op, 1)) != total or not is_float(total.dtype):
        return None
    term = _Term.of(graph, operand(op, 1))
    if term is None or isinstance(term, Miss):
        return term
    negated = term.times(-ONE)
    if isinstance(negated, Miss):
        return negated
    return Match((op, *term.links), lambda patch: patch.add("Add", [op.inputs[0], negated.add_to(patch)]))


@rule("lerp", {"Add"})
def lerp(graph: Graph, op: Op) -> Match | None:
    """``x + w (y - x)`` becomes ``x (1 - w) + y w``, if w is constant and y the result of a linear op, whose weights absorb w."""
    for x, other in (op.inputs, op.inputs[::-1]):
        scaled = producer(graph, other, {"Mul"}, alone=True)
        difference = None if scaled is None else producer(graph, operand(scaled), {"Sub"}, alone=True)
        weight = None if scaled is None else graph.constant_value(operand(scaled, 1))
        if x is None or scaled is None or difference is None or weight is None or operand(difference, 1) != x:
            continue
        y, total = operand(difference), op.outputs[0].type
        term = _Term.of(graph, y)
        if not isinstance(term, _Term) or isinstance(term.times(2 * ONE), Miss) or graph.type(x) != total:
            continue
        if graph.type(y) != total:
            continue
        rest = np.asarray(1.0 - weight.astype(FP64)).astype(total.dtype)

        def build(patch: Patch, x: Value = x, y: Value = y, scaled: Op = scaled, rest: Array = rest) -> Value:
            kept = patch.add("Mul", [x, patch.constant(rest, "rest")])
            return patch.add("Add", [kept, patch.add("Mul", [y, operand(scaled, 1)])])

        return Match((op, scaled, difference), build)
    return None


@rule("scaled_residual", {"Add"})
def scaled_residual(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``x c + conv(y)`` becomes ``(x + conv(y) / c) c``, with c constant per channel.

    GPU convolutions can add a tensor and scale the sum. The rule does not apply to matrix products: there, the norm after the sum
    reads both terms.
    """
    total = op.outputs[0].type
    if not TargetName.parse(context.target).on_gpu or not is_float(total.dtype):
        return None
    for residual, y in (op.inputs, op.inputs[::-1]):
        scaled = producer(graph, residual, {"Mul"}, alone=True)
        if scaled is None or (x := variable(graph, scaled)) is None:
            continue
        term = _Term.of(graph, y)
        if not isinstance(term, _Term) or term.linear.op.kind != "Conv":
            continue
        if term.affine.scales:
            return None  # the weights must absorb this factor first
        if isinstance(_Term.of(graph, x), _Term) or graph.type(x) != total:
            continue
        return _rewritten(graph, op, scaled, x, term)
    return None


def _rewritten(graph: Graph, op: Op, scaled: Op, x: Value, term: _Term) -> Match | Miss:
    """The rewrite of ``op``, which adds ``scaled``, a factor times ``x``, and ``term``."""
    step = read(graph, scaled, term.linear.axis, term.linear.channels)
    if isinstance(step, Miss):
        return step
    size = np.abs(step.scale)
    if size.min() < LEAST or size.max() > MOST:
        return Miss(f"the factors of the residual that {op.name} adds are not all between 1/64 and 64")
    divided = term.times(1.0 / step.scale)
    if isinstance(divided, Miss):
        return divided

    def build(patch: Patch) -> Value:
        return patch.add("Mul", [patch.add("Add", [x, divided.add_to(patch)]), operand(scaled, 1)])

    return Match((op, scaled, *term.links), build)
