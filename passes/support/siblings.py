"""Convolutions or products of one kind on one operand, taken apart and put side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import FusedAttrs
from optdnn.passes.support.products import output_axis
from optdnn.types import Array


@dataclass(frozen=True)
class Member:
    """One sibling taken apart. ``channels`` has an array for each operand that varies by output channel."""

    op: Op
    key: tuple[Any, ...]
    """Siblings with equal keys can be merged."""
    weight: Array
    bias: Array | None
    packed: tuple[Array | None, ...]
    """Scales and zero points of packed weights."""
    scalars: tuple[Array | None, ...]
    """The stages' operands, in order of slot: a scalar, or None if ``channels`` has the vector."""
    channels: tuple[Array | None, ...]
    width: int


@dataclass(frozen=True)
class Family:
    """Siblings to merge, in order; ``concat``: the Concat that joins them side by side, or None."""

    members: tuple[Member, ...]
    axis: int
    concat: Op | None


def member_of(graph: Graph, op: Op) -> Member | str:
    """A sibling taken apart, or why it cannot be merged."""
    attrs: FusedAttrs = op.attrs
    weight, output = graph.constant_value(op.input(1)), op.outputs[0].type
    if weight is None:
        return "its weights are not constant"
    if op.kind == "Conv" and op.attrs.group != 1:
        return "a grouped convolution reads only its own channels"
    if op.kind != "Conv" and weight.ndim != 2:
        return f"its weights have rank {weight.ndim}, not 2"
    if attrs.prologue:
        return "it has its own prologue"
    if output.shape is None or len(output.shape) < 2:
        return "the rank of its result is unknown"
    width, rank = weight.shape[output_axis(op)], len(output.shape)
    axis = 1 if op.kind == "Conv" else rank - 1
    arity = op.definition.arity
    assert arity is not None
    bias: Array | None = None
    packed: tuple[Array | None, ...] = ()
    if op.kind == "PackedMatMul":
        packed = tuple(graph.constant_value(op.input(k)) for k in (2, 3))
        if packed[0] is None or (op.input(3) is not None and packed[1] is None) or op.attrs.block_rows > 1:
            return "its scales or zero points are not constants for each row"
    elif arity > 2 and op.input(2) is not None:
        bias = by_channel(graph.constant_value(op.input(2)), rank if op.kind == "Gemm" else 1, axis, width)
        if bias is None:
            return "its bias is not a constant for each output channel"
    scalars: list[Array | None] = []
    channels: list[Array | None] = []
    used = sorted({a for s in attrs.epilogue for a in s.args if a is not None and a >= 0})
    for slot in used:
        array = graph.constant_value(op.inputs[slot]) if slot >= arity else None
        vector = by_channel(array, rank, axis, width)
        if array is None or vector is None:
            return "its epilogue reads a value that is not a constant for each output channel"
        scalars.append(array if array.size == 1 else None)
        channels.append(None if array.size == 1 else vector)
    renumber = {slot: arity + k for k, slot in enumerate(used)}
    stages = (
        replace(s, args=tuple(renumber.get(a, a) if a is not None else None for a in s.args)) for s in attrs.epilogue
    )
    plain = replace(attrs, epilogue=tuple(stages))
    kernel = weight.shape[2:] if op.kind == "Conv" else ()
    values = tuple(None if a is None else (a.shape, a.tobytes()) for a in scalars)
    types = tuple(None if a is None else str(a.dtype) for a in packed)
    key = (op.kind, plain, kernel, str(output.dtype), str(weight.dtype), values, types)
    return Member(op, key, weight, bias, packed, tuple(scalars), tuple(channels), width)


def joined(graph: Graph, patch: Patch, x: Value, family: Family, kept: ConstantCache) -> Value:
    """The op on ``x`` that computes all members, with their output channels in order."""
    members, first = family.members, family.members[0]
    name = f"{first.op.outputs[0].name}.siblings"
    weights, axis = [m.weight for m in members], output_axis(first.op)
    weight = kept.once(("joined", axis), weights, lambda: np.concatenate(weights, axis=axis))
    inputs: list[Value | None] = [x, patch.constant(weight, f"{name}.weight"), None]
    if any(m.bias is not None for m in members):
        biases = [np.zeros(m.width, weight.dtype) if m.bias is None else m.bias for m in members]
        inputs[2] = patch.constant(np.concatenate(biases), f"{name}.bias")
    for k, own in enumerate(first.packed):
        arrays = [m.packed[k] for m in members]
        row = None if own is None else np.concatenate([a for a in arrays if a is not None])
        inputs[2 + k :] = [None if row is None else patch.constant(row, f"{name}.packed{k}")]
    inputs = inputs[: first.op.definition.arity]
    rank = len(graph.type(first.op.value).dims)
    for k, scalar in enumerate(first.scalars):
        if scalar is None:
            vectors = [m.channels[k] for m in members]
            scalar = np.concatenate([v for v in vectors if v is not None])
            scalar = scalar.reshape(-1, *(1,) * (rank - 1 - family.axis))
        inputs.append(patch.constant(scalar, f"{name}.stage{k}"))
    while inputs[-1] is None:
        inputs.pop()
    return patch.add(first.op.kind, inputs, first.key[1], name=name)


def by_channel(array: Array | None, rank: int, axis: int, width: int) -> Array | None:
    """A constant that varies only along the channel axis, as a vector; None for any other."""
    if array is None:
        return None
    if array.size == 1:
        return np.array(np.broadcast_to(array.reshape(-1), (width,)))
    where = axis - (rank - array.ndim) if rank > 1 else 0
    if array.ndim > rank or where < 0 or array.shape[where] != width or array.size != width:
        return None
    return array.reshape(-1)
