"""Softmax and log-softmax that exporters write out become one op.

``exp(x - max) / sum(exp(x - max))``, with or without the subtracted maximum (a shift that is constant along the axis changes
nothing in exact arithmetic; the fused op subtracts it always), and ``x - log(sum(exp(x)))`` in its forms. A softmax that is divided
by its own sum, which is 1, stays as it is.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rewrite, RulePass
from optdnn.passes.fuse_norm import reduced
from optdnn.passes.support.facts import is_filled
from optdnn.passes.support.pattern import Found, PatternRule, Power, Var, choice, closed, matched, node, product, total

X = Var("x")
_MAX = node("ReduceMax", X, name="max")
_SHIFTED = node("Sub", X, _MAX)


class SoftmaxRule(PatternRule):
    """Checks the axes: one of them, the same for the sum; the maximum may run over more."""

    result: str

    def accept(self, graph: Graph, root: Op, found: Found) -> Match | Miss | None:
        x: Value = found.bound["x"]
        if "softmax" in found.bound:
            attrs: SoftmaxAttrs = found.bound["softmax"].attrs
        else:
            axes = reduced(graph, found.bound["sum"])
            if isinstance(axes, Miss):
                return axes
            if len(axes) != 1:
                return Miss(f"{self.result} has one axis, the sum runs over {axes}")
            if "max" in found.bound:
                over = reduced(graph, found.bound["max"])
                if isinstance(over, Miss):
                    return over
                if axes[0] not in over:
                    return None  # not constant along the axis: part of the operand, as another match sees it
            attrs = SoftmaxAttrs(axes[0])
        return closed(graph, found.ops, root.id, x) or matched(graph, found.ops, (root.value, x, attrs))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        old, x, attrs = match.data
        patch = Patch(graph, match.ops)
        patch.replace(old, patch.add(self.result, [x], attrs))
        return patch


class Softmax(SoftmaxRule):
    """``exp(x) / sum(exp(x))``, the exponent shifted by the maximum or not."""

    name = "softmax"
    result = "Softmax"
    _exp = node("Exp", choice(_SHIFTED, X), name="exp")
    patterns = (product(1.0, _exp, Power(node("ReduceSum", _exp, name="sum"), -1.0)),)


class LogSoftmax(SoftmaxRule):
    """``x - log(sum(exp(x)))``, the exponent shifted by the maximum or not; ``x - ReduceLogSumExp(x)``; ``log(softmax(x))``."""

    name = "log_softmax"
    result = "LogSoftmax"
    patterns = (
        total(
            0.0,
            product(-1.0, node("Log", node("ReduceSum", node("Exp", _SHIFTED), name="sum"))),
            product(-1.0, _MAX),
            X,
        ),
        total(0.0, product(-1.0, node("Log", node("ReduceSum", node("Exp", X), name="sum"))), X),
        total(0.0, product(-1.0, node("ReduceLogSum", node("Exp", X), name="sum")), X),
        total(0.0, product(-1.0, node("ReduceLogSumExp", X, name="sum")), X),
        node("Log", node("Softmax", X, name="softmax")),
    )


class NormalizedSoftmax(Rewrite):
    """``s / sum(s)`` of a softmax along the same axis is ``s``.

    The divisor may be ``where(sum(s) == 0, 1, sum(s))``, as Normalizer has it."""

    name = "normalized_softmax"
    kinds = frozenset({"Div"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        x, divisor = op.inputs
        softmax = None if x is None else graph.op(x)
        if softmax is None or divisor is None or softmax.kind != "Softmax":
            return None
        total = graph.op(_guarded(graph, divisor) or divisor)
        if total.kind not in ("ReduceSum", "ReduceL1") or total.inputs[0] != x:
            return None
        axes = reduced(graph, total)
        if isinstance(axes, Miss):
            return axes
        axis = softmax.attrs.axis % (softmax.outputs[0].type.rank or 1)
        if axes != (axis,):
            return Miss(f"the softmax is along axis {axis}, the sum runs over {axes}")
        return Match((op,), lambda patch: x)


def _guarded(graph: Graph, value: Value) -> Value | None:
    """The value ``v`` of ``where(v == 0, 1, v)``."""
    where = graph.op(value)
    if where.kind != "Where" or not is_filled(graph.constant_value(where.inputs[1]), 1):
        return None
    test, _, found = where.inputs
    equal = None if test is None else graph.op(test)
    if equal is None or equal.kind != "Equal" or equal.inputs[0] != found:
        return None
    return found if is_filled(graph.constant_value(equal.inputs[1]), 0) else None


class FuseSoftmax(RulePass):
    """A softmax is seen before the logarithm of it."""

    name = "fuse_softmax"
    rules = (Softmax(), LogSoftmax(), NormalizedSoftmax())
