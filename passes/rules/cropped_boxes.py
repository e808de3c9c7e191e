"""Crops of boxes that tf2onnx resizes one by one in a loop become one RoiAlign.

TensorFlow's ``crop_and_resize`` (Faster R-CNN and Mask R-CNN of its Object Detection API) samples each box of an image at the
points of a grid from its first to its last corner. RoiAlign with one sample per bin takes the middle of each bin. So its regions
begin and end half a step outside of the corners. Points outside of the image get the extrapolation value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.detect import RoiAlignAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.bag_bodies import VIEWS, value_outside
from optdnn.passes.support.facts import (
    channels_from_last,
    channels_to_last,
    integers,
    ints,
    operand,
    producer,
    reshaped,
    sliced,
)
from optdnn.passes.support.paths import value_before
from optdnn.passes.support.scalars import as_many_as_rows
from optdnn.passes.unroll import goes_on
from optdnn.types import INT64, Array

LAST, FIRST = channels_to_last(4), channels_from_last(4)


@dataclass(frozen=True)
class Crops:
    """Images (batch, height, width, channels), boxes (n, 4) from 0 to 1, the image of each box, and the size of crops."""

    images: Value
    boxes: Value
    batch: Value
    height: int
    width: int
    attrs: ResizeAttrs


@rule("cropped_boxes", {"Loop"})
def cropped_boxes(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop that crops the box of its iteration from the image of its iteration, and resizes it."""
    crops = _crops(op)
    if crops is None:
        return None
    image, a = graph.type(crops.images), crops.attrs
    if a.mode != "linear" or a.antialias or a.exclude_outside or a.axes is not None:
        return Miss(f"it resizes its crops with mode {a.mode!r}; only 'linear' without antialiasing is one launch")
    if not all(isinstance(n, int) for n in image.dims[1:3]):
        return Miss("the size of its images is not known")
    if not as_many_as_rows(graph, op, [crops.boxes, crops.batch]):
        return Miss("its iterations are not as many as the boxes")
    return Match((op,), lambda patch: _aligned(patch, crops))


def _aligned(patch: Patch, crops: Crops) -> Value:
    image = patch.type(crops.images)
    sizes = [
        (n, out) for n, out in zip(image.dims[1:3], (crops.height, crops.width), strict=True) if isinstance(n, int)
    ]
    (rows, height), (columns, width) = sizes
    dtype = patch.type(crops.boxes).dtype
    axes, low, high, half = _lines(sizes)
    terms: list[Value] = []
    for k, factors in enumerate((low, high)):
        chosen = integers(patch, [2 * k + axis for axis in axes], "columns")
        corner = patch.add("Gather", [crops.boxes, chosen], GatherAttrs(1))
        terms.append(patch.add("Mul", [corner, patch.constant(factors.astype(dtype), "factors")]))
    lines = patch.add("Add", [patch.add("Add", terms), patch.constant(half.astype(dtype), "half")])

    def inside(begin: int, count: int, size: int, shape: tuple[int, ...]) -> Value:
        at = reshaped(patch, sliced(patch, lines, begin, begin + count, 1), shape)
        low, high = (patch.constant(np.array(n, dtype), "edge") for n in (0, size - 1))
        return patch.add("And", [patch.add("GreaterOrEqual", [at, low]), patch.add("LessOrEqual", [at, high])])

    batch = patch.add("Cast", [crops.batch], CastAttrs(INT64))
    first = patch.add("Transpose", [crops.images], TransposeAttrs(FIRST))
    found = patch.add("RoiAlign", [first, sliced(patch, lines, 0, 4, 1), batch], RoiAlignAttrs(height, width, 1))
    within = patch.add(
        "And", [inside(4, height, rows, (0, 1, height, 1)), inside(4 + height, width, columns, (0, 1, 1, width))]
    )
    beyond = patch.constant(np.array(crops.attrs.extrapolation_value, image.dtype), "beyond")
    return patch.add("Transpose", [patch.add("Where", [within, found, beyond])], TransposeAttrs(LAST))


