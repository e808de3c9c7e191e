"""Filters that resample images become depthwise convolutions with a stride, and transposed ones.

StyleGAN (Karras et al., 2020 and 2021) and score-based models (NCSN++: Song et al., 2021) filter each channel before they drop
pixels, and after they insert zeros between pixels ("upfirdn"). PyTorch writes this with views: zeros are a Pad of an axis of one
element, channels may be images of one channel, and dropped pixels are a Slice with a step. A filter over inserted zeros is a
transposed convolution with the filter turned by 180 degrees, which reads no zeros. A filter whose result is sliced is a
convolution with a stride. An average pool of repeated edges is such a filter, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import FEW_TAPS, ConvAttrs, ConvTransposeAttrs
from optdnn.ops.index import PadAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.widths import has_stages_or_factors
from optdnn.passes.support.facts import RESHAPES, in_shape, integers, ints, operand, producer, sizes_of, zeros_around
from optdnn.types import Array, is_float, normalize_axis

IMAGE = 4
"""Axes of a batch of images."""


@dataclass(frozen=True)
class _Source:
    """Images ``value`` [B, C, H, W] that are spread (``factors`` of zeros inserted) and then padded before a filter reads them.

    Pairs are (vertical, horizontal). ``begins`` and ``ends`` count zeros around the spread images.
    """

    value: Value
    factors: tuple[int, int] = (1, 1)
    begins: tuple[int, int] = (0, 0)
    ends: tuple[int, int] = (0, 0)
    ops: tuple[Op, ...] = ()


def _planes(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(planes, height, width): the last two axes of more than one element are the image. Equal triples are the same planes."""
    wide = [n for n in shape if n != 1]
    return None if len(wide) < 2 or 0 in wide else (math.prod(wide[:-2]), wide[-2], wide[-1])


def _trace(graph: Graph, value: Value) -> _Source | None:
    """The images [B, C, H, W] that ``value`` is made of by views, padding and inserted zeros; None if there are none."""
    found: _Source | None = _Source(value)
    best = None
    while found is not None:
        shape = sizes_of(graph, found.value)
        if shape is not None and _are_images(shape):
            best = found
        elif not found.ops:
            return None
        found = _before(graph, found)
    return best


def _are_images(shape: tuple[int, ...]) -> bool:
    """Whether [B, C, H, W] are B x C planes of more than one row and column."""
    return len(shape) == IMAGE and _planes(shape) == (shape[0] * shape[1], *shape[2:])


def _before(graph: Graph, found: _Source) -> _Source | None:
    """``found``, traced back by one view, padding, or insertion of zeros."""
    op = graph.op(found.value)
    after = sizes_of(graph, found.value)
    planes = None if after is None else _planes(after)
    before = sizes_of(graph, operand(op)) if op.kind in RESHAPES or op.kind == "Pad" else None
    if planes is None or before is None:
        return None
    if op.kind == "Pad":
        pads = _zeros_around(graph, op)
        if pads is None or found.factors != (1, 1):
            return None
        image = [i for i, n in enumerate(before) if n != 1][-2:]
        if len(image) < 2 or any(sum(p) for i, p in enumerate(pads) if i not in image):
            return None
        (y, x), b, e = image, found.begins, found.ends
        begins, ends = (b[0] + pads[y][0], b[1] + pads[x][0]), (e[0] + pads[y][1], e[1] + pads[x][1])
        return replace(found, value=operand(op), begins=begins, ends=ends, ops=(*found.ops, op))
    if _planes(before) == planes:
        return replace(found, value=operand(op), ops=(*found.ops, op))
    return _inserted(graph, found, op, before, planes)


