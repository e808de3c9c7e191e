"""Convolutions or products of one kind on one operand, taken apart and put side by side.

Their epilogues may read tensors: the parts of a Split side by side (the gates of a triangle multiplication: Jumper et al., 2021;
those of RAFT-Stereo's recurrent unit add parts of the context: Lipson et al., 2021), or, in products, one that all siblings share,
with one factor per row (a mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import FusedAttrs
from optdnn.passes.support.facts import integers, operand, producer
from optdnn.passes.support.products import output_axis
from optdnn.types import Array, normalize_axis


@dataclass(frozen=True)
class Tensor:
    """A tensor that the epilogue of a sibling reads. ``port``: of the Split that ``value`` is a part of; -1 for a tensor with one
    element per row, which all siblings share."""

    value: Value
    port: int

    @property
    def key(self) -> tuple[object, ...]:
        """What the tensors of siblings have in common."""
        return (self.value,) if self.port < 0 else (self.value.op, "part")


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
    tensors: tuple[Tensor | None, ...]
    """For each of the stages' operands the tensor that is no constant, or None."""
    width: int

    @property
    def parts(self) -> tuple[int, ...]:
        """The ports of the Splits whose parts the stages read."""
        return tuple(t.port for t in self.tensors if t is not None and t.port >= 0)


@dataclass(frozen=True)
class Family:
    """Siblings to merge, in order; ``concat``: the Concat that joins them side by side, or None."""

    members: tuple[Member, ...]
    axis: int
    concat: Op | None


def member_of(graph: Graph, op: Op, *, tensors: bool = False) -> Member | str:
    """A sibling taken apart, or why it cannot be merged. ``tensors``: its stages may read a :class:`Tensor`."""
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
    width, rank = weight.shape[output_axis(op)], len(output.dims)
    if rank < 2:
        return "it multiplies a vector"
    axis = _channels(op)
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
    read: list[Tensor | None] = []
    used = sorted({a for s in attrs.epilogue for a in s.args if a is not None and a >= 0})
    for slot in used:
        array = graph.constant_value(op.inputs[slot]) if slot >= arity else None
        vector = by_channel(array, rank, axis, width)
        tensor = _tensor(graph, op, op.inputs[slot]) if tensors and array is None and slot >= arity else None
        if tensor is None and (array is None or vector is None):
            return "its epilogue reads a value that is not a constant for each output channel"
        scalars.append(array if array is not None and array.size == 1 else None)
        channels.append(None if array is None or array.size == 1 else vector)
        read.append(tensor)
    renumber = {slot: arity + k for k, slot in enumerate(used)}
    stages = (
        replace(s, args=tuple(renumber.get(a, a) if a is not None else None for a in s.args)) for s in attrs.epilogue
    )
    plain = replace(attrs, epilogue=tuple(stages))
    kernel = weight.shape[2:] if op.kind == "Conv" else ()
    values = tuple(None if a is None else (a.shape, a.tobytes()) for a in scalars)
    types = tuple(None if a is None else str(a.dtype) for a in packed)
    shared = tuple(t and t.key for t in read)
    key = (op.kind, plain, kernel, str(output.dtype), str(weight.dtype), values, shared, types)
    return Member(op, key, weight, bias, packed, tuple(scalars), tuple(channels), tuple(read), width)


def _tensor(graph: Graph, op: Op, value: Value | None) -> Tensor | None:
    """The tensor that a stage reads, if siblings can read it as one; else None."""
    if value is None:
        return None
    own, of = graph.type(value), op.outputs[0].type
    if own.dims and own.dims[-1] == 1 and op.kind != "Conv":
        return Tensor(value, -1)
    split = producer(graph, value, {"Split"})
    if split is None or not all(o.type.is_static for o in split.outputs) or own.dims != of.dims:
        return None
    return Tensor(value, value.port) if normalize_axis(split.attrs.axis, len(own.dims)) == _channels(op) else None


def _channels(op: Op) -> int:
    """The axis of the result's channels or columns."""
    return 1 if op.kind == "Conv" else len(op.outputs[0].type.dims) - 1


def side_by_side(members: Sequence[Member]) -> bool:
    """Whether the parts that the stages of siblings read are in order, without gaps."""
    ports = zip(*(m.parts for m in members), strict=True)
    return all(list(of) == list(range(of[0], of[0] + len(of))) for of in ports)


def _joined_parts(graph: Graph, patch: Patch, tensors: Sequence[Tensor], axis: int, name: str) -> Value:
    """The tensor that joins the parts of a Split along ``axis`` side by side, or the tensor that all siblings share."""
    first = tensors[0]
    if first.port < 0:
        return first.value
    split = graph.op(first.value)
    sizes = [o.type.static_shape[axis] for o in split.outputs]
    if len(tensors) == len(sizes):
        return operand(split)
    begin = sum(sizes[: first.port])
    end = begin + sum(sizes[first.port : first.port + len(tensors)])
    limits = [integers(patch, [n], f"{name}.{what}") for n, what in ((begin, "begin"), (end, "end"), (axis, "axis"))]
    return patch.add("Slice", [operand(split), *limits])


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
        tensors = [t for m in members if (t := m.tensors[k]) is not None]
        if tensors:
            inputs.append(_joined_parts(graph, patch, tensors, _channels(first.op), f"{name}.stage{k}"))
            continue
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
