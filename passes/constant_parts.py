"""Constant channels that a Concat adds before a product are multiplied when the network is built.

Neural differential equations (Chen et al., 2018) append the time to the channels before each convolution, and CoordConv (Liu et
al., 2018) the position of each pixel. These channels add a constant to the result. This constant is computed in the build, so the
Concat and its copy are not needed.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import producer
from optdnn.passes.support.products import output_axis
from optdnn.types import Array, normalize_axis

KINDS = frozenset({"Conv", "Gemm", "MatMul"})
ACCESSES = 2
"""Accesses to memory per element that a Concat copies: one read, one write."""


@rule("constant_parts", KINDS)
def constant_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(concat(x, c))`` is ``f(x) + f(c)``, each with its part of the weights."""
    joined = producer(graph, op.inputs[0], {"Concat"})
    if joined is None or not _is_plain(graph, op, joined):
        return None
    axis = normalize_axis(joined.attrs.axis, len(joined.outputs[0].type.dims))
    arrays = [graph.constant_value(v) for v in joined.inputs]
    constants = [a for a in arrays if a is not None]
    rest = [v for v, a in zip(joined.inputs, arrays, strict=True) if a is None and v is not None]
    if not constants or not rest or any(a.size == 0 for a in constants):
        return None
    if not all(v is not None and graph.type(v).is_static for v in joined.inputs):
        return Miss("the sizes of the joined tensors are not known when the network is built")
    others = [u for u in graph.users(joined.value) if not _is_plain(graph, u, joined)]
    if others:
        return Miss(f"{others[0].name} reads the joined tensor as well")
    sizes = [graph.type(v).static_shape[axis] for v in joined.inputs if v is not None]
    known = np.repeat([a is not None for a in arrays], sizes)
    fixed = np.concatenate(constants, axis)
    even, moved = _is_even(op, fixed), ACCESSES * sum(math.prod(graph.type(v).static_shape) for v in rest)
    if not even and math.prod(op.outputs[0].type.static_shape) > moved:
        return Miss("the constant that its constant channels add is larger than the joined tensor")
    inner, outer = (_weights(graph, op, keep) for keep in (~known, known))

    def build(patch: Patch) -> Value:
        x = rest[0] if len(rest) == 1 else patch.add("Concat", rest, joined.attrs)
        y = patch.add(op.kind, [x, patch.constant(inner, "weight"), *op.inputs[2:]], op.attrs)
        if not fixed.any():
            return y
        if even:
            return patch.add("Add", [y, patch.constant(_vector(op, fixed, outer), "added")])
        added = patch.add(op.kind, [patch.constant(fixed, "fixed"), patch.constant(outer, "weight")], op.attrs)
        return patch.add("Add", [y, added])

    return Match((op, joined), build)


def _is_plain(graph: Graph, op: Op, joined: Op) -> bool:
    """Whether ``op`` only multiplies the joined channels by constant weights, without stages, groups or computed padding."""
    weight = graph.constant_value(op.inputs[1]) if op.kind in KINDS else None
    if (
        weight is None
        or op.inputs[0] != joined.value
        or op.inputs.count(joined.value) > 1
        or op.attrs.prologue
        or op.attrs.epilogue
    ):
        return False
    rank = len(joined.outputs[0].type.dims)
    axis = normalize_axis(joined.attrs.axis, rank)
    if op.kind == "Conv":
        return axis == 1 and op.attrs.group == 1 and op.attrs.auto_pad == "NOTSET"
    plain = op.kind == "MatMul" or (not op.attrs.transA and op.attrs.alpha == 1)
    return rank > 1 and axis == rank - 1 and weight.ndim == 2 and plain


def _is_even(op: Op, fixed: Array) -> bool:
    """Whether the constant channels add the same numbers to each pixel or row."""
    if op.kind != "Conv":
        return bool((fixed == fixed.reshape(-1, fixed.shape[-1])[0]).all())
    first = fixed[:1, :, *([slice(1)] * (fixed.ndim - 2))]
    return not any(op.attrs.pads) and bool((fixed == first).all())


def _weights(graph: Graph, op: Op, keep: Array) -> Array:
    """The weights of the joined channels that the mask ``keep`` selects."""
    weight = graph.constant_value(op.inputs[1])
    assert weight is not None
    return np.ascontiguousarray(np.compress(keep, weight, 1 - output_axis(op)))


def _vector(op: Op, fixed: Array, weight: Array) -> Array:
    """The number that constant channels add to each channel of the result, if they add the same to each pixel or row."""
    dtype, fixed, weight = weight.dtype, fixed.astype(np.float64), weight.astype(np.float64)
    if op.kind == "Conv":
        one = fixed.reshape(*fixed.shape[:2], -1)[0, :, 0]
        sums: Array = weight.reshape(*weight.shape[:2], -1).sum(2) @ one
        return sums.reshape(-1, *[1] * (fixed.ndim - 2)).astype(dtype)
    sums = fixed.reshape(-1, fixed.shape[-1])[0] @ (weight.T if op.kind == "Gemm" and op.attrs.transB else weight)
    return sums.astype(dtype)


class ConstantParts(RulePass):
    name = "constant_parts"
    rules = (constant_parts,)
