"""A convolution before a pixel shuffle orders its channels by pixel, so that the shuffle moves whole blocks of channels.

Super-resolution networks compute the pixels of a larger image as channels of a smaller one (Shi et al., 2016). PyTorch takes
channel ``c`` of pixel ``(i, j)`` of a block from channel ``(c * k + i) * k + j``: neighbors in memory become distant pixels.
This pass reorders the filters of the convolution by pixel first. Then the shuffle moves 16 bytes at a time.

Autoencoders write shuffles as Reshape and Transpose, and add the shuffled image before the convolution, with repeated channels
(HunyuanImage, as DC-AE: Chen et al., 2024). The sum is shuffled once, and the convolution's weights add the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import BlockAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.widths import has_stages_or_factors
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, producer
from optdnn.passes.support.paths import path_to, repeated
from optdnn.types import Array, DType


@rule("pixel_shuffle", {"DepthToSpace"})
def pixel_shuffle(graph: Graph, op: Op) -> Match | Miss | None:
    """A shuffle in PyTorch's order (mode CRD) after a convolution, with pointwise operators of one operand between them."""
    if op.attrs.mode != "CRD":
        return None
    between = path_to(graph, operand(op), lambda o: o.pointwise and len(o.inputs) == 1)
    conv = graph.op(operand(between[-1] if between else op))
    weight = graph.constant_value(conv.input(1)) if conv.kind == "Conv" else None
    if weight is None:
        return None
    if conv.attrs.group > 1:
        return Miss("the convolution before it has groups")
    if conv.input(2) is not None and graph.constant_value(conv.input(2)) is None:
        return Miss("the bias of the convolution before it is not constant")
    if has_stages_or_factors(conv):
        return Miss("the convolution before it has stages")
    if any(graph.sole_user(o.value) is None for o in (conv, *between)):
        return Miss("its channels are also read in their own order")
    if (other := _added_shuffle(graph, op)) is not None:
        return Miss(f"the sum of it and {other.name} is shuffled at once")
    return Match((op, *between, conv), lambda patch: _rewrite(patch, op, between, conv))


_WRITTEN = {(0, 3, 4, 1, 5, 2): ("DCR", 3), (0, 1, 4, 2, 5, 3): ("CRD", 1)}
"""Order of the axes between two Reshapes -> the mode of the shuffle, and the axis of the channels before it."""


@rule("written_shuffle", {"Reshape"})
def written_shuffle(graph: Graph, op: Op) -> Match | Miss | None:
    """Reshape, Transpose, Reshape of an image: a shuffle as autoencoders write it (HunyuanImage).

    Patches side by side (MobileViTv2) are no image: their pixels move with all of their channels (`moved_pixels`)."""
    found = _written(graph, op)
    if found is None:
        return None
    split, turn, attrs = found
    shape = _before(op, attrs)
    if graph.type(operand(split)).dims[-2:] != shape[-2:]:
        return Miss(f"its operand is no image of {shape[-2]} x {shape[-1]} pixels")

    def build(patch: Patch) -> Value:
        image = operand(split)
        image = image if patch.type(image).dims == shape else in_shape(patch, image, shape)
        return patch.add("DepthToSpace", [image], attrs)

    return Match((op, turn, split), build)


def _written(graph: Graph, op: Op) -> tuple[Op, Op, BlockAttrs] | None:
    """The Reshape and the Transpose before the Reshape ``op``, if all three are a shuffle, and its attributes."""
    turn = producer(graph, op.inputs[0], {"Transpose"}, alone=True) if op.kind == "Reshape" else None
    split = None if turn is None else producer(graph, turn.inputs[0], {"Reshape"}, alone=True)
    found = None if turn is None else _WRITTEN.get(tuple(turn.attrs.perm or ()))
    if turn is None or split is None or found is None:
        return None
    if not split.outputs[0].type.is_static or not op.outputs[0].type.is_static:
        return None
    dims, (mode, at) = split.outputs[0].type.static_shape, found
    size, other = (d for i, d in enumerate(dims[1:4], 1) if i != at)
    if size != other or size == 0:
        return None
    if op.outputs[0].type.static_shape != (dims[0], dims[at], dims[-2] * size, dims[-1] * size):
        return None
    return split, turn, BlockAttrs(size, mode)


def _before(op: Op, attrs: BlockAttrs) -> tuple[int, ...]:
    """The shape of the image whose pixels ``op`` shuffles."""
    (batch, channels, height, width), k = op.outputs[0].type.static_shape, attrs.blocksize
    return batch, channels * k * k, height // k, width // k


