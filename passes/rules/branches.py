"""Activations with another formula below zero (ELU, SELU, leaky and parametric ReLU), and softplus, become one op each.

ELU: Clevert et al. (2016). SELU: Klambauer et al. (2017). PReLU: He et al. (2015). Exporters write them as a Where, as ONNX itself
defines them, or as the sum of a positive and a negative part (Keras, MXNet, TensorFlow). NaN stays NaN in all forms.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Attrs
from optdnn.ops.unary import AlphaAttrs, LeakyReluAttrs, SeluAttrs
from optdnn.passes.base import Match, Miss
from optdnn.passes.support.pattern import ConstantVar, Pattern, Scalar, Var, any_of, node, product, rounding, total
from optdnn.passes.support.pattern_rule import fused, pattern_rule

X, ZERO = Var("x"), Scalar(0.0)
_LESS, _GREATER = frozenset({"Less", "LessOrEqual"}), frozenset({"Greater", "GreaterOrEqual"})
_BELOW = any_of(node(_LESS, X, ZERO), node(_GREATER, ZERO, X))
_ABOVE = any_of(node(_GREATER, X, ZERO), node(_LESS, ZERO, X))


def _branches(below: Pattern, above: Pattern) -> Pattern:
    """``below`` where x is negative, ``above`` where it is positive. Both are 0 for 0, and NaN for NaN."""
    return any_of(
        node("Where", any_of(_BELOW, node("Not", _ABOVE)), below, above),
        node("Where", any_of(_ABOVE, node("Not", _BELOW)), above, below),
    )


def _at_least_zero(x: Pattern, name: str = "") -> Pattern:
    return any_of(node("Relu", x, name=name), node("Max", x, ZERO, name=name), node("Clip", x, ZERO, name=name))


_POSITIVE_PART = _at_least_zero(X)
_NEGATIVE_PART = any_of(node("Min", X, ZERO), node("Clip", X, None, ZERO))
_MULTIPLE = any_of(
    _NEGATIVE_PART,
    _at_least_zero(product(-1.0, X), name="negated"),
    total(0.0, X, product(-1.0, node("Abs", X, name="twice"))),
)
"""A multiple of the negative part: ``min(x, 0)``, ``max(-x, 0)``, or ``x - |x|``."""

_SLOPE, _SLOPES = Scalar(name="slope"), ConstantVar("slopes")
_GROWTH = product(
    Scalar(name="factor"),
    total(
        Scalar(name="offset"),
        product(Scalar(name="alpha"), node("Exp", any_of(X, _NEGATIVE_PART, _branches(X, ZERO)))),
    ),
)
"""``factor (alpha exp(x) - alpha)``. JAX bounds the exponent, which could grow where the result is not chosen."""


@pattern_rule(
    "branches",
    _branches(_GROWTH, product(Scalar(name="gamma"), X)),
    total(
        0.0,
        _POSITIVE_PART,
        product(
            Scalar(name="factor"),
            total(Scalar(name="offset"), product(Scalar(name="alpha"), node("Exp", _NEGATIVE_PART))),
        ),
    ),
    _branches(product(_SLOPE, X), X),
    _branches(product(_SLOPE, X, _SLOPES), X),
    node("Max", product(_SLOPE, X), X, name="largest"),
    total(0.0, _POSITIVE_PART, product(_SLOPE, _MULTIPLE)),
    total(0.0, _POSITIVE_PART, product(_SLOPE, _MULTIPLE, _SLOPES)),
)
def branches(graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
    """``gamma x`` above zero; below it ``slope x``, or ``alpha (exp(x) - 1)``."""
    x: Value = found["x"]
    dtype = root.outputs[0].type.dtype
    if "factor" in found:
        alpha, gamma = found["alpha"], found.get("gamma", 1.0)
        if abs(alpha + found["offset"]) > 2 * rounding(dtype) * abs(alpha) or not gamma or not np.isfinite(gamma):
            return None
        alpha *= found["factor"]
        if gamma == 1:
            return fused(graph, ops, root, x, partial(_unary, x, "Elu", AlphaAttrs(alpha)))
        return fused(graph, ops, root, x, partial(_unary, x, "Selu", SeluAttrs(alpha / gamma, gamma)))
    slope = found["slope"] * (2.0 if "twice" in found else -1.0 if "negated" in found else 1.0)
    if "largest" in found and not 0 < slope <= 1:
        return Miss(f"with the slope {slope:g}, the larger one is not x itself above zero, or not the product below it")
    if "slopes" not in found:
        return fused(graph, ops, root, x, partial(_unary, x, "LeakyRelu", LeakyReluAttrs(slope)))
    slopes = graph.constant_value(found["slopes"])
    assert slopes is not None
    return fused(graph, ops, root, x, partial(_slopes, x, slopes.astype(np.float64) * slope))


def _unary(x: Value, kind: str, attrs: Attrs, patch: Patch) -> Value:
    return patch.add(kind, [x], attrs)


def _slopes(x: Value, slopes: np.ndarray[Any, Any], patch: Patch) -> Value:
    return patch.add("PRelu", [x, patch.constant(slopes.astype(patch.type(x).dtype), "slopes")])


@pattern_rule(
    "softplus",
    node("Log", total(1.0, node("Exp", X))),
    total(0.0, _POSITIVE_PART, node("Log", total(1.0, node("Exp", product(-1.0, node("Abs", X)))))),
)
def softplus(graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
    """``log(1 + exp(x))``, and ``max(x, 0) + log(1 + exp(-|x|))``, which does not overflow."""
    return fused(graph, ops, root, found["x"], partial(_unary, found["x"], "Softplus", Attrs()))
