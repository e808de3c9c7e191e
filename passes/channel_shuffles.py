"""Convolutions of half the channels, between a split, a concatenation and a shuffle, become convolutions of all channels.

A unit of ShuffleNet V2 (Ma et al., 2018) splits its channels, convolves one half, joins the halves and shuffles the channels. The
split, the concatenation and the shuffle take more launches than the convolutions, which are small. This pass lets all channels go
through these convolutions. Weights of one and zero keep the other half unchanged, and the shuffle becomes an order of the weights
of the next convolution, even if that has groups. (Zero times infinity is NaN: an element that has overflowed spoils the other
channels of its pixel.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import non_negative, operand, producer, reshaped
from optdnn.passes.support.parts import whole
from optdnn.passes.support.paths import path_to
from optdnn.types import Array, normalize_axis

MOST_CHANNELS = 1024
"""With more channels, the products with ones and zeros take longer than moving the channels."""
MOST_WORK = 512
"""Most multiplications per element of a shuffled image for which products with zeros are faster than the shuffle."""
PRECISIONS = ("fp16", "bf16")
"""Other precisions multiply more slowly, or round the channels that are kept."""


def order_of(graph: Graph, value: Value | None) -> tuple[Value, Array] | None:
    """The image before a channel shuffle, and for each channel of ``value`` its number in that image; None for no shuffle."""
    last = producer(graph, value, {"Reshape"})
    turned = None if last is None else producer(graph, last.inputs[0], {"Transpose"}, alone=True)
    first = None if turned is None else producer(graph, turned.inputs[0], {"Reshape"}, alone=True)
    if last is None or turned is None or first is None or turned.attrs.perm != (0, 2, 1, 3, 4):
        return None
    source = operand(first)
    types = [graph.type(v) for v in (source, first.value, last.value)]
    if not all(t.is_static for t in types):
        return None
    before, parts, after = (t.static_shape for t in types)
    if len(before) != 4 or before != after or parts[0] != before[0] or parts[3:] != before[2:]:
        return None
    return source, np.arange(before[1]).reshape(parts[1:3]).T.reshape(-1)


def weights_of(graph: Graph, op: Op) -> tuple[Array, Array | None] | None:
    """Constant OIHW weights and bias (None without one) of a convolution of images without stages; None for other operators."""
    weight, bias = graph.constant_value(op.inputs[1]), graph.constant_value(op.input(2))
    a = op.attrs
    if weight is None or weight.ndim != 4 or (op.input(2) is not None and bias is None) or a.prologue or a.epilogue:
        return None
    return None if a.auto_pad != "NOTSET" else (weight, bias)


def whole_weight(op: Op, weight: Array, context: PassContext) -> Array | Miss:
    """The weights of a grouped convolution as one group: zeros for the channels of other groups. Groups have several channels."""
    group, (filters, inside, *kernel) = op.attrs.group, weight.shape
    if group == 1:
        return weight
    if context.precision not in PRECISIONS:
        return Miss(f"it has groups of several channels, and products with zeros are not for {context.precision}")
    if filters * math.prod(kernel) > MOST_WORK or group * inside > MOST_CHANNELS:
        return Miss(
            "it has groups of several channels, and with zeros for the other groups it would take longer than the shuffle"
        )
    all_channels = np.zeros((group, filters // group, group, inside, *kernel), weight.dtype)
    for g in range(group):
        all_channels[g, :, g] = weight[g * (filters // group) : (g + 1) * (filters // group)]
    return all_channels.reshape(filters, group * inside, *kernel)


@rule("shuffle_into_weights", {"Conv"})
def shuffle_into_weights(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A convolution of a shuffled image reads the image before the shuffle, with its weights in another order.

    A convolution of few groups (ShuffleNet: Zhang et al., 2018) becomes one of all channels. A depthwise convolution moves in
    front of the shuffle if the convolution after it can then absorb the shuffle."""
    found = order_of(graph, op.inputs[0])
    if found is None:
        return None
    (source, order), constants = found, weights_of(graph, op)
    if constants is None:
        return Miss("its weights are not constant, or it has stages")
    weight, bias = constants
    back = np.argsort(order)
    if op.attrs.group > 1 and op.attrs.group == len(order) == len(weight):
        return _depthwise_first(graph, op, source, back, context)
    all_channels = whole_weight(op, weight, context)
    if isinstance(all_channels, Miss):
        return all_channels
    return Match((op,), lambda p: conv(p, source, all_channels[:, back], bias, replace(op.attrs, group=1)))


