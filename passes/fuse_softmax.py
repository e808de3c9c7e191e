"""Softmax and log-softmax that exporters write out become one op.

``exp(x - max) / sum(exp(x - max))``, with or without the maximum: a shift that is constant along the axis changes nothing in
exact arithmetic, and the fused op always subtracts it. ``x - log(sum(exp(x)))`` in its forms. A softmax divided by its own sum,
which is 1, stays as it is.
"""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Graph, Op
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import Match, Miss, RulePass
from optdnn.passes.fuse_norm import reduced
from optdnn.passes.support.facts import operand
from optdnn.passes.support.pattern import Power, Scalar, Var, any_of, node, product, total
from optdnn.passes.support.pattern_rule import PatternRule, fused, pattern_rule

X = Var("x")
_MAX = node("ReduceMax", X, name="max")
_SHIFTED = node("Sub", X, _MAX)


class SoftmaxRule(PatternRule):
    """Checks the axes: one of them, the same for the sum; the maximum may run over more."""

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
                return None  # not constant along the axis: part of the operand, as another match sees it
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


class FuseSoftmax(RulePass):
    """A softmax is found before its logarithm."""

    name = "fuse_softmax"
    rules = (Softmax(), LogSoftmax(), normalized_softmax)
