"""Convolutions do not compute what a Slice or a Gather of their result would cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import ints, operand, producer, reshape_target, reshaped, shape_of, slice_limits
from optdnn.types import normalize_axis


def _crop(graph: Graph, op: Op, kind: str) -> tuple[Op, tuple[int, ...], tuple[int, ...]] | Miss | None:
    """The convolution (of this kind) before a Slice, and the pixels that are cut off at the begin and the end of each axis."""
    conv = producer(graph, op.inputs[0], {kind})
    limits = slice_limits(graph, op)
    full = None if conv is None else shape_of(graph, conv.value)
    if conv is None or full is None or limits is None or any(step != 1 for *_, step in limits):
        return None
    begins, after = [0] * len(full), [0] * len(full)
    for axis, start, end, _ in limits:
        size = full[axis]
        if not isinstance(size, int):
            return Miss(f"{conv.name} has a symbolic size")
        first, last, _ = slice(start, end).indices(size)
        begins[axis], after[axis] = first, size - max(first, last)
    return _croppable(graph, conv, begins, after)


def _croppable(
    graph: Graph, conv: Op, begins: Sequence[int], after: Sequence[int]
) -> tuple[Op, tuple[int, ...], tuple[int, ...]] | Miss:
    """The convolution, and what is cut off at the begin and the end of each spatial axis."""
    full = conv.outputs[0].type.dims
    if graph.sole_user(conv.value) is None:
        return Miss(f"the result of {conv.name} is used {graph.use_count(conv.value)} times")
    if any(begins[:2]) or any(after[:2]):
        return Miss("it cuts off images or channels")
    a = conv.attrs
    if a.auto_pad != "NOTSET" or getattr(a, "output_shape", None) or a.prologue or a.epilogue:
        return Miss(f"the pads of {conv.name} follow from its result, or it has stages")
    if any(b + e >= n for b, e, n in zip(begins, after, full, strict=True) if isinstance(n, int)):
        return Miss("it cuts off everything")
    return conv, tuple(begins[2:]), tuple(after[2:])


@rule("crop_transpose", {"Slice"})
def crop_transpose(graph: Graph, op: Op) -> Match | Miss | None:
    """A transposed convolution absorbs a crop of its result into its pads (causal decoders, BigVGAN)."""
    found = _crop(graph, op, "ConvTranspose")
    if found is None or isinstance(found, Miss):
        return found
    conv, begins, after = found
    attrs = replace(conv.attrs, pads=tuple(p + c for p, c in zip(conv.attrs.pads, (*begins, *after), strict=True)))
    return Match((op, conv), lambda patch: patch.add("ConvTranspose", conv.inputs, attrs))


@rule("crop_conv", {"Slice"})
def crop_conv(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution with less padding does not compute what a Slice would cut off. Causal convolutions are padded on both sides,
    and lose the end (TCN: Bai et al., 2018; Mamba: Gu and Dao, 2023). Separable ones lose it after their convolution of points
    (Phi-4's audio encoder)."""
    if set(ints(graph, op.input(3)) or ()) <= {0, 1}:  # a part of the channels
        return None
    found = _crop(graph, op, "Conv")
    if found is None or isinstance(found, Miss):
        return found
    conv, begins, after = found
    points: list[Op] = []
    while _of_points(graph, conv) and (before := producer(graph, conv.inputs[0], {"Conv"})) is not None:
        points.append(conv)
        earlier = _croppable(graph, before, (0, 0, *begins), (0, 0, *after))
        if isinstance(earlier, Miss):
            return earlier
        conv = before
    attrs = _less_padded(graph, conv, begins, after)
    if attrs is None or isinstance(attrs, Miss):
        return attrs
    return Match((op, *points, conv), partial(_with, conv, attrs, points))


def _of_points(graph: Graph, conv: Op) -> bool:
    """Whether each position of a convolution's result reads that position of its operand alone."""
    taps = shape_of(graph, operand(conv, 1))
    return taps is not None and {*taps[2:], *conv.attrs.strides} == {1} and not any(conv.attrs.pads)


def _with(conv: Op, attrs: ConvAttrs, points: Sequence[Op], patch: Patch) -> Value:
    """The convolution with other attributes, and the convolutions of points that read it (the last one first)."""
    value = patch.add("Conv", conv.inputs, attrs)
    for op in reversed(points):
        value = patch.add("Conv", (value, *op.inputs[1:]), op.attrs)
    return value


@rule("pixel_of_conv", {"Gather"})
def pixel_of_conv(graph: Graph, op: Op) -> Match | Miss | None:
    """One position of a convolution's result is all that is computed, if less padding cuts off the others. A step of a network with
    a state in a cache pads as it does for whole sequences (Mamba: Gu and Dao, 2023)."""
    conv, index, shape = producer(graph, op.inputs[0], {"Conv"}), ints(graph, op.input(1)), shape_of(graph, op.input(0))
    after = op.outputs[0].type.shape
    if conv is None or index is None or len(index) != 1 or shape is None or after is None:
        return None
    axis = normalize_axis(op.attrs.axis, len(shape))
    size = shape[axis]
    target = reshape_target((*shape[:axis], 1, *shape[axis + 1 :]), after)
    if axis < 2 or not isinstance(size, int) or target is None:
        return None
    at = index[0] % size
    found = _croppable(graph, conv, *([n if i == axis else 0 for i in range(len(shape))] for n in (at, size - 1 - at)))
    attrs = found if isinstance(found, Miss) else _less_padded(graph, *found)
    if attrs is None or isinstance(attrs, Miss):
        return attrs

    def build(patch: Patch) -> Value:
        y = _with(conv, attrs, (), patch)
        return y if patch.type(y).dims == after else reshaped(patch, y, target)

    return Match((op, conv), build)


def _less_padded(graph: Graph, conv: Op, begins: Sequence[int], after: Sequence[int]) -> ConvAttrs | Miss | None:
    """The attributes with which a convolution does not compute what is cut off; None if nothing is."""
    a, rank = conv.attrs, len(begins)
    taps, sizes = shape_of(graph, operand(conv, 1)), shape_of(graph, operand(conv))
    if taps is None or sizes is None or not any((*begins, *after)):
        return None
    pads = [0] * (2 * rank)
    for k in range(rank):
        size, out, count = sizes[2 + k], conv.outputs[0].type.dims[2 + k], taps[2 + k]
        if not (begins[k] or after[k]):
            pads[k], pads[rank + k] = a.pads[k], a.pads[rank + k]
            continue
        if not isinstance(size, int) or not isinstance(out, int) or not isinstance(count, int):
            return Miss(f"{conv.name} has a symbolic size")
        pads[k] = a.pads[k] - begins[k] * a.strides[k]
        read = (out - begins[k] - after[k] - 1) * a.strides[k] + (count - 1) * a.dilations[k] + 1 - pads[k]
        pads[rank + k] = max(0, read - size)
        if pads[k] < 0 or size - read >= a.strides[k]:
            return Miss(f"without padding, {conv.name} would still compute what it cuts off")
    made: ConvAttrs = replace(a, pads=tuple(pads))
    return made
