"""One form for arithmetic: constants last and merged, sums as additions, bounds as Clip, powers as what they are.

Runs after decomposed activations and normalizations were recognized. Rewrites are exact in real arithmetic; one that
changes a rounding is refused where a step function (Floor, a comparison, a cast to integers) behind it could turn a rounding into
another integer: ``49 * (1 / 49)`` is less than 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.affine import round_to
from optdnn.passes.base import Match, Miss, PassContext, Rewrite, RulePass
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.canonicalize_window import ActivationBeforePool, SpatialReduction
from optdnn.passes.facts import is_filled, same_shape, scalar
from optdnn.passes.linear import LINEAR, Linear, absorb_scalars
from optdnn.types import FP64, Array, is_float

_STEPS = frozenset(
    {
        *("Floor", "Ceil", "Round", "Sign", "Mod", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        *("ArgMax", "ArgMin", "TopK", "Hardmax", "Unique", "QuantizeLinear"),
    }
)
_LOOK_AHEAD = 8


def feeds_step(graph: Graph, value: Value, depth: int = _LOOK_AHEAD) -> Op | None:
    """A step function that reads ``value``, directly or through a few pointwise ops and data movements."""
    for user in graph.users(value):
        if user.kind in _STEPS or (user.kind == "Cast" and not is_float(user.attrs.to)):
            return user
        if user.kind == "Output" or depth == 0:
            continue
        traits = user.definition.traits
        if traits.pointwise or traits.movement:
            for port in range(len(user.outputs)):
                found = feeds_step(graph, Value(user.id, port), depth - 1)
                if found is not None:
                    return found
    return None


def _step_miss(graph: Graph, op: Op) -> Miss | None:
    step = feeds_step(graph, op.value)
    return None if step is None else Miss(f"another rounding could change what {step.kind} {step.name} gives")


def _constant_of(graph: Graph, op: Op) -> Array | None:
    """The constant that is operand 1 of a floating op whose operand 0 is not constant."""
    if len(op.inputs) < 2 or graph.constant_value(op.inputs[0]) is not None:
        return None
    c = graph.constant_value(op.inputs[1])
    return c if c is not None and is_float(c.dtype) else None


def _inner(graph: Graph, op: Op, kind: str) -> Op | None:
    """The op of ``kind`` that makes operand 0, for ``op`` alone."""
    x = op.inputs[0]
    if x is None or graph.op(x).kind != kind or graph.sole_user(x) is None:
        return None
    return graph.op(x)


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


class SubIsAdd(Rewrite):
    """``x - c`` becomes ``x + (-c)``, which is exact."""

    name = "sub_is_add"
    kinds = frozenset({"Sub"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        c = _constant_of(graph, op)
        if c is None:
            return None
        return Match((op,), lambda patch: patch.add("Add", [op.inputs[0], patch.constant(-c, "shift")]))


class DivIsMul(Rewrite):
    """``x / c`` becomes ``x * (1 / c)``."""

    name = "div_is_mul"
    kinds = frozenset({"Div"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        c = _constant_of(graph, op)
        if c is None:
            return None
        if np.any(c == 0):
            return Miss("it divides by zero")
        inverse = _rounded(1.0 / c.astype(FP64), c)
        if isinstance(inverse, Miss):
            return inverse
        if np.any(np.frexp(c.astype(FP64))[0] % 0.5):  # not all powers of two
            miss = _step_miss(graph, op)
            if miss is not None:
                return miss
        return Match((op,), lambda patch: patch.add("Mul", [op.inputs[0], patch.constant(inverse, "scale")]))


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
                return _step_miss(graph, op) or Match((op, inner), lambda patch, o=divided: patch.add("Div", o))
        return None


class MergeConstants(Rewrite):
    """``(x + a) + b`` becomes ``x + (a + b)``; the same for Mul."""

    name = "merge_constants"
    kinds = frozenset({"Add", "Mul"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        inner = _inner(graph, op, op.kind)
        b = _constant_of(graph, op)
        a = None if inner is None else _constant_of(graph, inner)
        if inner is None or a is None or b is None:
            return None
        wide = (a.astype(FP64), b.astype(FP64))
        merged = _merged(op.kind, *wide, a)
        if isinstance(merged, Miss):
            return merged
        miss = _step_miss(graph, op)
        if miss is not None:
            return miss
        x = inner.inputs[0]
        return Match((op, inner), lambda patch: patch.add(op.kind, [x, patch.constant(merged, "merged")]))


class ScaleFirst(Rewrite):
    """``(x + b) * s`` becomes ``x * s + b s`` where a scale before it or a shift behind it then merges.

    That is where x is scaled by a constant or comes from a matrix product that takes the scale into its weights, or where
    a constant is added next.
    """

    name = "scale_first"
    kinds = frozenset({"Mul"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        add = _inner(graph, op, "Add")
        s = _constant_of(graph, op)
        b = None if add is None else _constant_of(graph, add)
        x = None if add is None else add.inputs[0]
        if add is None or s is None or b is None or x is None or graph.type(x).shape != op.outputs[0].type.shape:
            return None
        if not self._merges(graph, op, x):
            return None
        shift = _merged("Mul", b.astype(FP64), s.astype(FP64), b, factor=False)
        if isinstance(shift, Miss):
            return shift
        miss = _step_miss(graph, op)
        if miss is not None:
            return miss

        def build(patch: Patch) -> Value:
            return patch.add("Add", [patch.add("Mul", [x, op.inputs[1]]), patch.constant(shift, "shift")])

        return Match((op, add), build)

    @staticmethod
    def _merges(graph: Graph, op: Op, x: Value) -> bool:
        producer = graph.op(x)
        if graph.sole_user(x) is not None:
            if producer.kind == "Mul" and _constant_of(graph, producer) is not None:
                return True
            linear = Linear.of(graph, producer) if producer.kind in LINEAR else None
            if linear is not None and linear.weight is not None:
                return True
        user = graph.sole_user(op.value)
        return user is not None and user.kind in ("Add", "Sub") and _constant_of(graph, user) is not None


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


class GemmScalars(Rewrite):
    """Alpha and beta of a Gemm go into its constant weights and bias."""

    name = "gemm_scalars"
    kinds = frozenset({"Gemm"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        absorbed = absorb_scalars(graph, op)
        if absorbed is None or isinstance(absorbed, Miss):
            return absorbed
        x = op.inputs[0]
        assert x is not None
        return Match((op,), lambda patch: absorbed.add_to(patch, x))


def _merged(kind: str, a: Array, b: Array, like: Array, *, factor: bool | None = None) -> Array | Miss:
    """``a`` and ``b`` (float64) added or multiplied, rounded to the type of ``like``; ``factor``: see :func:`_rounded`."""
    merged = a + b if kind == "Add" else a * b
    if merged.size > max(a.size, b.size):
        return Miss(f"the merged constant of {merged.size} elements would be larger than both")
    return _rounded(merged, like, factor=kind == "Mul" if factor is None else factor)


def _rounded(value: Any, like: Array, *, factor: bool = True) -> Array | Miss:
    """``value`` rounded to the type of ``like``; a Miss where that overflows, or takes a factor's accuracy by underflow."""
    value = np.asarray(value)
    rounded = round_to(value, like.dtype)
    if rounded is None:
        return Miss(f"the constant would overflow {like.dtype}")
    if factor and np.any(np.abs(rounded.astype(FP64) - value) > 2.0**-7 * np.abs(value)):
        return Miss(f"the constant would underflow {like.dtype}")
    return rounded


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
        ScaleFirst(),
        Negations(),
        Powers(),
        BoundIsClip(),
        MergeClips(),
        GemmScalars(),
        SpatialReduction(),
        ActivationBeforePool(),
    )
