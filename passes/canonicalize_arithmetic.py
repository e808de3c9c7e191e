"""One form for arithmetic: constants last and merged, sums as additions, bounds as Clip, powers as products and roots.

Runs after decomposed activations and normalizations were recognized.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.rules.bias_first import bias_first
from optdnn.passes.rules.gates import gated_residual
from optdnn.passes.rules.largest import largest_of_growing, largest_of_sum
from optdnn.passes.rules.scale import (
    div_is_mul,
    gemm_scalars,
    hoist_scale,
    merge_constants,
    scale_first,
    step_miss,
    sub_is_add,
)
from optdnn.passes.rules.stacks import product_of_stack, reduced_stack, sum_of_sums
from optdnn.passes.rules.window import activation_before_pool, pool_of_all, scale_before_resize, spatial_reduction
from optdnn.passes.support.facts import is_filled, operand, producer, same_shape, scalar, shape_of
from optdnn.passes.support.pattern import Var, node, product, total
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.types import FP64, is_float

X, Y = Var("x"), Var("y")
_FROM, _TO, _SHARE = Var("from"), Var("to"), Var("share")
_DISTANCE = node("Sub", _TO, _FROM, name="distance")
_CLIPS = frozenset({"Relu", "Clip"})
_NEGATED = node("Neg", Y, name="inner", alone=True)


@rule("constant_last")
def constant_last(graph: Graph, op: Op) -> Match | Miss | None:
    """The constant operand of a commutative op is operand 1."""
    if len(op.inputs) != 2 or not op.definition.traits.commutative:
        return None
    if graph.constant_value(op.inputs[0]) is None or graph.constant_value(op.inputs[1]) is not None:
        return None
    return Match((op,), lambda patch: patch.add(op.kind, op.inputs[::-1], op.attrs))


@rule("sum_is_add", {"Sum"})
def sum_is_add(graph: Graph, op: Op) -> Match | Miss | None:
    """A Sum becomes additions from the left, which epilogues can absorb."""
    first, *rest = (v for v in op.inputs if v is not None)
    return Match((op,), lambda patch: reduce(lambda a, b: patch.add("Add", [a, b]), rest, first)) if rest else None


@rule("straight_through", {"Add"})
def straight_through(graph: Graph, op: Op) -> Match | None:
    """``x + (q - x)`` is q. In training, gradients go past the rounding or the search that computes q (Bengio et al., 2013)."""
    result = op.outputs[0].type
    differences = [producer(graph, v, {"Sub"}) for v in op.inputs]
    found = [d for d, x in zip(differences, op.inputs[::-1], strict=True) if d is not None and d.inputs[1] == x]
    if (
        not found
        or not is_float(result.dtype)
        or result.shape is None
        or shape_of(graph, found[0].inputs[0]) != result.shape
    ):
        return None
    return Match((op,), lambda patch: operand(found[0]))


@pattern_rule(
    "interpolation",
    node(
        "Where",
        Var("condition"),
        total(0.0, _FROM, product(1.0, _SHARE, _DISTANCE)),
        total(0.0, _TO, product(-1.0, _DISTANCE, total(1.0, product(-1.0, _SHARE)))),
    ),
)
def interpolation(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """Of the equal forms ``a + w (b - a)`` and ``b - (1 - w) (b - a)``, between which PyTorch's lerp selects, the first."""
    one = operand(root, 1)
    if graph.type(one) != root.outputs[0].type:
        return Miss("the condition enlarges the result")
    return Match((root,), lambda patch: one)


@rule("reciprocal", {"Div"})
def reciprocal_of_one(graph: Graph, op: Op) -> Match | Miss | None:
    """``1 / x`` becomes Reciprocal."""
    x = operand(op, 1)
    if not is_filled(graph.constant_value(op.inputs[0]), 1) or not is_float(graph.type(x).dtype):
        return None
    same = shape_of(graph, x) == op.outputs[0].type.shape
    return Match((op,), lambda patch: patch.add("Reciprocal", [x])) if same else None


