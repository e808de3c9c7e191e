"""One form for arithmetic: constants last and merged, sums as additions, bounds as Clip, powers as what they are.

Runs after decomposed activations and normalizations were recognized.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rewrite, RulePass
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.rules.scale import DivIsMul, GemmScalars, HoistScale, MergeConstants, ScaleFirst, SubIsAdd, step_miss
from optdnn.passes.rules.window import ActivationBeforePool, SpatialReduction
from optdnn.passes.support.facts import is_filled, same_shape, scalar
from optdnn.types import FP64, is_float


class ConstantLast(Rewrite):
    """The constant operand of a commutative op is operand 1."""

    name = "constant_last"

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if len(op.inputs) != 2 or not op.definition.traits.commutative:
            return None
        if graph.constant_value(op.inputs[0]) is None or graph.constant_value(op.inputs[1]) is not None:
            return None
        return Match((op,), lambda patch: patch.add(op.kind, op.inputs[::-1], op.attrs))


class SumIsAdd(Rewrite):
    """A Sum becomes additions from the left, which epilogues take in."""

    name = "sum_is_add"
    kinds = frozenset({"Sum"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        operands = [v for v in op.inputs if v is not None]
        if len(operands) < 2:
            return None

        def build(patch: Patch) -> Value:
            total = operands[0]
            for v in operands[1:]:
                total = patch.add("Add", [total, v])
            return total

        return Match((op,), build)


class Reciprocals(Rewrite):
    """``1 / x`` becomes Reciprocal, and ``a * Reciprocal(x)`` a Div."""

    name = "reciprocal"
    kinds = frozenset({"Div", "Mul"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        a, b = op.inputs
        if op.kind == "Div":
            shape = None if b is None else graph.type(b).shape
            if not is_filled(graph.constant_value(a), 1) or shape != op.outputs[0].type.shape:
                return None
            if b is None or not is_float(graph.type(b).dtype):
                return None
            return Match((op,), lambda patch: patch.add("Reciprocal", [b]))
        for x, y in ((a, b), (b, a)):
            if y is not None and graph.op(y).kind == "Reciprocal" and graph.sole_user(y) is not None:
                inner = graph.op(y)
                divided = [x, inner.inputs[0]]
                return step_miss(graph, op) or Match((op, inner), lambda patch, o=divided: patch.add("Div", o))
        return None


class Negations(Rewrite):
    """``x + (-y)`` is a Sub, ``x - (-y)`` an Add, ``-(-x)`` nothing."""

    name = "negation"
    kinds = frozenset({"Add", "Sub", "Neg"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        slots = {"Add": (1, 0), "Sub": (1,), "Neg": (0,)}[op.kind]
        for slot in slots:
            v = op.inputs[slot]
            inner = graph.op(v) if v is not None else op
            if v is None or inner.kind != "Neg":
                continue
            y = inner.inputs[0]
            assert y is not None
            if op.kind == "Neg":
                return Match((op, inner), lambda patch, y=y: y)
            if graph.sole_user(v) is None:
                continue
            kind, operands = ("Sub" if op.kind == "Add" else "Add"), [op.inputs[1 - slot], y]
            return Match((op, inner), lambda patch, k=kind, o=operands: patch.add(k, o))
        return None


class Powers(Rewrite):
    """Pow by 2, 3, 0.5, -0.5 or -1."""

    name = "power"
    kinds = frozenset({"Pow"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        x, exponent = op.inputs[0], scalar(graph, op.inputs[1])
        if x is None or exponent is None or not is_float(graph.type(x).dtype) or not same_shape(graph, op):
            return None
        forms: dict[float, Callable[[Patch], Value]] = {
            2.0: lambda p: p.add("Mul", [x, x]),
            3.0: lambda p: p.add("Mul", [p.add("Mul", [x, x]), x]),
            0.5: lambda p: p.add("Sqrt", [x]),
            -0.5: lambda p: p.add("Reciprocal", [p.add("Sqrt", [x])]),
            -1.0: lambda p: p.add("Reciprocal", [x]),
        }
        return Match((op,), forms[exponent]) if exponent in forms else None


class BoundIsClip(Rewrite):
    """Max or Min with one constant number is a Clip."""

    name = "bound_is_clip"
    kinds = frozenset({"Max", "Min"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if len(op.inputs) != 2 or graph.constant_value(op.inputs[0]) is not None or not same_shape(graph, op):
            return None
        bound = graph.constant_value(op.inputs[1])
        if bound is None or bound.size != 1 or np.any(np.isnan(bound.astype(FP64))):
            return None

        def build(patch: Patch) -> Value:
            limit = patch.constant(bound.reshape(()), "bound")
            return patch.add("Clip", [op.inputs[0], limit] if op.kind == "Max" else [op.inputs[0], None, limit])

        return Match((op,), build)


class MergeClips(Rewrite):
    """Relu and Clip behind one another become one; a Clip from 0 upwards is a Relu."""

    name = "merge_clips"
    kinds = frozenset({"Relu", "Clip"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        x = op.inputs[0]
        outer = _bounds(graph, op)
        if x is None or outer is None:
            return None
        dtype = graph.type(x).dtype
        inner = graph.op(x)
        first = _bounds(graph, inner) if inner.kind in self.kinds and graph.sole_user(x) is not None else None
        if first is None:
            if op.kind == "Clip" and outer == (0.0, np.inf):
                return Match((op,), lambda patch: patch.add("Relu", [x]))
            return None
        low, high = (min(max(min(max(v, first[0]), first[1]), outer[0]), outer[1]) for v in (-np.inf, np.inf))
        y = inner.inputs[0]

        def build(patch: Patch) -> Value:
            if (low, high) == (0.0, np.inf):
                return patch.add("Relu", [y])
            limits = [None if np.isinf(v) else patch.constant(np.asarray(v, dtype), "bound") for v in (low, high)]
            return patch.add("Clip", [y, *limits] if limits[1] is not None else [y, limits[0]])

        return Match((op, inner), build)


def _bounds(graph: Graph, op: Op) -> tuple[float, float] | None:
    """Lower and upper bound of a Relu or Clip of floats; exporters write the largest float32 for "no bound"."""
    if not is_float(op.outputs[0].type.dtype):
        return None
    if op.kind == "Relu":
        return 0.0, np.inf
    extreme = float(np.finfo(np.float32).max)
    found = []
    for slot, unbounded in ((1, -np.inf), (2, np.inf)):
        limit = scalar(graph, op.input(slot)) if op.input(slot) is not None else unbounded
        if limit is None or np.isnan(limit):
            return None
        found.append(unbounded if abs(limit) >= extreme and np.sign(limit) == np.sign(unbounded) else limit)
    return found[0], found[1]


class CanonicalizeArithmetic(RulePass):
    """All that :class:`Canonicalize` does, and arithmetic: each uncovers work for the other."""

    name = "canonicalize_arithmetic"
    rules = (
        ConstantLast(),  # first: the others look for constants in operand 1
        *Canonicalize.rules,
        SumIsAdd(),
        Reciprocals(),
        SubIsAdd(),
        DivIsMul(),
        MergeConstants(),
        HoistScale(),  # before ScaleFirst, which takes the last step
        ScaleFirst(),
        Negations(),
        Powers(),
        BoundIsClip(),
        MergeClips(),
        GemmScalars(),
        SpatialReduction(),
        ActivationBeforePool(),
    )