def _depthwise_first(graph: Graph, op: Op, source: Value, back: Array, context: PassContext) -> Match | None:
    """A depthwise convolution before the shuffle; None if no convolution follows that can absorb the shuffle."""
    constants, next_op = weights_of(graph, op), graph.sole_user(op.value)
    follows = None if next_op is None or next_op.kind != "Conv" else weights_of(graph, next_op)
    if constants is None or next_op is None or follows is None:
        return None
    if next_op.attrs.group == len(back) or isinstance(whole_weight(next_op, follows[0], context), Miss):
        return None
    weight, bias = constants
    shape, parts = op.outputs[0].type.static_shape, graph.type(operand(graph.op(operand(op)))).static_shape

    def build(patch: Patch) -> Value:
        y = conv(patch, source, weight[back], None if bias is None else bias[back], op.attrs)
        groups = reshaped(patch, y, (shape[0], parts[2], parts[1], *shape[2:]))
        turned = patch.add("Transpose", [groups], TransposeAttrs(perm=(0, 2, 1, 3, 4)))
        return reshaped(patch, turned, shape)

    return Match((op,), build)


@dataclass(frozen=True)
class Unit:
    """A unit of ShuffleNet V2: a Split or Slices divide ``image`` into the channels ``kept`` and ``changed``.

    ``steps``: the operators on the changed channels, first to last. ``first``: whether the Concat has the kept channels in
    front."""

    image: Value
    kept: range
    changed: range
    steps: tuple[Op, ...]
    first: bool


def unit_at(graph: Graph, op: Op) -> Unit | None:
    """The unit that ends in a Concat, or None."""
    if len(op.inputs) != 2 or len(op.outputs[0].type.dims) != 4 or normalize_axis(op.attrs.axis, 4) != 1:
        return None
    for first in (True, False):
        kept, value = (operand(op, 0), operand(op, 1)) if first else (operand(op, 1), operand(op, 0))
        steps = path_to(graph, value, ("Conv", "Relu"), alone=True)
        if not steps or graph.sole_user(value := operand(steps[-1])) is None or graph.sole_user(kept) is None:
            continue
        for parts in ((kept, value), (value, kept)):
            image = whole(graph, *parts, axis=-3)
            if image is not None and all(graph.type(v).is_static for v in parts):
                before, after = (graph.type(v).static_shape[1] for v in parts)
                ranges = dict(zip(parts, (range(before), range(before, before + after)), strict=True))
                return Unit(image, ranges[kept], ranges[value], tuple(reversed(steps)), first)
    return None


