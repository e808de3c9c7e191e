"""Activations that exporters write out (GELU, SiLU, hard sigmoid, hard swish, Mish) become one op each.

GELU: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), by erf and by its tanh approximation. Swish (SiLU, with a
slope: the "quick GELU" of CLIP): Ramachandran et al. (2017). Hard swish: Howard et al., "Searching for MobileNetV3" (2019).
Mish: Misra (2019). Each is exact in real arithmetic; :mod:`optdnn.passes.support.pattern` defines which constants count as
``sqrt(2)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import Attrs
from optdnn.ops.unary import AlphaAttrs, GeluAttrs, HardSigmoidAttrs, LeakyReluAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.branches import branches, softplus
from optdnn.passes.support import pattern
from optdnn.passes.support.facts import operand, producer, scalar
from optdnn.passes.support.pattern import Pattern, Power, Scalar, Var, any_of, node, product, total
from optdnn.passes.support.pattern_rule import PatternRule, fused

X = Var("x")
Attributes = Callable[[dict[str, Any], float], Attrs | None]


def clip(value: Pattern, low: Scalar, high: Scalar) -> Pattern:
    """Clamping to an interval, however it is written; a lower bound of 0 may be a Relu."""
    forms: list[Pattern] = [
        node("Clip", value, low, high),
        node("Min", node("Max", value, low), high),
        node("Max", node("Min", value, high), low),
    ]
    if low.value == 0:
        relu = node("Relu", value)
        forms += [node("Min", relu, high), node("Clip", relu, None, high), node("Clip", relu, low, high)]
    return any_of(*forms)


class ActivationRule(PatternRule):
    """One activation of ``x``: its patterns, the kind that replaces them, and the attributes of a match.

    ``attributes(bound numbers and ops, relative rounding)`` is None where the numbers are not this activation's.
    """

    def __init__(self, name: str, result: str, attributes: Attributes, *patterns: Pattern):
        self.name, self.result, self.attributes, self.patterns = name, result, attributes, patterns

    def accept(self, graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
        attrs = self.attributes(found, pattern.rounding(root.outputs[0].type.dtype))
        if attrs is None:
            return None
        x = found["x"]
        return fused(graph, ops, root, x, lambda patch: patch.add(self.result, [x], attrs))


def _fixed(attrs: Attrs) -> Attributes:
    """The same attributes for every match."""
    return lambda found, error: attrs


def _erf(k: float) -> Pattern:
    """``k erf(x / sqrt 2)``; erf is odd."""
    root = math.sqrt(0.5)
    return any_of(product(k, node("Erf", product(root, X))), product(-k, node("Erf", product(-root, X))))


GELU = ActivationRule(
    "gelu",
    "Gelu",
    _fixed(GeluAttrs("none")),
    product(0.5, X, total(1.0, _erf(1.0))),
    product(1.0, X, total(0.5, _erf(0.5))),
)
"""``0.5 x (1 + erf(x / sqrt 2))``, also as ``x (0.5 + 0.5 erf)`` and by the complement ``1 - erf(-x / sqrt 2)``."""

_C = math.sqrt(2 / math.pi)
_ARGUMENT = any_of(
    product(_C, total(0.0, X, product(0.044715, X, X, X))),
    product(_C, X, total(1.0, product(0.044715, X, X))),
    total(0.0, product(_C, X), product(_C * 0.044715, X, X, X)),
    product(1.0, X, total(_C, product(_C * 0.044715, X, X))),
)
GELU_TANH = ActivationRule(
    "gelu_tanh",
    "Gelu",
    _fixed(GeluAttrs("tanh")),
    product(0.5, X, total(1.0, node("Tanh", _ARGUMENT))),
    product(1.0, X, total(0.5, product(0.5, node("Tanh", _ARGUMENT)))),
)
"""``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, the cubic also as ``x (1 + 0.044715 x^2)`` or multiplied out."""

SWISH = ActivationRule(
    "swish",
    "Swish",
    lambda found, error: AlphaAttrs(found.get("alpha", -found.get("minus_alpha", 0.0))),
    product(1.0, X, node("Sigmoid", product(Scalar(name="alpha"), X))),
    product(1.0, X, Power(total(1.0, node("Exp", product(Scalar(name="minus_alpha"), X))), -1.0)),
)
"""``x sigmoid(alpha x)``, the sigmoid also written out as ``1 / (1 + exp(-alpha x))``."""


def _slopes(found: dict[str, Any], error: float) -> Attrs | None:
    k, top = found.get("k", 1.0), found.get("top", 1.0)
    alpha, beta = found["alpha"], found.get("beta", 0.0)
    if abs(k * top - 1) > 2 * error or alpha <= 0 or (k == 1 and alpha == 1 and beta == 0):
        return None
    return HardSigmoidAttrs(alpha / top, beta / top)


_SLOPE = product(Scalar(name="alpha"), X)
_LINEAR = total(Scalar(name="beta"), _SLOPE)
HARD_SIGMOID = ActivationRule(
    "hard_sigmoid",
    "HardSigmoid",
    _slopes,
    product(Scalar(name="k"), clip(any_of(_LINEAR, _SLOPE), Scalar(0.0), Scalar(name="top"))),
    clip(_LINEAR, Scalar(0.0), Scalar(1.0)),
)
"""``k clip(alpha x + beta, 0, 1/k)``: PyTorch's ``relu6(x + 3) / 6`` and TensorFlow's ``clip(0.2 x + 0.5, 0, 1)``."""


def _gate(found: dict[str, Any], error: float) -> Attrs | None:
    gate = found.get("gate")
    if gate is not None and (abs(gate.attrs.alpha - 1 / 6) > 1e-7 or abs(gate.attrs.beta - 0.5) > 1e-7):
        return None
    return Attrs()


HARD_SWISH = ActivationRule(
    "hard_swish",
    "HardSwish",
    _gate,
    product(1 / 6, X, clip(total(3.0, X), Scalar(0.0), Scalar(6.0))),
    product(1.0, X, node("HardSigmoid", X, name="gate")),
    product(1.0, X, clip(total(0.5, product(1 / 6, X)), Scalar(0.0), Scalar(1.0))),
)
"""``x relu6(x + 3) / 6``, or ``x`` times a hard sigmoid of slope 1/6 and offset 1/2."""

_SOFTPLUS = any_of(node("Softplus", X), node("Log", total(1.0, node("Exp", X))))
MISH = ActivationRule("mish", "Mish", _fixed(Attrs()), product(1.0, X, node("Tanh", _SOFTPLUS)))
"""``x tanh(softplus(x))``, the softplus also written out as ``log(1 + exp(x))``."""


SOFTSIGN = ActivationRule(
    "softsign", "Softsign", _fixed(Attrs()), product(1.0, X, Power(total(1.0, node("Abs", X)), -1.0))
)
"""``x / (1 + |x|)``."""


@rule("one_slope", {"PRelu"})
def one_slope(graph: Graph, op: Op) -> Match | None:
    """A PRelu whose slopes are equal is a LeakyRelu (PyTorch's ``PReLU()`` has one for all channels)."""
    slopes = graph.constant_value(op.inputs[1])
    if slopes is None or not slopes.size or (slopes != slopes.reshape(-1)[0]).any():
        return None
    if graph.type(operand(op)).shape != op.outputs[0].type.shape:
        return None
    attrs = LeakyReluAttrs(float(slopes.reshape(-1)[0]))
    return Match((op,), lambda patch: patch.add("LeakyRelu", [operand(op)], attrs))


LINEAR_FROM = 20.0
"""From this argument on, softplus differs from its argument by less than 1e-10 of it."""


@rule("thresholded_softplus", {"Where"})
def thresholded_softplus(graph: Graph, op: Op) -> Match | Miss | None:
    """PyTorch's softplus, ``where(beta x > 20, x, softplus(beta x) / beta)``, has no need of its threshold."""
    condition, x = producer(graph, op.inputs[0], {"Greater"}), operand(op, 1)
    inner, beta = _factor(graph, operand(op, 2))
    softplus = producer(graph, inner, {"Softplus"})
    if condition is None or softplus is None or graph.type(x).shape != op.outputs[0].type.shape:
        return None
    threshold, argument = scalar(graph, condition.inputs[1]), operand(softplus)
    source, factor = (argument, 1.0) if argument == x else _factor(graph, argument)
    if threshold is None or condition.inputs[0] != argument or source != x:
        return None
    if abs(beta * factor - 1) > 2 * pattern.rounding(op.outputs[0].type.dtype):
        return None
    if threshold < LINEAR_FROM or factor <= 0:
        return Miss(f"its threshold is {threshold:g}, where softplus is no line yet")
    return Match((op, condition), lambda patch: operand(op, 2))


def _factor(graph: Graph, value: Value) -> tuple[Value, float]:
    """The other operand of a product with a number, or of a quotient by one, and the factor. Of any other value: itself, and 1."""
    op = producer(graph, value, {"Mul", "Div"})
    for slot in () if op is None else (1,) if op.kind == "Div" else (0, 1):
        number = scalar(graph, op.inputs[slot])  # type: ignore[union-attr]
        if number and op is not None:
            return operand(op, 1 - slot), number if op.kind == "Mul" else 1 / number
    return value, 1.0


class FuseActivation(RulePass):
    """Sinks first: a hard swish is seen before the hard sigmoid inside of it."""

    name = "fuse_activation"
    rules = (
        GELU,
        GELU_TANH,
        SWISH,
        HARD_SWISH,
        HARD_SIGMOID,
        MISH,
        SOFTSIGN,
        softplus,
        thresholded_softplus,
        branches,
        one_slope,
    )
    sinks_first = True