def _inserted(
    graph: Graph, found: _Source, op: Op, before: tuple[int, ...], planes: tuple[int, int, int]
) -> _Source | None:
    """``op`` joins the axes of pixels [..., H, k, W, l] whose zeros a Pad has added to axes of one element."""
    pad = producer(graph, operand(op), {"Pad"}, alone=True)
    shape = None if pad is None else sizes_of(graph, operand(pad))
    pads = None if pad is None or shape is None else _zeros_around(graph, pad)
    if pad is None or shape is None or pads is None or found.factors != (1, 1):
        return None
    added = [i for i, p in enumerate(pads) if any(p)]
    image = [i for i, n in enumerate(shape) if n != 1][-2:]
    if len(image) < 2 or any(shape[i] != 1 or pads[i][0] for i in added):
        return None
    factors = [1, 1]
    for i in added:
        axis = next((k for k, at in reversed([*enumerate(image)]) if at < i), None)
        if axis is None or any(n != 1 for n in before[image[axis] + 1 : i]):
            return None
        factors[axis] = before[i]
    height, width = (shape[i] * f for i, f in zip(image, factors, strict=True))
    if planes != (math.prod(shape) // shape[image[0]] // shape[image[1]], height, width):
        return None
    return replace(found, value=operand(pad), factors=(factors[0], factors[1]), ops=(*found.ops, op, pad))


def _zeros_around(graph: Graph, op: Op) -> list[tuple[int, int]] | None:
    """The numbers of zeros (before, after) that a Pad adds to each axis; None for other Pads."""
    zeros = zeros_around(graph, op)
    return None if zeros is None else list(zip(zeros[: len(zeros) // 2], zeros[len(zeros) // 2 :], strict=True))


@rule("resampling_filter", {"Conv"})
def resampling_filter(graph: Graph, op: Op) -> Match | Miss | None:
    """One filter for all planes, or one for each channel, over views, padding and inserted zeros of images."""
    weight, shape = graph.constant_value(op.input(1)), sizes_of(graph, operand(op))
    if weight is None or shape is None or weight.ndim != IMAGE or weight.shape[1] != 1 or has_stages_or_factors(op):
        return None
    a = op.attrs
    one = a.group == 1 and weight.shape[0] == 1 and shape[0] > 1
    if not one and not a.group == shape[1] == weight.shape[0]:
        return None
    source = _trace(graph, operand(op))
    if source is None or not source.ops:
        return None
    batch, channels, *_ = graph.type(source.value).static_shape
    if not one and (batch, channels) != shape[:2]:
        return None
    if source.factors == (1, 1) and (not one or channels == 1):
        return None
    if op.input(2) is not None or set(a.dilations) != {1} or a.auto_pad != "NOTSET":
        return Miss("its filter has a bias or dilations, or pads that are not written out")
    if source.factors != (1, 1) and set(a.strides) != {1}:
        return Miss("it drops pixels of images with inserted zeros")
    if any(graph.sole_user(o.value) is None for o in source.ops):
        return Miss("the images with inserted zeros or padding are also read by others")
    begins = [p + n for p, n in zip(a.pads[:2], source.begins, strict=True)]
    pads = (*begins, *(p + n for p, n in zip(a.pads[2:], source.ends, strict=True)))
    size, k = weight.shape[2:], source.factors
    if k != (1, 1) and all(size[i] == 1 for i in (0, 1) if k[i] > 1):
        return None
    if k != (1, 1) and any(max(pads[i::2]) >= size[i] for i in (0, 1) if k[i] == 1 or size[i] > 1):
        return Miss("its padding is wider than its filter")
    filters = np.repeat(weight, channels, axis=0) if one else weight

    def build(patch: Patch) -> Value:
        y = _filtered(patch, op, source, filters, pads, channels)
        return in_shape(patch, y, op.outputs[0].type.static_shape, op.src)

    return Match((op, *source.ops), build)


def _filtered(patch: Patch, op: Op, source: _Source, filters: Array, pads: tuple[int, ...], channels: int) -> Value:
    """The filtered images [B, C, H', W']. Axes that the filter does not reach get their zeros afterwards."""
    size, k = filters.shape[2:], source.factors
    if k == (1, 1):
        weight = patch.constant(np.ascontiguousarray(filters), "filters")
        return patch.add("Conv", [source.value, weight], replace(op.attrs, pads=pads, group=channels))
    late = [k[i] > 1 and size[i] == 1 for i in (0, 1)]
    begins = [0 if late[i] else size[i] - 1 - pads[i] for i in (0, 1)]
    ends = [0 if late[i] else size[i] - k[i] - pads[2 + i] for i in (0, 1)]
    attrs = ConvTransposeAttrs(
        (1 if late[0] else k[0], 1 if late[1] else k[1]),
        (*(max(p, 0) for p in begins), *(max(p, 0) for p in ends)),
        (1, 1),
        (max(-ends[0], 0), max(-ends[1], 0)),
        channels,
    )
    weight = patch.constant(np.ascontiguousarray(filters[:, :, ::-1, ::-1]), "filters")
    y = patch.add("ConvTranspose", [source.value, weight], attrs)
    for i in (0, 1):
        if late[i]:
            y = _spread(patch, y, 2 + i, k[i], (pads[i], pads[2 + i]), op.src)
    return y


def _spread(patch: Patch, x: Value, axis: int, factor: int, around: tuple[int, int], src: frozenset[str]) -> Value:
    """``factor - 1`` zeros after each element of ``axis``, and zeros around all."""
    shape = patch.type(x).static_shape
    zeros = [0] * (len(shape) + 1)
    y = in_shape(patch, x, (*shape[: axis + 1], 1, *shape[axis + 1 :]), src)
    y = patch.add(
        "Pad",
        [y, integers(patch, [*zeros, *zeros[: axis + 1], factor - 1, *zeros[axis + 2 :]], "pads")],
        PadAttrs(),
        src=src,
    )
    y = in_shape(patch, y, (*shape[:axis], shape[axis] * factor, *shape[axis + 1 :]), src)
    if not any(around):
        return y
    (begin, end), zeros = around, [0] * len(shape)
    pads = [*zeros[:axis], begin, *zeros[axis + 1 :], *zeros[:axis], end, *zeros[axis + 1 :]]
    return patch.add("Pad", [y, integers(patch, pads, "pads")], PadAttrs(), src=src)


@rule("sliced_filter", {"Slice"})
def sliced_filter(graph: Graph, op: Op) -> Match | Miss | None:
    """A Slice with a step after a depthwise convolution, and possibly views, is a stride of the convolution."""
    starts, axes, steps = (ints(graph, op.input(i)) for i in (1, 3, 4))
    shape, after = sizes_of(graph, operand(op)), sizes_of(graph, op.value)
    if starts is None or axes is None or steps is None or shape is None or after is None:
        return None
    if len(axes) != 1 or starts[0] != 0 or steps[0] < 2 or 0 in after:
        return None
    axis, value, views = normalize_axis(axes[0], len(shape)), operand(op), list[Op]()
    while (view := producer(graph, value, RESHAPES)) is not None:
        before = sizes_of(graph, operand(view))
        if before is None or _planes(before) != _planes(shape):
            return None
        views.append(view)
        value = operand(view)
    conv = producer(graph, value, {"Conv"})
    made = None if conv is None else sizes_of(graph, conv.value)
    if conv is None or made is None or conv.attrs.group != made[1] or has_stages_or_factors(conv):
        return None
    image = [i for i, n in enumerate(shape) if n != 1][-2:]
    if axis not in image or not _are_images(made) or after[axis] != -(-shape[axis] // steps[0]):
        return None
    if any(graph.sole_user(o.value) is None for o in (conv, *views)):
        return Miss("the pixels that it drops are also read by others")
    strides = list(conv.attrs.strides)
    strides[image.index(axis)] *= steps[0]

    def build(patch: Patch) -> Value:
        y = patch.add("Conv", conv.inputs, replace(conv.attrs, strides=tuple(strides)), src=conv.src)
        return in_shape(patch, y, after, op.src.union(*(view.src for view in views)))

    return Match((op, *views, conv), build)


@rule("blurred_edges", {"AveragePool"})
def blurred_edges(graph: Graph, op: Op) -> Match | Miss | None:
    """A small average pool of an image whose edges a Pad repeats is a depthwise convolution, whose kernel repeats the edges itself.

    Pixel shuffles of fast.ai's U-Nets have this blur after them."""
    pad, a = producer(graph, operand(op), {"Pad"}), op.attrs
    shape, dtype = sizes_of(graph, operand(op)), op.outputs[0].type.dtype
    if pad is None or pad.attrs.mode != "edge" or shape is None or not _are_images(shape) or not is_float(dtype):
        return None
    if graph.sole_user(pad.value) is None:
        return Miss("the image with repeated edges is also read by others")
    if a.auto_pad != "NOTSET" or a.ceil_mode or (any(a.pads) and not a.count_include_pad):
        return Miss("it divides by a number that depends on the position, or its pads are not written out")
    if (taps := math.prod(a.kernel_shape)) > FEW_TAPS:
        return Miss(f"its windows have {taps} pixels, more than {FEW_TAPS}")
    channels = shape[1]
    mean = np.full((channels, 1, *a.kernel_shape), 1 / taps, dtype)

    def build(patch: Patch) -> Value:
        attrs = ConvAttrs(a.strides, a.pads, a.dilations, channels)
        return patch.add("Conv", [operand(op), patch.constant(mean, "mean")], attrs)

    return Match((op,), build)


class ResamplingFilters(RulePass):
    name = "resampling_filters"
    rules = (resampling_filter, sliced_filter, blurred_edges)
