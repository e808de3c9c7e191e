"""A convolution of an image whose blocks of pixels have become channels is a convolution of the image itself, with a stride.

Networks halve an image without losing a pixel: a block of 2 x 2 pixels becomes four times the channels, and a convolution follows
(diffusion's U-Nets with ``Rearrange``; real-time super-resolution with ``PixelUnshuffle``; the Focus layer of YOLOv5). The move
costs a launch or two, and reads and writes the whole image. Filters that are a block wider for each tap, with the block's sides as
strides, multiply the same pixels with the same weights.

Exporters write the move as SpaceToDepth, as Reshape, Transpose and Reshape, or as slices of every other pixel and their Concat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import resolved
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import operand, producer, shape_of, slice_limits
from optdnn.types import Array, normalize_axis

RANKS = (3, 4, 5)
"""Of images of one, two and three axes."""
WALKED = 8
"""The longest stride that kernels walk in."""
FEW = 32
"""Filters of several taps that read fewer channels stay in fp32: their kernels are faster with more channels and fewer taps."""


@dataclass(frozen=True)
class _Unshuffled:
    """An ``image`` of ``channels`` whose pixels became channels too; ``block`` has the sides of a block. ``places``: for each
    channel of the result, which one it is in (channels of the image, pixels of a block)."""

    image: Value
    channels: int
    block: tuple[int, ...]
    places: Array
    ops: tuple[Op, ...]


def _of_op(graph: Graph, op: Op) -> _Unshuffled | None:
    """A SpaceToDepth: mode CRD has the pixels of a channel next to one another, DCR the channels of a pixel."""
    side, channels = op.attrs.blocksize, graph.type(operand(op)).dims[1]
    if not isinstance(channels, int):
        return None
    places = np.arange(channels * side * side)
    if op.attrs.mode == "DCR":
        places = places.reshape(channels, -1).T.reshape(-1)
    return _Unshuffled(operand(op), channels, (side, side), places, (op,))


def _of_views(graph: Graph, op: Op) -> _Unshuffled | None:
    """A Reshape that cuts the sides of an image, a Transpose, and a Reshape that joins the pixels of a block with the channels."""
    turn = producer(graph, operand(op), {"Transpose"}, alone=True)
    cut = None if turn is None else producer(graph, operand(turn), {"Reshape"}, alone=True)
    if turn is None or cut is None or not turn.attrs.perm or shape_of(graph, operand(cut)) is None:
        return None
    (n, channels, *sides), parts = graph.type(operand(cut)).dims, cut.outputs[0].type.dims
    block, blocks, inner, at = [], [], [1], 2
    if parts[:2] != (n, channels) or not isinstance(channels, int):
        return None
    for side in sides:
        whole, size = parts[at] if at < len(parts) else 0, parts[at + 1] if at + 1 < len(parts) else 0
        blocks.append(at)
        block.append(1)
        if whole != side:
            if not isinstance(size, int) or size < 2 or whole * size != side:
                return None
            block[-1] = size
            inner.append(at + 1)
        at = blocks[-1] + 1 + (whole != side)
    perm = tuple(turn.attrs.perm)
    moved, result = perm[1 : 1 + len(inner)], (n, channels * math.prod(block), *(parts[axis] for axis in blocks))
    if (
        at != len(parts)
        or perm != (0, *moved, *blocks)
        or set(moved) != set(inner)
        or op.outputs[0].type.dims != result
    ):
        return None
    counts = [channels, *(size for size in block if size > 1)]
    places = np.arange(math.prod(counts)).reshape(counts).transpose([inner.index(axis) for axis in moved])
    return _Unshuffled(operand(cut), channels, tuple(block), places.reshape(-1), (op, turn, cut))


def _of_slices(graph: Graph, op: Op) -> _Unshuffled | None:
    """A Concat along the channels of slices that take one pixel of each block."""
    if normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)) != 1:
        return None
    image, block, firsts, ops = None, None, [], [op]
    for value in op.inputs:
        strides, first = [1] * len(op.outputs[0].type.dims), [0] * len(op.outputs[0].type.dims)
        while value is not None and (part := producer(graph, value, {"Slice"})) is not None:
            dims = graph.type(operand(part)).dims
            for axis, begin, end, step in slice_limits(graph, part) or [(0, 0, 0, 0)]:
                size = dims[axis]
                if axis < 2 or not isinstance(size, int) or size < 1 or step < 1 or strides[axis] != 1 or size % step:
                    return None
                taken = range(*slice(begin, end, step).indices(size))
                if len(taken) != size // step:
                    return None
                strides[axis], first[axis] = step, taken[0]
            ops.append(part)
            value = operand(part)
        if value is None or (image or value) != value or (block or strides) != strides:
            return None
        image, block = value, strides
        firsts.append(np.ravel_multi_index(first[2:], block[2:]))
    channels = None if image is None else graph.type(image).dims[1]
    if image is None or block is None or not isinstance(channels, int):
        return None
    pixels = math.prod(block)
    if sorted(firsts) != list(range(pixels)):
        return None
    places = np.concatenate([np.arange(channels) * pixels + first for first in firsts])
    return _Unshuffled(image, channels, tuple(block[2:]), places, tuple(dict.fromkeys(ops)))


FORMS = {"SpaceToDepth": _of_op, "Reshape": _of_views, "Concat": _of_slices}


def _filters(weight: Array, found: _Unshuffled) -> Array:
    """Filters (outputs, channels of blocks, taps…) as filters (outputs, channels of the image, taps times sides of a block…)."""
    outputs, _, *taps = weight.shape
    moved = np.empty_like(weight)
    moved[:, found.places] = weight
    split = moved.reshape(outputs, found.channels, *found.block, *taps)
    rank = len(taps)
    axes = [axis for k in range(rank) for axis in (2 + rank + k, 2 + k)]
    sides = [n * side for n, side in zip(taps, found.block, strict=True)]
    return np.ascontiguousarray(split.transpose(0, 1, *axes)).reshape(outputs, found.channels, *sides)


@rule("unshuffled_convolution", {"Conv"})
def unshuffled_convolution(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``conv(unshuffle(x))`` with constant weights, where all readers of the moved pixels are convolutions."""
    weight, source = graph.constant_value(op.input(1)), graph.op(operand(op))
    if weight is None or weight.ndim not in RANKS or source.kind not in FORMS:
        return None
    found = FORMS[source.kind](graph, source)
    if found is None or math.prod(found.block) == 1:
        return None
    if op.attrs.group != 1 or op.attrs.prologue or op.attrs.epilogue:
        return Miss(f"{op.name} has groups, or stages")
    if any(user.kind != "Conv" for user in graph.users(operand(op))):
        return Miss(f"others than convolutions read {source.name}")
    a = resolved(op.attrs, graph.type(operand(op)), graph.type(operand(op, 1)))
    taps = weight.shape[2:]
    if a.auto_pad != "NOTSET" or any(n > 1 and d > 1 for n, d in zip(taps, a.dilations, strict=True)):
        return Miss(f"{op.name} has dilations, or its padding is not known")
    strides = tuple(n * side for n, side in zip(a.strides, found.block, strict=True))
    if max(strides) > WALKED:
        return Miss(f"the stride would be {max(strides)} (at most {WALKED})")
    filters = _filters(weight, found)
    if context.only_precision == "fp32" and math.prod(taps) > 1 and found.channels < FEW:
        return Miss(f"filters of {found.channels} channels would have {math.prod(filters.shape[2:])} taps in fp32")
    pads = tuple(n * side for n, side in zip(a.pads, found.block * 2, strict=True))
    geometry = replace(a, strides=strides, pads=pads, dilations=(1,) * len(taps))

    def build(patch: Patch) -> Value:
        return patch.add("Conv", [found.image, patch.constant(filters, "filters"), *op.inputs[2:]], geometry)

    return Match((op, *found.ops), build)


class UnshuffledConvolutions(RulePass):
    name = "unshuffled_convolutions"
    rules = (unshuffled_convolution,)
