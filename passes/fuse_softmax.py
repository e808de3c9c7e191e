"""Softmax and log-softmax that exporters write out become one op.

Softmax is ``exp(x - max) / sum(exp(x - max))``, with or without the maximum: in exact arithmetic, a shift that is constant along
the axis changes nothing, and the fused op always subtracts the maximum. Log-softmax is ``x - log(sum(exp(x)))`` in several forms.
A division of a softmax by its own sum, which is 1, disappears.

The largest elements of a softmax, divided by their sum, are a softmax of the largest scores: mixtures of experts weigh the chosen
experts in this form (Mixtral: Jiang et al., 2024).
"""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.fuse_norm import reduced
from optdnn.passes.support.facts import operand, producer, scalar, shape_of
from optdnn.passes.support.pattern import Power, Scalar, Var, any_of, node, product, total
from optdnn.passes.support.pattern_rule import PatternRule, fused, pattern_rule

FLOOR = -1e30
"""Floors up to this number act as minus infinity: no score comes near them."""
MASKED = 1e-8
"""A mask leaves an element visible if it adds more than the floor times this."""
X = Var("x")
_MAX = node("ReduceMax", X, name="max")
_SHIFTED = node("Sub", X, _MAX)


class SoftmaxRule(PatternRule):
    """Accepts sums over one axis; the maximum must run over this axis, and may run over others too."""

    result: str

    def accept(self, graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
        x = found["x"]
        if "softmax" in found:
            attrs: SoftmaxAttrs = found["softmax"].attrs
        else:
            axes = reduced(graph, found["sum"])
            if isinstance(axes, Miss):
                return axes
            if len(axes) != 1:
                return Miss(f"{self.result} has one axis, the sum runs over {axes}")
            over = reduced(graph, found["max"]) if "max" in found else axes
            if isinstance(over, Miss):
                return over
            if axes[0] not in over:
                return None  # this maximum varies along the axis; another match takes it as part of the operand
            attrs = SoftmaxAttrs(axes[0])
        return fused(graph, ops, root, x, lambda patch: patch.add(self.result, [x], attrs))


class Softmax(SoftmaxRule):
    """``exp(x) / sum(exp(x))``, the exponent shifted by the maximum or not."""

    name = "softmax"
    result = "Softmax"
    _exp = node("Exp", any_of(_SHIFTED, X), name="exp")
    patterns = (product(1.0, _exp, Power(node("ReduceSum", _exp, name="sum"), -1.0)),)


class LogSoftmax(SoftmaxRule):
    """``x - log(sum(exp(x)))``, the exponent shifted by the maximum or not; ``x - ReduceLogSumExp(x)``; ``log(softmax(x))``."""

    name = "log_softmax"
    result = "LogSoftmax"
    _log_sum = node("Log", node("ReduceSum", node("Exp", X), name="sum"))
    _log_shifted = node("Log", node("ReduceSum", node("Exp", _SHIFTED), name="sum"))
    patterns = (
        total(0.0, product(-1.0, _log_shifted), product(-1.0, _MAX), X),
        total(0.0, product(-1.0, _log_sum), X),
        total(0.0, product(-1.0, node("ReduceLogSum", node("Exp", X), name="sum")), X),
        total(0.0, product(-1.0, node("ReduceLogSumExp", X, name="sum")), X),
        node("Log", node("Softmax", X, name="softmax")),
    )


_S = node("Softmax", X, name="softmax")
_SUM = node(frozenset({"ReduceSum", "ReduceL1"}), _S, name="sum")
_GUARDED = node("Where", node("Equal", _SUM, Scalar(0.0)), Scalar(1.0), _SUM)


@pattern_rule("normalized_softmax", node("Div", _S, any_of(_GUARDED, _SUM)))
def normalized_softmax(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``s / sum(s)`` of a softmax along the same axis is ``s``.

    The divisor may be ``where(sum(s) == 0, 1, sum(s))``, as in Normalizer."""
    softmax, axes = found["softmax"], reduced(graph, found["sum"])
    if isinstance(axes, Miss):
        return axes
    axis = softmax.attrs.axis % (softmax.outputs[0].type.rank or 1)
    if axes != (axis,):
        return Miss(f"the softmax is along axis {axis}, the sum runs over {axes}")
    return Match((root,), lambda patch: operand(root))


@rule("softmax_of_best", {"Div"})
def softmax_of_best(graph: Graph, op: Op) -> Match | Miss | None:
    """``v / sum(v)`` of the largest elements v of a softmax is a softmax of the largest scores, in the same order."""
    best, total = graph.op(operand(op)), producer(graph, operand(op, 1), {"ReduceSum", "ReduceL1"}, alone=True)
    if best.kind != "TopK" or operand(op) != best.value or total is None or operand(total) != best.value:
        return None
    softmax, axes = producer(graph, operand(best), {"Softmax"}), reduced(graph, total)
    rank = graph.type(best.value).rank
    if softmax is None or rank is None:
        return None
    if isinstance(axes, Miss):
        return axes
    axis = softmax.attrs.axis % rank
    if (best.attrs.axis % rank,) != axes or axes != (axis,):
        return Miss(
            f"the softmax is along axis {axis}, the selection along {best.attrs.axis % rank}, the sum over {axes}"
        )
    if {u.id for u in graph.users(best.value)} != {op.id, total.id}:
        return Miss(f"others also read the values of {best.name}")

    def build(patch: Patch) -> None:
        inputs = [operand(softmax), *best.inputs[1:]]
        chosen = patch.add_op("TopK", inputs, best.attrs, outputs=len(best.outputs))
        for at in range(1, len(best.outputs)):  # the places may be absent
            patch.replace(Value(best.id, at), Value(chosen.id, at))
        patch.replace(op.value, patch.add("Softmax", [chosen.value], SoftmaxAttrs(axis)))

    return Match((op, total, best, softmax), build)


@rule("shifted_softmax", {"Softmax", "LogSoftmax"})
def shifted_softmax(graph: Graph, op: Op) -> Match | Miss | None:
    """``softmax((x - r) * c)`` is ``softmax(x * c)`` if ``r`` is constant along the axis: the softmax subtracts its own maximum.

    LayoutLMv3 subtracts a maximum in this way (Ding et al., 2021). DANet subtracts the scores from their maximum (Fu et al., 2019):
    ``softmax(r - x)`` is ``softmax(-x)``."""
    scale = producer(graph, operand(op), {"Mul", "Div"}, alone=True)
    if scale is not None and scalar(graph, operand(scale, 1)) is None:
        return None
    shift = producer(graph, operand(op) if scale is None else operand(scale), {"Add", "Sub"}, alone=True)
    if shift is None:
        return None
    slot = _unshifted(graph, shift, op.attrs.axis)
    if slot is None:
        return None
    x = operand(shift, slot)

    def build(patch: Patch) -> Value:
        y = patch.add("Neg", [x]) if shift.kind == "Sub" and slot == 1 else x
        y = y if scale is None else patch.add(scale.kind, [y, operand(scale, 1)], scale.attrs)
        return patch.add(op.kind, [y], op.attrs)

    return Match(tuple(o for o in (op, scale, shift) if o is not None), build)


def _unshifted(graph: Graph, shift: Op, axis: int) -> int | None:
    """The slot of ``x`` in ``x + r``, ``x - r`` or ``r - x`` where ``r`` is constant along ``axis``; None for other operators."""
    whole = shape_of(graph, shift.value)
    for k in (0, 1):
        x, by = operand(shift, k), shape_of(graph, operand(shift, 1 - k))
        if whole is None or by is None or shape_of(graph, x) != whole:
            continue
        place = len(by) - len(whole) + axis % len(whole)
        if place < 0 or by[place] == 1 != whole[axis]:
            return k
    return None


@pattern_rule("floored_softmax", node("Max", node("Add", X, Var("mask"), name="masked"), Var("floor")))
def floored_softmax(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``softmax(max(x + mask, floor))`` is ``softmax(x + mask)`` if the floor is about the lowest number (OPT, XGLM).

    The constant mask must leave an element of each row far above the floor: elements near the floor are 0 either way."""
    floor = scalar(graph, found["floor"])
    user = graph.sole_user(root.value)
    while user is not None and _keeps_rows(graph, user):
        user = graph.sole_user(user.value)
    if floor is None or floor > FLOOR or user is None or user.kind != "Softmax":
        return None
    if user.attrs.axis not in (-1, (graph.type(user.value).rank or 0) - 1):
        return None
    mask = graph.constant_value(found["mask"])
    if mask is None or not mask.ndim or mask.shape[-1] != graph.type(root.value).dims[-1]:
        return Miss("the mask is not a constant with a number for each element of a row")
    if not bool((mask.max(-1) > floor * MASKED).all()):
        return Miss("the mask may hide a whole row, and the floor would make the elements of that row equal")
    return Match((root,), lambda patch: found["masked"].value)


def _keeps_rows(graph: Graph, op: Op) -> bool:
    """Whether ``op`` is a Reshape that keeps the last axis."""
    if op.kind != "Reshape":
        return False
    before, after = shape_of(graph, operand(op)), shape_of(graph, op.value)
    return before is not None and after is not None and before[-1:] == after[-1:]


class FuseSoftmax(RulePass):
    """A softmax is found before its logarithm."""

    name = "fuse_softmax"
    rules = (Softmax(), LogSoftmax(), normalized_softmax, softmax_of_best, shifted_softmax, floored_softmax)
