"""PyTorch's ``normalize`` becomes one op: ``x / max(||x||, epsilon)`` over one axis is an LpNormalization with an epsilon.

TensorFlow's ``l2_normalize``, ``x rsqrt(max(||x||^2, epsilon))``, is the same with the root of its epsilon.

Cosine attention normalizes queries and keys in this way: Swin V2 over the features, XCiT's cross-covariance attention over the
tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.norm import LpNormAttrs
from optdnn.passes.base import Match, Miss, RulePass
from optdnn.passes.fuse_norm import reduced
from optdnn.passes.support.pattern import Power, Scalar, Var, any_of, node, product
from optdnn.passes.support.pattern_rule import fused, pattern_rule

X, EPS = Var("x"), Scalar(name="epsilon")
_SQUARES = any_of(
    node("ReduceSumSquare", X, name="reduction"),
    node("ReduceSum", product(1.0, X, X), name="reduction"),
)
_LENGTH = any_of(node("ReduceL2", X, name="reduction"), node("Sqrt", _SQUARES))
_SCALED = product(Scalar(name="factor"), _LENGTH)
_BOUNDED = any_of(node("Clip", _SCALED, EPS, None), node("Max", _SCALED, EPS))
_SQUARED_EPS = Scalar(name="squared")
_BOUNDED_SQUARES = any_of(node("Clip", _SQUARES, _SQUARED_EPS, None), node("Max", _SQUARES, _SQUARED_EPS))


UNIT = 8
"""Heads have a multiple of this many features after ``pad_heads``."""
SHORT, MANY = 64, 16384
"""At least ``MANY`` rows of at most ``SHORT`` elements stay arithmetic, unless lanes share a row evenly. With a warp per row,
Swin V2 at batch 16 took 1.47 ms on an H200, as arithmetic 1.26 ms."""


def _shared(length: int) -> bool:
    """Whether the lanes of a warp share a row of this length evenly."""
    return length >= UNIT and length & (length - 1) == 0


def _padded(graph: Graph, op: Op, axis: int, length: int) -> int:
    """The features of a row after ``pad_heads``, which pads rows that only products sum over (Swin2SR: from 30 to 32)."""
    if axis != len(op.outputs[0].type.dims) - 1:
        return length
    for user in graph.users(op.value):
        if user.kind == "Transpose":
            perm = tuple(user.attrs.perm or ())
            summed = [u.kind == "MatMul" and u.inputs[1] == user.value for u in graph.users(user.value)]
            if perm[-2:] != (axis, axis - 1) or not all(summed):
                return length
        elif user.kind != "MatMul" or user.inputs[0] != op.value:
            return length
    return -(-length // UNIT) * UNIT


@pattern_rule(
    "l2_norm",
    product(1.0, X, Power(any_of(_BOUNDED, node("Expand", _BOUNDED)), -1.0)),
    product(1.0, X, Power(any_of(_BOUNDED_SQUARES, node("Expand", _BOUNDED_SQUARES)), -0.5)),
)
def l2_norm(graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
    """``x / max(||x||, epsilon)``. The norm may be the root of a sum of squares, and may be expanded to the shape of ``x``.

    The bound may be one of the squares. The norm may have a factor, as in ScaleNorm (Nguyen and Salazar, 2019), which scales the
    result."""
    x: Value = found["x"]
    axes = reduced(graph, found["reduction"])
    if isinstance(axes, Miss):
        return axes
    if len(axes) != 1:
        return Miss(f"an LpNormalization has one axis, but the norm runs over {axes}")
    shape = graph.type(x).shape
    if shape is not None and all(isinstance(d, int) for d in shape):
        length = graph.type(x).static_shape[axes[0]]
        rows = math.prod(graph.type(x).static_shape) // max(1, length)
        if length <= SHORT and rows >= MANY and not _shared(_padded(graph, root, axes[0], length)):
            return Miss(f"it has {rows} rows of {length} elements, for which separate arithmetic is faster")
    epsilon, factor = found.get("epsilon", 0.0), found.get("factor", 1.0)
    if "squared" in found:
        epsilon = math.sqrt(max(found["squared"], 0.0))
    if epsilon <= 0 or factor <= 0:
        return Miss(f"its epsilon is {epsilon:g} and its factor {factor:g}, which must be positive")

    def build(patch: Patch) -> Value:
        y = patch.add("LpNormalization", [x], LpNormAttrs(axes[0], 2, epsilon / factor))
        return y if factor == 1 else patch.add("Mul", [y, patch.constant(np.asarray(1 / factor, graph.type(x).dtype))])

    return fused(graph, ops, root, x, build)


class FuseL2Norm(RulePass):
    """For GPUs only: the CPU libraries' kernels have no epsilon."""

    name = "fuse_l2_norm"
    rules = (l2_norm,)
    sinks_first = True
