"""Patch embeddings become products of patches with a matrix, in the order in which their readers expect the patches.

A convolution whose stride is its kernel size multiplies patches that do not overlap (ViT: Dosovitskiy et al., 2020; Swin), also of
videos (ViViT, VideoMAE). Its readers want positions as rows and channels last; a convolution would compute another order, to be
copied. If the convolution pads the image (ViTPose), or if its last pixels are in no window, a Pad first changes the image to a
whole number of patches. If the patches are cut already, they become rows of a product for any readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs, resolved
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import PadAttrs
from optdnn.ops.quantized import QuantizedConvAttrs, RequantizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import (
    RESHAPES,
    channels_to_last,
    integers,
    operand,
    producer,
    reshape_target,
    reshaped,
    shape_of,
    sliced,
)
from optdnn.passes.support.products import multiplied
from optdnn.types import Array, Shape

LEAST = 32
"""Fewest elements of a patch (rows of the matrix) for which the product pays."""
FEW_CHANNELS = 16
"""Convolutions of 8-bit integers with fewer channels than this multiply zeros."""
IMAGES_AND_VIDEOS = (4, 5)
"""Ranks of filters."""


@rule("patch_rows", {"Conv"})
def patch_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """Conv, then a Transpose that moves the channels last, or Reshape to (B, C, positions) and Transpose(0, 2, 1)."""
    weight, a = graph.constant_value(op.input(1)), op.attrs
    if weight is None or weight.ndim not in IMAGES_AND_VIDEOS or a.group != 1:
        return None
    kernel = weight.shape[2:]
    plain = not a.prologue and not a.epilogue and a.auto_pad == "NOTSET"
    if tuple(a.strides) != kernel or any(d != 1 for d in a.dilations) or math.prod(kernel) == 1 or not plain:
        return None
    turns = _turned(graph, op)
    x = operand(op)
    before, after = shape_of(graph, x), None if turns is None else turns[-1].outputs[0].type.shape
    if turns is None or before is None or after is None:
        return None
    frame = _frame(before, weight, a.pads)
    if isinstance(frame, Miss):
        return frame
    framed, sizes, pads = frame
    bias = graph.constant_value(op.input(2))
    if op.input(2) is not None and bias is None:
        return Miss("its bias is not constant")
    targets = _targets(framed, sizes, (*after[:-1], weight[0].size))
    if targets is None:
        return Miss("no constant target can express how the image is cut")

    def build(patch: Patch) -> Value:
        return multiplied(patch, _rows(patch, _framed(patch, x, before, pads), *targets), _matrix(weight), bias)

    return Match((op, *turns), build, turns[-1].value)


@rule("cut_patches", {"Conv"})
def cut_patches(graph: Graph, op: Op) -> Match | Miss | None:
    """A Conv with a single window, the whole image, after a Reshape from rows to images: the patches are cut already.

    The vision transformers of Qwen have this form. Other images are stored in the order that convolutions read, and stay."""
    weight, a = graph.constant_value(op.input(1)), op.attrs
    if weight is None or a.group != 1 or weight.ndim < 3 or producer(graph, operand(op), RESHAPES) is None:
        return None
    plain = not a.prologue and not a.epilogue and not any(a.pads) and a.auto_pad == "NOTSET"
    before, after = shape_of(graph, operand(op)), op.outputs[0].type.shape
    if (
        not plain
        or any(d != 1 for d in a.dilations)
        or before is None
        or after is None
        or before[1:] != weight.shape[1:]
    ):
        return None
    rows, back = (before[0], weight[0].size), (before[0], len(weight))
    flat, whole = reshape_target(before, rows), reshape_target(back, after)
    if flat is None or whole is None:
        return Miss("no constant target can express its rows")

    def build(patch: Patch) -> Value:
        y = reshaped(patch, operand(op), flat)
        y = patch.add("MatMul", [y, patch.constant(_matrix(weight), "patches.weight")], MatMulAttrs())
        if op.input(2) is not None:
            y = patch.add("Add", [y, op.input(2)])
        return reshaped(patch, y, whole)

    return Match((op,), build)


@rule("integer_patch_rows", {"ConvInteger"})
def integer_patch_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """As ``patch_rows``, for a ConvInteger (dynamic quantization) with any readers: a Transpose after it moves the channels back.

    A Cast of the accumulators stays next to the product, so that no integers are stored."""
    weight, x = graph.constant_value(op.input(1)), operand(op)
    if weight is None or weight.ndim != 4:
        return None
    targets = _whole(graph, op, weight, resolved(op.attrs, graph.type(x), graph.type(operand(op, 1))))
    if targets is None or isinstance(targets, Miss):
        return targets

    cast = graph.sole_user(op.value)
    casts = [] if cast is None or cast.kind != "Cast" else [cast]

    def build(patch: Patch) -> Value:
        rows, matrix = _rows(patch, x, *targets), patch.constant(_matrix(weight), "patches.weight")
        y = patch.add("MatMulInteger", [rows, matrix, *op.inputs[2:]])
        for after in casts:
            y = patch.add("Cast", [y], after.attrs)
        return patch.add("Transpose", [y], TransposeAttrs((0, 3, 1, 2)))

    return Match((op, *casts), build, (casts[-1] if casts else op).value)


@rule("quantized_patch_rows", {"QuantizedConv"})
def quantized_patch_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """As ``patch_rows``, for a convolution of 8-bit integers with any readers: a Transpose after it moves the channels back.

    The kernels of convolutions read at least 16 channels of a pixel. Of an image with three, they would multiply mostly zeros."""
    weight, a = graph.constant_value(op.input(1)), op.attrs
    if weight is None or weight.ndim != 4 or weight.shape[1] >= FEW_CHANNELS:
        return None
    targets = _whole(graph, op, weight, a)
    if targets is None:
        return None
    if op.input(3) is not None:
        return Miss("it adds a tensor")
    if isinstance(targets, Miss):
        return targets

    rounds = producer(graph, operand(op), {"QuantizeLinear"})
    if rounds is not None and (
        graph.sole_user(rounds.value) != op or graph.type(operand(rounds, 1)).dims not in ((), (1,))
    ):
        rounds = None

    def build(patch: Patch) -> Value:
        rows = _rows(patch, operand(rounds or op), *targets, rounds)
        filters = patch.constant(weight.reshape(len(weight), -1), "patches.weight")
        attrs = RequantizeAttrs(**{f.name: getattr(a, f.name) for f in fields(RequantizeAttrs)})
        y = patch.add("QuantizedMatMul", [rows, filters, *op.inputs[2:]], attrs)
        return patch.add("Transpose", [y], TransposeAttrs((0, 3, 1, 2)))

    return Match((op,) if rounds is None else (op, rounds), build, op.value)


Targets = tuple[tuple[int, ...], tuple[int, ...]]
Sizes = tuple[int, ...]
"""Patches, and pixels per patch, along each axis in turn."""


def _whole(graph: Graph, op: Op, weight: Array, a: ConvAttrs | QuantizedConvAttrs) -> Targets | Miss | None:
    """How the image of a convolution of integers is cut into patches. ``a``: its geometry, without ``auto_pad``.

    None if its windows overlap or it pads; a Miss if the image cannot be cut."""
    before, kernel = shape_of(graph, operand(op)), weight.shape[2:]
    plain = a.group == 1 and not any(a.pads) and all(d == 1 for d in a.dilations)
    if before is None or not plain or tuple(a.strides) != kernel or math.prod(kernel) == 1:
        return None
    sizes = _cut(before, weight)
    if isinstance(sizes, Miss):
        return sizes
    targets = _targets(before, sizes, (before[0], *sizes[::2], weight[0].size))
    return Miss("no constant target can express how the image is cut") if targets is None else targets


def _frame(image: Shape, weight: Array, pads: Sequence[int]) -> tuple[Shape, Sizes, list[int]] | Miss:
    """The region that the convolution's windows cover: its shape, its division into patches, and the pads from the image to it.

    Negative pads crop. A Miss if the region cannot be cut."""
    half = len(pads) // 2
    before, after = (0, 0, *pads[:half]), [0, 0, *pads[half:]]
    dims = list(image)
    for axis, size in enumerate(weight.shape[2:], 2):
        whole = dims[axis]
        if isinstance(whole, int):
            rest = (whole + before[axis] + after[axis]) % size
            after[axis] -= rest
            dims[axis] = whole + before[axis] + after[axis]
    sizes = _cut(tuple(dims), weight)
    return sizes if isinstance(sizes, Miss) else (tuple(dims), sizes, [*before, *after])


def _framed(patch: Patch, x: Value, shape: Shape, pads: Sequence[int]) -> Value:
    """The region of an image of this shape that windows cover. If it is only cropped, Slices do it: the launch that cuts patches
    reads them in place."""
    if any(n > 0 for n in pads):
        return patch.add("Pad", [x, integers(patch, pads, "patches.pads")], PadAttrs())
    for axis, size in enumerate(shape):
        before, after = pads[axis], pads[axis + len(shape)]
        if (before or after) and isinstance(size, int):
            x = sliced(patch, x, -before, size + after, axis)
    return x


def _cut(image: Shape, weight: Array) -> Sizes | Miss:
    """The division of an image into patches of the filter's size, or a Miss with the reason."""
    sizes = list[int]()
    for whole, size in zip(image[2:], weight.shape[2:], strict=True):
        if not isinstance(whole, int) or whole % size:
            return Miss("its windows are not known to cover the image")
        sizes += [whole // size, size]
    if weight[0].size < LEAST:
        return Miss(f"a patch has {weight[0].size} elements, too few for a product")
    return tuple(sizes)


def _targets(image: Shape, sizes: Sizes, rows: Shape) -> Targets | None:
    """The targets of the two Reshapes around the Transpose that cuts an image into patches; None if one cannot be constant."""
    split = (*image[:2], *sizes)
    cut, joined = reshape_target(image, split), reshape_target(tuple(split[i] for i in _order(len(split))), rows)
    return None if cut is None or joined is None else (cut, joined)


def _order(rank: int) -> tuple[int, ...]:
    """Permutation of a cut image to batch, patches along each axis, channels, pixels along each axis."""
    return (0, *range(2, rank, 2), 1, *range(3, rank, 2))


def _rows(patch: Patch, x: Value, cut: tuple[int, ...], joined: tuple[int, ...], rounds: Op | None = None) -> Value:
    """The patches of an image as rows. One launch cuts them and rounds them as the QuantizeLinear ``rounds`` does."""
    y = patch.add("Transpose", [reshaped(patch, x, cut)], TransposeAttrs(_order(len(cut))))
    if rounds is not None:
        y = patch.add("QuantizeLinear", [y, *rounds.inputs[1:]], rounds.attrs)
    return reshaped(patch, y, joined)


def _matrix(weight: Array) -> Array:
    return np.ascontiguousarray(weight.reshape(len(weight), -1).T)


def _turned(graph: Graph, conv: Op) -> list[Op] | None:
    """The ops after a convolution that put its channels last, each the sole user of the one before."""
    last, result = graph.sole_user(conv.value), conv.outputs[0].type.shape
    if last is None or last.kind not in RESHAPES:
        perm = None if result is None else channels_to_last(len(result))
        return [last] if last is not None and last.kind == "Transpose" and last.attrs.perm == perm else None
    shape = last.outputs[0].type.shape
    if shape is None or result is None or len(shape) != 3 or shape[:2] != result[:2]:
        return None
    turn = graph.sole_user(last.value)
    return [last, turn] if turn is not None and turn.kind == "Transpose" and turn.attrs.perm == (0, 2, 1) else None


class PatchEmbedding(RulePass):
    name = "patch_rows"
    rules = (patch_rows, cut_patches, integer_patch_rows)
