"""Normalizations over the channels of images become one op each, between transpositions that layouts can remove.

ConvNeXt (Liu et al., 2022), Segment Anything (Kirillov et al., 2023) and MobileNetV5 normalize the channels of each position of an
image, and write this as arithmetic over axis 1. The kernels of norms read rows, and a channels-last image is rows of channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from optdnn.types import Array


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


@rule("activation_after_pixel_norm", RESHAPES)
def activation_after_pixel_norm(graph: Graph, op: Op) -> Match | None:
    """An activation after a norm and a Reshape moves in front of the Reshape (GCNet normalizes the channels of one pixel)."""
    norm, user = producer(graph, op.inputs[0], NORMS, alone=True), graph.sole_user(op.value)
    if norm is None or user is None or user.kind not in ACTIVATIONS or user.inputs[0] != op.value:
        return None
    constants = [graph.constant_value(v) for v in user.inputs[1:] if v is not None]
    if any(c is None or _is_array(c) for c in constants):
        return None

    def build(patch: Patch) -> Value:
        moved = patch.add(user.kind, [norm.value, *user.inputs[1:]], user.attrs, src=user.src)
        return patch.add(op.kind, [moved, *op.inputs[1:]], op.attrs, src=op.src)

    return Match((user, op), build)


@rule("stage_after_channel_norm", {"Transpose"})
def stage_after_channel_norm(graph: Graph, op: Op) -> Match | None:
    """An activation or addition after a norm and its Transpose moves in front of the Transpose: the norm's kernel absorbs it.

    The other image of an addition must have the same sizes. It is transposed instead."""
    dims = op.outputs[0].type.dims
    norm, user = producer(graph, op.inputs[0], NORMS, alone=True), graph.sole_user(op.value)
    if (
        norm is None
        or user is None
        or op.attrs.perm != channels_from_last(len(dims))
        or user.outputs[0].type.dims != dims
    ):
        return None
    others = [v for v in user.inputs if v is not None and v != op.value and graph.constant_value(v) is None]
    addition = user.kind == "Add" and len(others) == 1 and graph.type(others[0]).dims == dims
    if not addition and (user.kind not in ACTIVATIONS or others or any(map(_is_array, _constants(graph, user)))):
        return None

    def build(patch: Patch) -> Value:
        before = {op.value: operand(op)}
        for v in others:
            before[v] = patch.add("Transpose", [v], TransposeAttrs(channels_to_last(len(dims))))
        moved = patch.add(
            user.kind, [v if v is None else before.get(v, v) for v in user.inputs], user.attrs, src=user.src
        )
        return patch.add("Transpose", [moved], op.attrs, src=op.src)

    return Match((user, op), build)


def _constants(graph: Graph, op: Op) -> list[Array]:
    found = [graph.constant_value(v) for v in op.inputs if v is not None]
    return [a for a in found if a is not None]


def _is_array(array: Array) -> bool:
    return array.size > 1


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
        stage_after_channel_norm,
        activation_after_pixel_norm,
        mean_square_of_channels,
    )
    sinks_first = True
