"""Weighted sums of sampled images become one op that stores no sample: deformable attention and deformable convolution.

Multi-scale deformable attention (Zhu et al., "Deformable DETR", 2021) samples the images of each level at a few positions per
query, concatenates the samples, multiplies them by weights and adds them. A deformable convolution (Dai et al., 2017; Zhu et al.,
2019) takes one sample per tap of its filter, multiplies it by a mask, and multiplies all samples by a matrix. As a separate op,
this product runs on tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.sampled_sum import MOST_IMAGES, SampledSumAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, integers, ints, operand, producer, reshaped, shape_of, sliced
from optdnn.passes.support.paths import path_to
from optdnn.passes.support.stacks import Part, part_of
from optdnn.types import Array, normalize_axis


@rule("sampled_sum", {"ReduceSum"})
def sampled_sum(graph: Graph, op: Op) -> Match | Miss | None:
    """``sum(concat(grid_sample(x, positions), …) * weights)`` over the points, the last axis."""
    shape, axes = shape_of(graph, operand(op)), ints(graph, op.input(1))
    if shape is None or len(shape) != 4 or axes is None or [normalize_axis(a, 4) for a in axes] != [3]:
        return None
    product = producer(graph, operand(op), {"Mul"}, alone=True)
    for samples, weights in _orders(operand(op), product):
        ops: list[Op] = []
        images = _samples(graph, samples, ops)
        if images is None:
            continue
        if len(images) > MOST_IMAGES:
            return Miss(f"it adds samples of {len(images)} images, more than {MOST_IMAGES}")
        if any(i.attrs != images[0].attrs for i in images):
            return Miss("its images are sampled in different ways")
        if weights is not None and (graph.type(weights).rank != 4 or graph.type(weights).dims[1] != 1):
            return Miss("its weights differ from channel to channel")
        types = [graph.type(operand(i)) for i in images]
        if any(t.dims[:2] != types[0].dims[:2] or t.dtype != types[0].dtype for t in types):
            return Miss("its images differ in their type or number of channels")
        a = images[0].attrs
        attrs = SampledSumAttrs(a.mode, a.padding_mode, a.align_corners)

        def build(
            patch: Patch,
            images: list[Op] = images,
            attrs: SampledSumAttrs = attrs,
            weights: Value | None = weights,
        ) -> Value:
            given: list[Value] = []
            for image in images:
                given += [operand(image), patch.add("Unsqueeze", [operand(image, 1), integers(patch, [1], "axes")])]
            y = patch.add("SampledSum", given if weights is None else [*given, weights], attrs)
            return patch.add("Unsqueeze", [y, integers(patch, [3], "axes")]) if op.attrs.keepdims else y

        return Match((op, *([] if product is None else [product]), *ops), build)
    return None


@dataclass(frozen=True)
class Heads:
    """The source [N, heads * C, …] of an image [N * heads, C, H, W]. ``part``: the pixels that the image takes of the ``pixels`` of
    the source (None: all of them)."""

    source: Value
    count: int
    part: Part | None
    pixels: int


@rule("sampled_heads", {"SampledSum"})
def sampled_heads(graph: Graph, op: Op) -> Match | None:
    """Images whose items are the heads of several pictures become images of the pictures, with a group of channels per head.

    Strides cannot join pictures and heads to one axis, so each operand would be copied."""
    types = [graph.type(v) for v in op.inputs if v is not None]
    if not all(t.is_static for t in types) or types[1].dims[1] != 1:
        return None
    images = [_heads(graph, operand(op, k)) for k in range(0, len(types) - 1, 2)]
    found = [h for h in images if h is not None]
    if len(found) < len(images) or len({h.count for h in found}) > 1:
        return None
    items, channels, heads = types[0].static_shape[0] // found[0].count, types[0].static_shape[1], found[0].count

    def build(patch: Patch) -> Value:
        given: list[Value] = []
        for k, h in enumerate(found):
            x, size, places = h.source, types[2 * k].static_shape[2:], types[2 * k + 1].static_shape
            if h.part is not None:
                x = reshaped(patch, x, (items, heads * channels, h.pixels))
                x = sliced(patch, x, h.part.start, h.part.start + h.part.size, 2)
            given.append(reshaped(patch, x, (items, heads * channels, *size)))
            given.append(reshaped(patch, operand(op, 2 * k + 1), (items, heads, *places[2:])))
        if len(types) % 2:
            lead = (1, 1) if types[-1].dims[0] == 1 else (items, heads)
            given.append(reshaped(patch, operand(op, len(types) - 1), (*lead, *types[-1].static_shape[2:])))
        return reshaped(patch, patch.add("SampledSum", given, op.attrs), op.outputs[0].type.static_shape)

    return Match((op,), build)


def _heads(graph: Graph, image: Value) -> Heads | None:
    """The source of an image of heads; None if its items are pictures, or heads of a single picture, which are a view."""
    view = producer(graph, image, {"Reshape"})
    if view is None or not graph.type(operand(view)).is_static:
        return None
    items, channels, *size = graph.type(image).static_shape
    part, pixels = part_of(graph, operand(view)), math.prod(size)
    joined = producer(graph, part.source, {"Reshape"}) if part is not None and part.axis == 2 else None
    if joined is not None and joined.outputs[0].type.dims[:2] == (items, channels):
        view, pixels = joined, joined.outputs[0].type.static_shape[2]
    else:
        part = None
    n, *rest = graph.type(operand(view)).static_shape
    if not 1 < n < items or items % n:
        return None
    heads = items // n
    apart = rest[:1] == [heads * channels] or rest[:2] == [heads, channels]
    return Heads(operand(view), heads, part, pixels) if apart else None


def _orders(value: Value, product: Op | None) -> list[tuple[Value, Value | None]]:
    """The possible pairs of samples and weights: the factors of the product in both orders, or the value without weights."""
    if product is None:
        return [(value, None)]
    a, b = operand(product), operand(product, 1)
    return [(a, b), (b, a)]


def _samples(graph: Graph, value: Value, ops: list[Op]) -> list[Op] | None:
    """The GridSamples with results [N, C, R, P] that ``value`` [N, C, R, points] concatenates; None for other values.

    Appends to ``ops`` the GridSamples and the operators that concatenate and reshape their results."""
    whole, found = shape_of(graph, value), list[Op]()
    ops += (views := path_to(graph, value, RESHAPES, alone=True))
    value = operand(views[-1]) if views else value
    joined = producer(graph, value, {"Concat"}, alone=True)
    if joined is not None:
        ops.append(joined)
    for part in [value] if joined is None else [v for v in joined.inputs if v is not None]:
        ops += (views := path_to(graph, part, RESHAPES, alone=True))
        sampled = producer(graph, operand(views[-1]) if views else part, {"GridSample"}, alone=True)
        if sampled is None or graph.type(sampled.value).rank != 4:
            return None
        found.append(sampled)
    ops += found
    sizes = [graph.type(s.value).dims for s in found]
    if whole is None or any(s[:3] != whole[:3] for s in sizes) or sum(s[3] for s in sizes) != whole[3]:
        return None
    return found if joined is None or _in_order(graph, joined, sizes) else None


def _in_order(graph: Graph, joined: Op, sizes: Sequence[Sequence[object]]) -> bool:
    """Whether samples [N, C, R, P] are concatenated along P, or along an axis of size 1 before it."""
    rank = graph.type(joined.value).rank or 0
    axis = normalize_axis(joined.attrs.axis, rank)
    parts = [graph.type(v).dims for v in joined.inputs if v is not None]
    if rank == 4:
        return axis == 3 and all(tuple(p) == tuple(s) for p, s in zip(parts, sizes, strict=True))
    return rank == 5 and axis == 3 and all(tuple(p) == (*s[:3], 1, s[3]) for p, s in zip(parts, sizes, strict=True))


@rule("deformed_columns", {"DeformConv"})
def deformed_columns(graph: Graph, op: Op) -> Match | Miss | None:
    """A deformable convolution becomes a SampledSum, whose result has a row of samples per pixel, and a product with a matrix."""
    a, weight = op.attrs, graph.constant_value(op.inputs[1])
    if any(v is not None and not graph.type(v).is_static for v in (*op.inputs, op.value)):
        return Miss("its sizes are not known when the network is built")
    if weight is None:
        return Miss("its weights are not constant")
    if a.group != 1:
        return Miss(f"it has {a.group} groups: each would be a product of its own")
    if min(graph.type(operand(op)).static_shape[2:]) < 2:
        return Miss("its image has only one row or column, so that positions cannot be scaled to the range -1 to 1")

    def build(patch: Patch) -> Value:
        columns = _columns(graph, patch, op, weight.shape[2:])
        matrix = weight.transpose(2, 3, 1, 0).reshape(-1, len(weight))
        y = patch.add("MatMul", [columns, patch.constant(matrix, "matrix")], MatMulAttrs())
        if op.input(3) is not None:
            y = patch.add("Add", [y, op.inputs[3]])
        n, channels, height, width = op.outputs[0].type.static_shape
        y = reshaped(patch, y, (n, height, width, channels))
        return patch.add("Transpose", [y], TransposeAttrs((0, 3, 1, 2)))

    return Match((op,), build)


def _columns(graph: Graph, patch: Patch, op: Op, kernel: Sequence[int]) -> Value:
    """The samples [N, pixels, taps * channels] of a deformable convolution."""
    n, channels = graph.type(operand(op)).static_shape[:2]
    pixels, taps, groups = (
        int(np.prod(op.outputs[0].type.static_shape[2:])),
        int(np.prod(kernel)),
        op.attrs.offset_group,
    )
    scale, base = _positions(graph, op, kernel)
    # An offset is (row, column), a position (x, y).
    offset = reshaped(patch, operand(op, 2), (n, groups, taps, 2, pixels))
    offset = patch.add("Transpose", [offset], TransposeAttrs((0, 1, 4, 2, 3)))
    offset = patch.add("Gather", [offset, integers(patch, [1, 0], "turned")], GatherAttrs(4))
    moved = patch.add("Mul", [offset, patch.constant(scale, "scale")])
    positions = patch.add("Add", [moved, patch.constant(base, "taps")])
    given = [operand(op), reshaped(patch, positions, (n, groups, pixels * taps, 1, 2))]
    if op.input(4) is not None:
        mask = reshaped(patch, operand(op, 4), (n, groups, taps, pixels))
        mask = patch.add("Transpose", [mask], TransposeAttrs((0, 1, 3, 2)))
        given.append(reshaped(patch, mask, (n, groups, pixels * taps, 1)))
    y = patch.add("SampledSum", given, SampledSumAttrs("linear", "zeros", align_corners=True))
    y = reshaped(patch, y, (n, groups, channels // groups, pixels, taps))
    y = patch.add("Transpose", [y], TransposeAttrs((0, 3, 4, 1, 2)))
    return reshaped(patch, y, (n, pixels, taps * channels))


def _positions(graph: Graph, op: Op, kernel: Sequence[int]) -> tuple[Array, Array]:
    """An offset of one pixel in sampling positions (x, y), and the positions [pixels, taps, 2] without offsets.

    A position is -1 at the first pixel and 1 at the last one. Both results have the offset's dtype."""
    a, dtype = op.attrs, graph.type(operand(op, 2)).dtype
    size, out = graph.type(operand(op)).static_shape[2:], op.outputs[0].type.static_shape[2:]
    lines = [
        np.arange(out[k])[:, None] * a.strides[k] + np.arange(kernel[k]) * a.dilations[k] - a.pads[k] for k in (0, 1)
    ]
    rows = np.broadcast_to(lines[0][:, None, :, None], (*out, *kernel))
    columns = np.broadcast_to(lines[1][None, :, None, :], (*out, *kernel))
    scale = 2.0 / (np.array([size[1], size[0]]) - 1)
    base = np.stack([columns, rows], -1).reshape(-1, int(np.prod(kernel)), 2) * scale - 1
    return scale.astype(dtype), base.astype(dtype)


class SampledSums(RulePass):
    name = "sampled_sums"
    rules = (sampled_sum, sampled_heads, deformed_columns)