def center(op: Op, weight: Array) -> tuple[int, int] | None:
    """The tap that reads the pixel of the result's own position; None if the convolution has strides, or no such tap."""
    a = op.attrs
    at = tuple(pad // d for pad, d in zip(a.pads[:2], a.dilations, strict=True))
    fits = all(
        pad == t * d and t < k for pad, t, d, k in zip(a.pads[:2], at, a.dilations, weight.shape[2:], strict=True)
    )
    return (at[0], at[1]) if fits and set(a.strides) == {1} else None


@rule("whole_unit", {"Concat"})
def whole_unit(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Convolutions of some channels, concatenated with the other channels, become convolutions of all channels."""
    unit = unit_at(graph, op)
    if unit is None or order_of(graph, unit.image) is None:
        return None  # without a shuffle, the halves need no moves
    if context.precision not in PRECISIONS:
        return Miss(f"products with ones and zeros are not for {context.precision}")
    if len(unit.kept) + len(unit.changed) > MOST_CHANNELS:
        return Miss(f"it has more than {MOST_CHANNELS} channels")
    if any(s.kind == "Relu" for s in unit.steps) and not non_negative(graph, unit.image):
        return Miss("the kept values may be negative, and a Relu would change them")
    convolutions, size = list[tuple[Array, Array | None]](), graph.type(unit.image).dims[2:]
    for step in (s for s in unit.steps if s.kind == "Conv"):
        constants = weights_of(graph, step)
        if constants is None:
            return Miss("weights are not constant, or a convolution has stages")
        weight, bias = constants
        tap, depthwise = center(step, weight), step.attrs.group == weight.shape[0] and weight.shape[1] == 1
        plain = step.attrs.group == 1 or (depthwise and convolutions)
        if tap is None or step.outputs[0].type.dims[2:] != size or not plain:
            return Miss("a convolution changes the image's size, or has groups")
        convolutions.append(_whole(unit, weight, bias, tap, depthwise, not convolutions))
    if unit.steps[0].kind != "Conv":
        return Miss("the first operator on its channels is not a convolution")

    convolutions = _padded(convolutions)

    def build(patch: Patch) -> Value:
        y, following = unit.image, iter(convolutions)
        for step in unit.steps:
            if step.kind == "Relu":
                y = patch.add("Relu", [y], step.attrs)
                continue
            weight, bias = next(following)
            y = conv(patch, y, weight, bias, replace(step.attrs, group=1 if step.attrs.group == 1 else len(weight)))
        return y

    return Match((op, *unit.steps), build)


def _whole(
    unit: Unit, weight: Array, bias: Array | None, tap: tuple[int, int], depthwise: bool, first: bool
) -> tuple[Array, Array | None]:
    """The weights and the bias for all channels. ``first``: the convolution reads the image, in the image's order of channels."""
    count, kept = len(weight), len(unit.kept)
    stay = np.arange(kept) + (0 if unit.first else count)
    change = np.arange(count) + (kept if unit.first else 0)
    weights = np.zeros((kept + count, 1 if depthwise else kept + weight.shape[1], *weight.shape[2:]), weight.dtype)
    if depthwise:
        weights[change], weights[stay, 0, tap[0], tap[1]] = weight, 1
    else:
        inside = weight.shape[1]
        read = np.asarray(unit.changed) if first else np.arange(inside) + (kept if unit.first else 0)
        same = np.asarray(unit.kept) if first else np.arange(kept) + (0 if unit.first else inside)
        weights[np.ix_(change, read)], weights[stay, same, tap[0], tap[1]] = weight, 1
    if bias is None:
        return weights, None
    biases = np.zeros(kept + count, bias.dtype)
    biases[change] = bias
    return weights, biases


def _padded(convolutions: Sequence[tuple[Array, Array | None]]) -> list[tuple[Array, Array | None]]:
    """The weights and biases, padded by zeros to a multiple of eight channels between two convolutions."""
    found, inside = [], convolutions[0][0].shape[1]
    for i, (weight, bias) in enumerate(convolutions):
        more = 0 if i == len(convolutions) - 1 else -len(weight) % 8
        read = 0 if weight.shape[1] == 1 else inside - weight.shape[1]
        weight = np.pad(weight, ((0, more), (0, read), (0, 0), (0, 0)))
        found.append((weight, None if bias is None else np.pad(bias, (0, more))))
        inside = len(weight)
    return found


def conv(patch: Patch, x: Value, weight: Array, bias: Array | None, attrs: ConvAttrs) -> Value:
    """Add a convolution with constant weights and, if there is one, a constant bias."""
    constants: Sequence[Value] = [patch.constant(np.ascontiguousarray(weight), "weight")]
    if bias is not None:
        constants = [*constants, patch.constant(bias, "bias")]
    return patch.add("Conv", [x, *constants], attrs)


class ChannelShuffles(RulePass):
    name = "channel_shuffles"
    rules = (whole_unit, shuffle_into_weights)
