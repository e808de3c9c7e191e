"""An average pool before a 1x1 convolution moves after it, where it has fewer channels, and becomes a depthwise convolution.

Both are linear and one works within channels, the other across them: they may change places (the pool branches of Inception).
The bias follows the pool, which would count padding with it otherwise. As a depthwise convolution the pool takes in the bias and
the activation after it. A pool of single points with strides is a Slice: the shortcuts of ArcFace's network (Deng et al., 2019).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import integers, operand, producer

FEWER = 2
"""The convolution must have at least so many times as many channels in as out."""


@rule("pool_last", {"Conv"})
def pool_last(graph: Graph, op: Op) -> Match | Miss | None:
    """``conv(pool(x)) + b`` is ``pool(conv(x)) + b``."""
    a, weight = op.attrs, graph.constant_value(op.input(1))
    pool = producer(graph, operand(op), {"AveragePool"})
    if pool is None or weight is None or a.group != 1 or math.prod(weight.shape[2:]) != 1:
        return None
    p = pool.attrs
    if any(a.pads) or any(s != 1 for s in (*a.strides, *p.strides)) or a.prologue or a.epilogue or len(op.inputs) > 3:
        return None
    if graph.sole_user(pool.value) is None:
        return Miss(f"the result of {pool.name} is used {graph.use_count(pool.value)} times")
    outer, inner = weight.shape[:2]
    if inner < FEWER * outer:
        return Miss(f"{op.name} reduces {inner} channels only to {outer}, too little for the pool to move")
    if p.auto_pad != "NOTSET" or (any(p.pads) and not p.count_include_pad):
        return Miss(f"{pool.name} divides by a number that depends on the position")
    shape = (outer, 1, *p.kernel_shape)
    mean = np.full(shape, 1 / math.prod(p.kernel_shape), weight.dtype)
    sliding = ConvAttrs(p.strides, p.pads, p.dilations, outer)

    def build(patch: Patch) -> Value:
        rows = patch.add("Conv", [operand(pool), op.inputs[1]], replace(a, auto_pad="NOTSET"))
        return patch.add("Conv", [rows, patch.constant(mean, "mean"), *op.inputs[2:]], sliding)

    return Match((op, pool), build)


@rule("pool_of_points", {"AveragePool", "MaxPool"})
def pool_of_points(graph: Graph, op: Op) -> Match | None:
    """A pool whose windows have one point takes every s-th point."""
    a, dims, after = op.attrs, graph.type(operand(op)).shape, op.outputs[0].type.shape
    if math.prod(a.kernel_shape) != 1 or any(a.pads) or len(op.outputs) > 1 or dims is None or after is None:
        return None
    axes = [2 + k for k, s in enumerate(a.strides) if s > 1]
    steps = [s for s in a.strides if s > 1]
    sizes = [n for k in axes if isinstance(n := dims[k], int)]
    if not axes or len(sizes) < len(axes):
        return None
    if any(after[k] != -(-n // s) for k, n, s in zip(axes, sizes, steps, strict=True)):
        return None
    limits = ([0] * len(axes), sizes, axes, steps)

    def build(patch: Patch) -> Value:
        return patch.add("Slice", [operand(op), *(integers(patch, each, "limits") for each in limits)])

    return Match((op,), build)


class PoolLast(RulePass):
    name = "pool_last"
    rules = (pool_last, pool_of_points)
