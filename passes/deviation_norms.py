"""Normalizations that LayerNormalization and RMSNormalization cannot express become one op, a DeviationNormalization.

Some add an epsilon to the deviation instead of the variance (``x.std() + eps`` in "The Annotated Transformer", ``x.norm() +
eps``). Others divide by the deviation about the mean, but keep the mean in the result (``x / x.std()``, timm's SimpleNorm).
Bessel's correction and the root of a length are factors of the scale.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.norm import DeviationNormAttrs
from optdnn.passes.base import Match, Miss, RulePass
from optdnn.passes.channel_norms import ChannelNorm
from optdnn.passes.fuse_norm import (
    CENTERED,
    SQUARES,
    VARIANCE,
    FusedNorm,
    X,
    norm_parameters,
    per_channel,
    reduced,
    trailing,
)
from optdnn.passes.support.pattern import Pattern, Power, Scalar, Var, any_of, node, product
from optdnn.passes.support.pattern_rule import PatternRule

_G, _EPS, _ROOT_EPS = Var("scale"), Scalar(name="epsilon"), Scalar(name="root_epsilon")
_GAIN = Scalar(name="gain")
_LENGTH = any_of(
    node("ReduceL2", X, name="length"),
    node(
        "Sqrt", any_of(node("ReduceSumSquare", X, name="length"), node("ReduceSum", product(1.0, X, X), name="length"))
    ),
)


def _corrected(variance: Pattern) -> Pattern:
    """The variance, with Bessel's correction or without, plus an epsilon or not."""
    corrected = product(Scalar(name="correction"), variance)
    return any_of(node("Add", corrected, _EPS), corrected)


def _outside(x: Pattern, deviation: Pattern, *more: Pattern) -> Pattern:
    """``x / (deviation + epsilon)``."""
    return product(_GAIN, x, Power(node("Add", product(Scalar(name="factor"), deviation), _ROOT_EPS), -1.0), *more)


def _inside(x: Pattern, variance: Pattern, *more: Pattern) -> Pattern:
    """``x / sqrt(variance + epsilon)``."""
    return product(_GAIN, x, Power(_corrected(variance), -0.5), *more)


_ROOTS = tuple(node("Sqrt", _corrected(v)) for v in (VARIANCE, SQUARES))


def _patterns(x: Pattern, *deviations: Pattern, inside: bool) -> tuple[Pattern, ...]:
    return tuple(
        pattern
        for more in ((_G,), ())
        for pattern in (
            *(_outside(x, d, *more) for d in deviations),
            *((_inside(x, VARIANCE, *more),) if inside else ()),
        )
    )


class DeviationNorm(PatternRule):
    """``x / (deviation + epsilon) * g + b``, or ``x / sqrt(variance + epsilon) * g + b`` with a variance about the mean."""

    name, centered = "deviation_norm", False
    patterns = _patterns(X, *_ROOTS, _LENGTH, inside=True)

    def accept(self, graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
        x: Value = found["x"]
        dims = graph.type(x).dims
        axes = _axes(graph, found)
        if isinstance(axes, Miss):
            return axes
        of_channels = axes == (1,) and len(dims) > 2
        if not of_channels and axes != tuple(range(len(dims) - len(axes), len(dims))):
            return Miss(f"axes are neither the last ones nor the channels: {axes} of {len(dims)}")
        own = tuple(d for i in axes if isinstance(d := dims[i], int))
        if len(own) < len(axes):
            return Miss("the size of the normalized axes is not known")
        fits = per_channel(len(dims), own[0]) if of_channels else trailing(own)
        parameters = norm_parameters(graph, root.value, fits, found)
        if parameters is None:
            return None
        correction = math.prod(own) if "length" in found else found.get("correction", 1.0)
        factor, epsilon, outer = (
            found.get(k, d) for k, d in (("factor", 1.0), ("epsilon", 0.0), ("root_epsilon", 0.0))
        )
        if not (0 < correction < math.inf and 0 < factor < math.inf):
            return Miss(f"the variance is multiplied by {correction:g}, the deviation by {factor:g}")
        if not (0 <= epsilon < math.inf and 0 <= outer < math.inf):
            return Miss(f"an epsilon is negative: {epsilon:g}, {outer:g}")
        divided = factor * correction**0.5  # the deviation is this times the root of the plain variance
        axis = -1 if of_channels else -len(axes)
        attrs = DeviationNormAttrs(axis, epsilon / correction, outer / divided, "mean" in found, self.centered)
        kind = ChannelNorm if of_channels else FusedNorm
        return kind("DeviationNormalization", attrs, x, parameters, own, factor=found["gain"] / divided).match(
            graph, ops
        )


def _axes(graph: Graph, found: dict[str, Any]) -> tuple[int, ...] | Miss:
    """The axes of all statistics of a match."""
    if "widened" in found and found["widened"].outputs[0].type.dtype != np.float64:
        return Miss(f"the squares are converted to {found['widened'].outputs[0].type.dtype}")
    names = [name for name in ("variance", "length", "mean", "least", "greatest") if name in found]
    given = [reduced(graph, found[name]) for name in names]
    for name, axes in zip(names, given, strict=True):
        if isinstance(axes, Miss):
            return axes
        if axes != given[0]:
            return Miss(f"the {name} runs over axes {axes}, the {names[0]} over {given[0]}")
    return given[0] or Miss("it normalizes no axis")


class CenteredDeviationNorm(DeviationNorm):
    """``(x - mean) / (deviation + epsilon) * g + b``."""

    name, centered = "centered_deviation_norm", True
    patterns = _patterns(CENTERED, _ROOTS[0], inside=False)


class DeviationNorms(RulePass):
    """For GPUs only: the CPU libraries have no kernel for them."""

    name = "deviation_norms"
    rules = (CenteredDeviationNorm(), DeviationNorm())
    sinks_first = True