@rule("shuffled_sum", {"Add"})
def shuffled_sum(graph: Graph, op: Op) -> Match | None:
    """A sum of two shuffled images is the shuffled sum of both."""
    first, second = (producer(graph, v, {"DepthToSpace"}, alone=True) for v in op.inputs)
    if first is None or second is None or first is second or first.attrs != second.attrs:
        return None
    if graph.type(operand(first)) != graph.type(operand(second)):
        return None

    def build(patch: Patch) -> Value:
        total = patch.add("Add", [operand(first), operand(second)], op.attrs)
        return patch.add("DepthToSpace", [total], first.attrs)

    return Match((op, first, second), build)


def _rewrite(patch: Patch, op: Op, between: Sequence[Op], conv: Op) -> None:
    k = op.attrs.blocksize
    inputs = [*conv.inputs]
    for slot in (1, 2):
        known = patch.graph.constant_value(conv.input(slot))
        if known is not None:
            blocks = known.reshape(-1, k * k, *known.shape[1:])
            inputs[slot] = patch.constant(np.ascontiguousarray(blocks.swapaxes(0, 1)).reshape(known.shape), "by_pixels")
    value = repeated(patch, patch.add("Conv", inputs, conv.attrs, src=conv.src), between)
    patch.replace(op.value, patch.add("DepthToSpace", [value], replace(op.attrs, mode="DCR"), src=op.src))


def _added_shuffle(graph: Graph, op: Op) -> Op | None:
    """The other shuffle, if the only reader of a shuffled image adds an image that was shuffled alike."""
    add = graph.sole_user(op.value)
    if add is None or add.kind != "Add":
        return None
    other = graph.op(operand(add, 1 if add.inputs[0] == op.value else 0))
    written = _written(graph, other)
    attrs = other.attrs if other.kind == op.kind else None if written is None else written[2]
    alike = attrs == op.attrs and other.outputs[0].type == op.outputs[0].type
    return other if alike and graph.sole_user(other.value) is add else None


@rule("repeated_channels", {"Add"})
def repeated_channels(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution of ``x``, plus ``x`` with repeated channels, is one convolution: the weights at its center grow by one."""
    for slot, value in enumerate(op.inputs):
        conv = producer(graph, value, {"Conv"}, alone=True)
        found = None if conv is None else _repeated(graph, operand(op, 1 - slot))
        if conv is None or found is None or found[0] != conv.inputs[0]:
            continue
        weight, times, views = graph.constant_value(conv.inputs[1]), found[1], found[2]
        if weight is None or conv.attrs.group > 1 or has_stages_or_factors(conv) or not _keeps_pixels(conv, weight):
            return Miss(
                "its weights are not constant, or it has groups or stages, or its pixels are not those of its operand"
            )
        grown = weight.astype(np.float64)
        rows = np.arange(len(weight))
        grown[(rows, rows // times, *(d // 2 for d in weight.shape[2:]))] += 1

        def build(patch: Patch, conv: Op = conv, grown: Array = grown, dtype: DType = weight.dtype) -> Value:
            constant = patch.constant(grown.astype(dtype), graph.output(operand(conv, 1)).name)
            return patch.add("Conv", [conv.inputs[0], constant, *conv.inputs[2:]], conv.attrs)

        return Match((op, conv, *views), build)
    return None


def _repeated(graph: Graph, value: Value) -> tuple[Value, int, tuple[Op, ...]] | None:
    """The image each of whose channels a value repeats this many times in a row, and the operators that do so."""
    join = producer(graph, value, {"Reshape"}, alone=True)
    expand = None if join is None else producer(graph, join.inputs[0], {"Expand"}, alone=True)
    apart = None if expand is None else producer(graph, expand.inputs[0], RESHAPES, alone=True)
    if join is None or expand is None or apart is None:
        return None
    types = [graph.type(operand(apart)), *(o.outputs[0].type for o in (apart, expand, join))]
    if not all(t.is_static for t in types) or len(types[0].dims) != 4 or len(types[2].dims) != 5:
        return None
    image, one, many, joined = (t.static_shape for t in types)
    times = many[2]
    as_image = one == (*image[:2], 1, *image[2:]) and many == (*image[:2], times, *image[2:])
    if not as_image or joined != (image[0], image[1] * times, *image[2:]):
        return None
    return operand(apart), times, (join, expand, apart)


def _keeps_pixels(conv: Op, weight: Array) -> bool:
    """Whether each pixel of a convolution's result has the pixel of its operand at its center."""
    sizes, a = weight.shape[2:], conv.attrs
    around = tuple(d * (k - 1) // 2 for d, k in zip(a.dilations, sizes, strict=True))
    return all(k % 2 for k in sizes) and set(a.strides) == {1} and a.pads == (*around, *around)


class PixelShuffles(RulePass):
    name = "pixel_shuffles"
    rules = (written_shuffle, shuffled_sum, repeated_channels, pixel_shuffle)