def _lines(sizes: list[tuple[int, int]]) -> tuple[list[int], Array, Array, Array]:
    """How corners (y1, x1, y2, x2) give regions (x1, y1, x2, y2), positions of rows, and positions of columns.

    Of each result the axis, the factors of the first and the last corner, and a number to add. ``sizes``: of an image and a crop.
    """
    parts = [np.arange(out) / (out - 1) if out > 1 else np.full(1, 0.5) for _, out in sizes]
    steps = [1 / (out - 1) if out > 1 else 0.0 for _, out in sizes]
    ends = [[part[0] - step / 2, part[-1] + step / 2] for part, step in zip(parts, steps, strict=True)]
    at = np.concatenate([[ends[1][0], ends[0][0], ends[1][1], ends[0][1]], *parts])
    axes = [1, 0, 1, 0, *(axis for axis, (_, out) in enumerate(sizes) for _ in range(out))]
    length = np.array([size - 1 for size, _ in sizes])[axes]
    return axes, (1 - at) * length, at * length, np.where(np.arange(len(at)) < 4, 0.5, 0.0)


def _crops(op: Op) -> Crops | None:
    """The crops that a Loop computes; None for other loops."""
    body: Graph = op.attrs.body.graph
    if op.attrs.carried or len(body.outputs) != 2 or not goes_on(body):
        return None
    squeeze = producer(body, body.op(body.outputs[1]).inputs[0], {"Squeeze"})
    last = None if squeeze is None else producer(body, operand(squeeze), {"Transpose"})
    resize = None if last is None else producer(body, operand(last), {"Resize"})
    if squeeze is None or last is None or resize is None or ints(body, squeeze.input(1)) != (0,):
        return None
    a, first = resize.attrs, producer(body, operand(resize), {"Transpose"})
    cut = None if first is None else producer(body, operand(first), {"Slice"})
    if first is None or cut is None or (first.attrs.perm, last.attrs.perm) != (FIRST, LAST):
        return None
    before, after = body.type(operand(resize)).dims, body.type(resize.value).dims
    if a.coordinate_transformation_mode != "tf_crop_and_resize" or before[:2] != after[:2] or resize.input(3) is None:
        return None
    images, number = value_outside(op, operand(cut)), operand(cut, 1)
    batch = _row(op, number)
    boxes = _corners(op, operand(resize, 1))
    height, width = after[2:]
    if images is None or batch is None or boxes is None or not _one_row(body, cut, number):
        return None
    if not isinstance(height, int) or not isinstance(width, int):
        return None
    return Crops(images, boxes, batch, height, width, a)


def _corners(op: Op, region: Value) -> Value | None:
    """The boxes outside of the loop, if ``region`` is the iteration's box, with whole axes for batch and channels."""
    body: Graph = op.attrs.body.graph
    parts = _parts(body, region)
    if len(parts) != 4:
        return None
    low, high = (body.constant_value(parts[k]) for k in (0, 2))
    cuts = [producer(body, parts[k], {"Slice"}) for k in (1, 3)]
    if low is None or high is None or low.tolist() != [0, 0] or high.tolist() != [1, 1]:
        return None
    limits = [None if c is None else (ints(body, c.inputs[1]), ints(body, c.inputs[2])) for c in cuts]
    if limits != [((0,), (2,)), ((2,), (4,))]:
        return None
    boxes = {_row(op, value_before(body, operand(c), VIEWS)) for c in cuts if c is not None}
    return boxes.pop() if len(boxes) == 1 else None


def _parts(body: Graph, value: Value) -> list[Value]:
    """The operands of nested Concats of vectors."""
    join = producer(body, value, {"Concat"})
    return [value] if join is None else [part for v in join.inputs if v is not None for part in _parts(body, v)]


def _row(op: Op, value: Value) -> Value | None:
    """The value outside of the loop whose row an iteration takes as ``value``."""
    body: Graph = op.attrs.body.graph
    cut = producer(body, value, {"Slice"})
    if cut is None or not _one_row(body, cut, Value(body.inputs[0])):
        return None
    return value_outside(op, operand(cut))


def _one_row(body: Graph, cut: Op, number: Value) -> bool:
    """Whether a Slice takes the row ``number`` along the first axis."""
    if any(v is not None and ints(body, v) != only for v, only in ((cut.input(3), (0,)), (cut.input(4), (1,)))):
        return False
    following = producer(body, operand(cut, 2), {"Add"})
    if following is None or value_before(body, operand(cut, 1), VIEWS) != number:
        return False
    sides = [value_before(body, operand(following, slot), VIEWS) for slot in (0, 1)]
    return number in sides and any(ints(body, v) == (1,) for v in sides)
