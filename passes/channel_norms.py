"""Normalizations over the channels of images become one op each, between transpositions that layouts can remove.

ConvNeXt (Liu et al., 2022), Segment Anything (Kirillov et al., 2023) and MobileNetV5 normalize the channels of each position of an
image, and write this as arithmetic over axis 1. The kernels of norms read rows, and a channels-last image is rows of channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.fuse_norm import FusedNorm, LayerNorm, NormRule, RMSNorm, norm_parameters, per_channel, reduced
from optdnn.passes.support.facts import (
    NORMS,
    RESHAPES,
    channels_from_last,
    channels_to_last,
    integers,
    operand,
    producer,
)
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.types import Shape

_MOST = 8
"""Most operators after a norm that move in front of its Transpose."""


@dataclass(frozen=True)
class ChannelNorm(FusedNorm):
    """A norm of ``x`` over the last axis: the channels are moved there before it, and back after it."""

    def norm(self, patch: Patch, *parameters: Value) -> Value:
        rank = len(patch.type(self.x).dims)
        rows = patch.add("Transpose", [self.x], TransposeAttrs(channels_to_last(rank)))
        y = patch.add(self.kind, [rows, *parameters], self.attrs)
        return patch.add("Transpose", [y], TransposeAttrs(channels_from_last(rank)))


def _of_channels(
    rule: NormRule, graph: Graph, root: Value, axes: tuple[int, ...], epsilon: float, found: dict[str, Any]
) -> list[FusedNorm] | Miss:
    dims = graph.type(found["x"]).dims
    if axes != (1,) or len(dims) < 3:
        return []
    channels = dims[1]
    if not isinstance(channels, int):
        return Miss("the number of channels is not known")
    given = norm_parameters(graph, root, per_channel(len(dims), channels), found, shift=rule.centered)
    if given is None:
        return Miss("its scale or shift is not a constant for each channel")
    return [ChannelNorm(rule.kind, LayerNormAttrs(-1, epsilon), found["x"], given, (channels,))]


class LayerNormOfChannels(LayerNorm):
    """LayerNormalization over axis 1 of three or more axes."""

    name = "layer_norm_of_channels"
    options = _of_channels


class RMSNormOfChannels(RMSNorm):
    """RMSNormalization over axis 1 of three or more axes."""

    name = "rms_norm_of_channels"
    options = _of_channels


@rule("l2_norm_of_channels", {"LpNormalization"})
def l2_norm_of_channels(graph: Graph, op: Op) -> Match | None:
    """LpNormalization over axis 1 of three or more axes: denoising-diffusion-pytorch writes RMS norms with ``normalize``."""
    rank = graph.type(operand(op)).rank
    if rank is None or rank < 3 or op.attrs.axis not in (1, 1 - rank):
        return None

    def build(patch: Patch) -> Value:
        rows = patch.add("Transpose", [operand(op)], TransposeAttrs(channels_to_last(rank)))
        y = patch.add("LpNormalization", [rows], replace(op.attrs, axis=rank - 1))
        return patch.add("Transpose", [y], TransposeAttrs(channels_from_last(rank)))

    return Match((op,), build)


@rule("activation_after_pixel_norm", RESHAPES)
def activation_after_pixel_norm(graph: Graph, op: Op) -> Match | None:
    """An activation after a norm and a Reshape moves in front of the Reshape (GCNet normalizes the channels of one pixel)."""
    norm, user = producer(graph, op.inputs[0], NORMS, alone=True), graph.sole_user(op.value)
    if norm is None or user is None or user.kind not in ACTIVATIONS or user.inputs[0] != op.value:
        return None
    if not all(v is None or _is_number(graph, v) for v in user.inputs[1:]):
        return None

    def build(patch: Patch) -> Value:
        moved = patch.add(user.kind, [norm.value, *user.inputs[1:]], user.attrs, src=user.src)
        return patch.add(op.kind, [moved, *op.inputs[1:]], op.attrs, src=op.src)

    return Match((user, op), build)


@rule("stage_after_channel_norm", {"Transpose"})
def stage_after_channel_norm(graph: Graph, op: Op) -> Match | Miss | None:
    """An activation, addition or product after a norm and its Transpose moves in front of the Transpose: the norm's kernel
    absorbs it.

    A factor or term for each channel (and image) is transposed instead, as is the other image of an addition. A constant factor or
    term moves only in front of a further operator: the weights of a product take it in."""
    dims, rank = op.outputs[0].type.dims, len(op.outputs[0].type.dims)
    user = graph.sole_user(op.value)
    if user is None or op.attrs.perm != channels_from_last(rank) or not _normed(graph, operand(op)):
        return None
    if user.outputs[0].type != op.outputs[0].type or user.inputs.count(op.value) != 1:
        return None
    if user.kind not in ACTIVATIONS | {"Add", "Mul"}:
        return None
    others = [v for v in user.inputs if v is not None and v != op.value and not _is_number(graph, v)]
    if user.kind in ACTIVATIONS and others:
        return None
    images = [v for v in others if graph.type(v).dims == dims]
    if images and user.kind == "Mul":
        return Miss(f"{user.name} multiplies with another image")
    if not all(v in images or _per_channel(graph, v, dims) for v in others):
        return Miss(
            f"{user.name} reads {graph.output(others[0]).name}, which is no image and has not one element per channel"
        )
    if (
        others
        and all(graph.constant_value(v) is not None for v in others)
        and not _is_stage(graph.sole_user(user.value))
    ):
        return None

    def build(patch: Patch) -> Value:
        before = {op.value: operand(op)} | {v: _rows(patch, v, rank) for v in others}
        inputs = [v if v is None else before.get(v, v) for v in user.inputs]
        moved = patch.add(user.kind, inputs, user.attrs, src=user.src)
        return patch.add("Transpose", [moved], op.attrs, src=op.src)

    return Match((user, op), build)


def _normed(graph: Graph, value: Value) -> bool:
    """Whether a norm computes the rows, or operators that :func:`stage_after_channel_norm` moved behind one."""
    for _ in range(_MOST):
        op = graph.op(value)
        if graph.sole_user(value) is None:
            return False
        if op.kind in NORMS | {"LpNormalization"}:
            return True
        dims = graph.type(value).dims
        rows = [
            v for v in op.inputs if v is not None and graph.type(v).dims == dims and graph.op(v).kind != "Transpose"
        ]
        if not _is_stage(op) or len(rows) != 1:
            return False
        value = rows[0]
    return False


def _is_stage(op: Op | None) -> bool:
    return op is not None and (op.kind in ACTIVATIONS or op.kind in ("Add", "Mul"))


def _is_number(graph: Graph, value: Value) -> bool:
    array = graph.constant_value(value)
    return array is not None and array.size == 1


def _per_channel(graph: Graph, value: Value, dims: Shape) -> bool:
    """Whether a value has one element for each channel, or for each image and channel, of images of these sizes."""
    own = graph.type(value).shape
    if own is None or len(own) < len(dims) - 1:
        return False
    images = own[: -len(dims) + 1]
    return own[-len(dims) + 1 :] == (dims[1], *(1 for _ in dims[2:])) and images in ((), (1,), dims[:1])


def _rows(patch: Patch, value: Value, rank: int) -> Value:
    """An image, or a vector of channels, with the channels last. A number that is added to the vector is added afterwards."""
    graph, dims = patch.graph, patch.type(value).dims
    add = producer(graph, value, {"Add"}, alone=True)
    numbers = [] if add is None else [v for v in add.inputs if v is not None and _is_number(graph, v)]
    if add is not None and len(numbers) == 1:
        other = operand(add, 1 - add.inputs.index(numbers[0]))
        return patch.add("Add", [_rows(patch, other, rank), *numbers], src=add.src)
    if len(dims) < rank:
        value = patch.add("Unsqueeze", [value, integers(patch, (0,), "axes")])
    return patch.add("Transpose", [value], TransposeAttrs(channels_to_last(rank)))


@rule("mean_square_of_channels", {"GlobalAveragePool", "ReduceMean"})
def mean_square_of_channels(graph: Graph, op: Op) -> Match | None:
    """``mean(x * x)`` over the positions of an image is ``(ReduceL2(x) / sqrt(n))^2``. A sum of squares could overflow."""
    square = producer(graph, op.inputs[0], {"Mul"}, alone=True)
    if square is None or square.inputs[0] != square.inputs[1]:
        return None
    dims = square.outputs[0].type.dims
    axes = reduced(graph, op)
    positions = [d for d in dims[2:] if isinstance(d, int)]
    if len(dims) < 4 or axes != tuple(range(2, len(dims))) or len(positions) < len(axes) or 0 in positions:
        return None

    def build(patch: Patch) -> Value:
        norm = patch.add("ReduceL2", [operand(square), integers(patch, axes, "axes")], ReduceAttrs(keepdims=True))
        share = patch.constant(np.asarray(math.prod(positions) ** -0.5, op.outputs[0].type.dtype), "share")
        root = patch.add("Mul", [norm, share])
        return patch.add("Mul", [root, root])

    return Match((op, square), build)


class ChannelNorms(RulePass):
    name = "channel_norms"
    rules = (
        LayerNormOfChannels(),
        RMSNormOfChannels(),
        l2_norm_of_channels,
        stage_after_channel_norm,
        activation_after_pixel_norm,
        mean_square_of_channels,
    )
    sinks_first = True
