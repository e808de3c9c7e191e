"""Scales and shifts by constants: merged with one another, and moved to where weights take them in.

Rewrites are exact in real arithmetic; one that changes a rounding is refused where a step function (Floor, a comparison, a cast
to integers) behind it could turn a rounding into another integer: ``49 * (1 / 49)`` is less than 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rewrite
from optdnn.passes.support.affine import ONE, ZERO, Affine, round_to
from optdnn.passes.support.facts import same_shape
from optdnn.passes.support.linear import LINEAR, Linear, absorb_scalars
from optdnn.types import FP64, Array, is_float

_STEPS = frozenset(
    {
        *("Floor", "Ceil", "Round", "Sign", "Mod", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        *("ArgMax", "ArgMin", "TopK", "Hardmax", "Unique", "QuantizeLinear"),
    }
)
_LOOK_AHEAD = 9
_MOVES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})


def feeds_step(graph: Graph, value: Value) -> Op | None:
    """A step function that reads ``value``, directly or through a few pointwise ops and data movements."""
    level, seen = [value], {value}
    for _ in range(_LOOK_AHEAD):
        users = [u for v in level for u in graph.users(v)]
        for user in users:
            if user.kind in _STEPS or (user.kind == "Cast" and not is_float(user.attrs.to)):
                return user
        passing = [u for u in users if u.kind != "Output" and _passes_on(u)]
        level = [v for u in passing for port in range(len(u.outputs)) if (v := Value(u.id, port)) not in seen]
        seen.update(level)
    return None


def _passes_on(op: Op) -> bool:
    return op.definition.traits.pointwise or op.definition.traits.movement


def step_miss(graph: Graph, op: Op) -> Miss | None:
    step = feeds_step(graph, op.value)
    return None if step is None else Miss(f"another rounding could change what {step.kind} {step.name} gives")


def constant_of(graph: Graph, op: Op) -> Array | None:
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


class SubIsAdd(Rewrite):
    """``x - c`` becomes ``x + (-c)``, which is exact."""

    name = "sub_is_add"
    kinds = frozenset({"Sub"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        c = constant_of(graph, op)
        if c is None:
            return None
        return Match((op,), lambda patch: patch.add("Add", [op.inputs[0], patch.constant(-c, "shift")]))


class DivIsMul(Rewrite):
    """``x / c`` becomes ``x * (1 / c)``."""

    name = "div_is_mul"
    kinds = frozenset({"Div"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        c = constant_of(graph, op)
        if c is None:
            return None
        if np.any(c == 0):
            return Miss("it divides by zero")
        inverse = _rounded(1.0 / c.astype(FP64), c)
        if isinstance(inverse, Miss):
            return inverse
        if np.any(np.frexp(c.astype(FP64))[0] % 0.5):  # not all powers of two
            miss = step_miss(graph, op)
            if miss is not None:
                return miss
        return Match((op,), lambda patch: patch.add("Mul", [op.inputs[0], patch.constant(inverse, "scale")]))


class MergeConstants(Rewrite):
    """``(x + a) + b`` becomes ``x + (a + b)``; the same for Mul."""

    name = "merge_constants"
    kinds = frozenset({"Add", "Mul"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        inner = _inner(graph, op, op.kind)
        b = constant_of(graph, op)
        a = None if inner is None else constant_of(graph, inner)
        if inner is None or a is None or b is None:
            return None
        wide = (a.astype(FP64), b.astype(FP64))
        merged = _merged(op.kind, *wide, a)
        if isinstance(merged, Miss):
            return merged
        miss = step_miss(graph, op)
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
        s = constant_of(graph, op)
        b = None if add is None else constant_of(graph, add)
        x = None if add is None else add.inputs[0]
        if add is None or s is None or b is None or x is None or graph.type(x).shape != op.outputs[0].type.shape:
            return None
        if not self._merges(graph, op, x):
            return None
        shift = _merged("Mul", b.astype(FP64), s.astype(FP64), b, factor=False)
        if isinstance(shift, Miss):
            return shift
        miss = step_miss(graph, op)
        if miss is not None:
            return miss

        def build(patch: Patch) -> Value:
            return patch.add("Add", [patch.add("Mul", [x, op.inputs[1]]), patch.constant(shift, "shift")])

        return Match((op, add), build)

    @staticmethod
    def _merges(graph: Graph, op: Op, x: Value) -> bool:
        producer = graph.op(x)
        if graph.sole_user(x) is not None:
            if producer.kind == "Mul" and constant_of(graph, producer) is not None:
                return True
            linear = Linear.of(graph, producer) if producer.kind in LINEAR else None
            if linear is not None and linear.weight is not None:
                return True
        user = graph.sole_user(op.value)
        return user is not None and user.kind in ("Add", "Sub") and constant_of(graph, user) is not None


class HoistScale(Rewrite):
    """A scale by one number goes up through reshapes and transposes to the matrix product whose weights take it in.

    Attention scales its queries and keys behind ``MatMul, Add, Reshape, Transpose``, where it would cost a pass over them.
    """

    name = "hoist_scale"
    kinds = frozenset({"Mul"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        c = constant_of(graph, op)
        value = op.inputs[0]
        if c is None or c.size != 1 or value is None or not same_shape(graph, op):
            return None
        moves: list[Op] = []
        while graph.op(value).kind in _MOVES and graph.sole_user(value) is not None:
            moves.append(graph.op(value))
            inner = moves[-1].inputs[0]
            assert inner is not None
            value = inner
        if not moves or graph.sole_user(value) is None or not self._takes(graph, graph.op(value)):
            return None
        miss = step_miss(graph, op)
        if miss is not None:
            return miss

        def build(patch: Patch) -> Value:
            result = patch.add("Mul", [value, patch.constant(c.reshape(()), "scale")], src=op.src)
            for move in reversed(moves):
                result = patch.add(move.kind, [result, *move.inputs[1:]], move.attrs, src=move.src)
            return result

        return Match((op, *moves), build)

    @staticmethod
    def _takes(graph: Graph, producer: Op) -> bool:
        """Whether ``producer`` is a linear op whose weights take a scale in, or the addition of a constant behind one."""
        if producer.kind == "Add" and constant_of(graph, producer) is not None:
            x = producer.inputs[0]
            if x is None or graph.sole_user(x) is None:
                return False
            producer = graph.op(x)
        linear = Linear.of(graph, producer) if producer.kind in LINEAR else None
        return linear is not None and linear.refuses_after(Affine(2 * ONE, ZERO)) is None


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