@pattern_rule("reciprocal", node("Mul", Y, node("Reciprocal", X, name="inner", alone=True)))
def times_reciprocal(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``a * Reciprocal(x)`` becomes a Div."""
    divided = [found["y"], found["x"]]
    return step_miss(graph, root) or Match((root, found["inner"]), lambda patch: patch.add("Div", divided))


@pattern_rule("negation", node("Add", X, _NEGATED), node("Sub", X, _NEGATED), node("Neg", node("Neg", Y, name="inner")))
def negations(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``x + (-y)`` is a Sub, ``x - (-y)`` an Add, ``-(-y)`` nothing."""
    y, kind = found["y"], {"Add": "Sub", "Sub": "Add", "Neg": ""}[root.kind]
    return Match((root, found["inner"]), lambda patch: patch.add(kind, [found["x"], y]) if kind else y)


@rule("power", {"Pow"})
def powers(graph: Graph, op: Op) -> Match | Miss | None:
    """Pow by 2, 3, 0.5, -0.5 or -1."""
    x, exponent = operand(op), scalar(graph, op.inputs[1])
    if not is_float(graph.type(x).dtype) or not same_shape(graph, op):
        return None
    forms: dict[float | None, Callable[[Patch], Value]] = {
        2.0: lambda p: p.add("Mul", [x, x]),
        3.0: lambda p: p.add("Mul", [p.add("Mul", [x, x]), x]),
        0.5: lambda p: p.add("Sqrt", [x]),
        -0.5: lambda p: p.add("Reciprocal", [p.add("Sqrt", [x])]),
        -1.0: lambda p: p.add("Reciprocal", [x]),
    }
    return Match((op,), forms[exponent]) if exponent in forms else None


@rule("bound_is_clip", {"Max", "Min"})
def bound_is_clip(graph: Graph, op: Op) -> Match | Miss | None:
    """Max or Min with one constant number is a Clip."""
    if len(op.inputs) != 2 or graph.constant_value(op.inputs[0]) is not None or not same_shape(graph, op):
        return None
    bound = graph.constant_value(op.inputs[1])
    if bound is None or bound.size != 1 or np.any(np.isnan(bound.astype(FP64))):
        return None

    def build(patch: Patch) -> Value:
        limit = patch.constant(bound.reshape(()), "bound")
        return patch.add("Clip", [op.inputs[0], limit] if op.kind == "Max" else [op.inputs[0], None, limit])

    return Match((op,), build)


@rule("merge_clips", _CLIPS)
def merge_clips(graph: Graph, op: Op) -> Match | Miss | None:
    """Relu and Clip in sequence become one; a Clip from 0 upwards is a Relu."""
    outer = _bounds(graph, op)
    if outer is None:
        return None
    x = operand(op)
    inner = producer(graph, x, _CLIPS, alone=True)
    first = None if inner is None else _bounds(graph, inner)
    if inner is None or first is None:
        if op.kind == "Clip" and outer == (0.0, np.inf):
            return Match((op,), lambda patch: patch.add("Relu", [x]))
        return None
    low, high = (min(max(min(max(v, first[0]), first[1]), outer[0]), outer[1]) for v in (-np.inf, np.inf))
    y, dtype = operand(inner), graph.type(x).dtype

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
    """The rules of :class:`Canonicalize` and those of arithmetic: each uncovers work for the other."""

    name = "canonicalize_arithmetic"
    rules = (
        constant_last,  # first: the others look for constants in operand 1
        *Canonicalize.rules,
        reduced_stack,
        product_of_stack,
        sum_of_sums,
        scale_before_resize,
        sum_is_add,
        straight_through,  # before sub_is_add
        interpolation,
        reciprocal_of_one,
        times_reciprocal,
        sub_is_add,
        div_is_mul,
        merge_constants,
        bias_first,  # after constants are merged
        hoist_scale,  # before scale_first, which takes the last step
        scale_first,
        negations,
        powers,
        largest_of_growing,
        largest_of_sum,
        bound_is_clip,
        merge_clips,
        gated_residual,
        gemm_scalars,
        spatial_reduction,
        pool_of_all,
        activation_before_pool,
    )
