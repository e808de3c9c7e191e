"""A Loop that resizes pictures and pastes each into an empty canvas becomes two products per picture.

Mask R-CNN of torchvision pastes the mask of each detection at its box. An exported iteration has some 70 operators, with sizes that
depend on data, and takes the CPU nearly a millisecond. Linear interpolation is a product with a matrix of weights along each axis:

    canvas = weights_y @ picture @ weights_x^T        (weights_y: canvas rows x picture rows)

The weight of a pixel is ``max(0, 1 - distance)`` from the place that is sampled; it is 0 for rows outside of the pasted part. So
all iterations are a few operators with known sizes per picture. Infinities or NaN in a picture make its whole canvas NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import integers, ints, is_filled, operand, producer
from optdnn.passes.support.scalars import Scalar, Scalars
from optdnn.passes.unroll import goes_on
from optdnn.types import FP32, DType, normalize_axis

SAMPLED = ("half_pixel", "pytorch_half_pixel")
"""Coordinates of a Resize that the rule computes."""


@dataclass(frozen=True)
class _Axis:
    """One axis of a canvas of ``size`` pixels. Rows ``begin`` to ``end`` of the picture, resized to ``resized`` rows, are pasted
    from row ``at`` on."""

    size: int
    resized: Scalar
    begin: Scalar
    end: Scalar
    at: Scalar


@rule("pasted_picture", {"Loop"})
def pasted_picture(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop whose iterations append a canvas with one resized picture."""
    body = op.attrs.body.graph
    grown = _grown(body) if op.attrs.carried == 1 and len(op.outputs) == 1 else None
    pasted = None if grown is None else _pasted(body, grown)
    if pasted is None:
        return None
    picture, resize, parts = pasted
    if not goes_on(body):
        return Miss("a condition that it computes may end it")
    if (
        resize.attrs.mode != "linear"
        or resize.attrs.antialias
        or resize.attrs.coordinate_transformation_mode not in SAMPLED
    ):
        return Miss("it does not resize by plain linear interpolation")
    scalars = Scalars(graph, op)
    sizes, *made = [scalars.of(v) or [] for v in parts]
    source = scalars.rows_of(picture)
    if source is None or not sizes or any(len(m) != 1 for m in made) or not scalars.all_rows():
        return Miss("its sizes are not simple functions of rows that the iterations take in turn")
    initial = graph.type(operand(op, 2)).shape
    if initial is None or initial[0] != 0 or not all(isinstance(d, int) for d in initial):
        return Miss("its result does not begin empty")
    if len(sizes) != 4 or sizes[:2] != [1, 1]:
        return Miss("it resizes more than one picture")
    axes = [
        _Axis(int(initial[1 + k]), sizes[2 + k], *(m[0] for m in made[3 * k : 3 * k + 3]))  # type: ignore[arg-type]
        for k in range(2)
    ]
    pixels = body.type(picture).static_shape[-2:]
    if graph.type(source).dims[1:] not in (pixels, (1, *pixels)):
        return Miss("its pictures are not in rows of one value")

    def build(patch: Patch) -> Value:
        dtype = graph.type(source).dtype
        wide = dtype if dtype.itemsize > FP32.itemsize else FP32
        rows, columns = (_weights(patch, scalars, a, n, resize, wide) for a, n in zip(axes, pixels, strict=True))
        several = graph.type(source).dims
        pictures = patch.add("Squeeze", [source, integers(patch, [1], "axes")]) if len(several) == 4 else source
        rows, columns = (v if dtype == wide else patch.add("Cast", [v], CastAttrs(dtype)) for v in (rows, columns))
        across = patch.add("Transpose", [columns], TransposeAttrs((0, 2, 1)))
        return patch.add("MatMul", [patch.add("MatMul", [rows, pictures], MatMulAttrs()), across], MatMulAttrs())

    return Match((op,), build)


def _grown(body: Graph) -> Value | None:
    """What an iteration appends to the only value that it hands on, along the first axis; None if it does something else."""
    joined = producer(body, body.op(body.outputs[1]).inputs[0], {"Concat"})
    if joined is None or len(joined.inputs) != 2 or normalize_axis(joined.attrs.axis, 3):
        return None
    carried = Value(body.inputs[2])
    one = producer(body, joined.inputs[1], {"Unsqueeze"})
    alone = joined.inputs[0] == carried and len(body.uses(carried)) == 1
    return one.inputs[0] if alone and one is not None and ints(body, one.input(1)) == (0,) else None


def _pasted(body: Graph, canvas: Value) -> tuple[Value, Op, list[Value]] | None:
    """The picture of an iteration, its Resize, and the values with: the size; begin, end and place along y; the same along x."""
    found: list[Value] = []
    value: Value | None = canvas
    for axis in (1, 0):
        inside = _cut(body, value, axis)
        joined = None if inside is None or not _whole(body, inside) else producer(body, inside.inputs[0], {"Concat"})
        if joined is None or len(joined.inputs) != 3 or normalize_axis(joined.attrs.axis, 2) != axis:
            return None
        before, value, after = (operand(joined, k) for k in range(3))
        pads = [_length(body, v, axis) for v in (before, after)]
        if any(p is None for p in pads):
            return None
        found.insert(0, pads[0])  # type: ignore[arg-type]
    bounds: list[list[Value]] = []
    for axis in (1, 0):
        cut = _cut(body, value, axis)
        if cut is None:
            return None
        bounds.insert(0, [operand(cut, 1), operand(cut, 2)])
        value = cut.inputs[0]
    for _ in range(2):
        first = producer(body, value, {"Gather", "Squeeze"})
        value = first.inputs[0] if first is not None and _takes_the_only(body, first) else value
    resize = producer(body, value, {"Resize"})
    if (
        resize is None
        or resize.input(3) is None
        or resize.attrs.axes
        or resize.attrs.keep_aspect_ratio_policy != "stretch"
    ):
        return None
    picture, shape = resize.inputs[0], body.type(operand(resize)).shape
    if (
        picture is None
        or shape is None
        or len(shape) != 4
        or shape[:2] != (1, 1)
        or not all(isinstance(d, int) for d in shape)
    ):
        return None
    return picture, resize, [operand(resize, 3), *bounds[0], found[0], *bounds[1], found[1]]


def _cut(body: Graph, value: Value | None, axis: int) -> Op | None:
    """The Slice by steps of 1 along ``axis`` of a picture that computes a value, or None."""
    cut = producer(body, value, {"Slice"})
    if cut is None or ints(body, cut.input(3)) is None:
        return None
    steps = (1,) if cut.input(4) is None else ints(body, cut.input(4))
    return cut if [normalize_axis(a, 2) for a in ints(body, cut.input(3)) or ()] == [axis] and steps == (1,) else None


def _whole(body: Graph, cut: Op) -> bool:
    """Whether a Slice begins at 0: it takes the canvas from what may be larger."""
    return ints(body, cut.input(1)) == (0,)


def _length(body: Graph, value: Value, axis: int) -> Value | None:
    """The value with the number of rows (``axis`` 0) or columns of a block of zeros; None for other values."""
    block = producer(body, value, {"ConstantOfShape"})
    shape = None if block is None or block.attrs.value != 0 else producer(body, block.inputs[0], {"Concat"})
    return shape.inputs[axis] if shape is not None and len(shape.inputs) == 2 else None


def _takes_the_only(body: Graph, op: Op) -> bool:
    """Whether an operator removes a leading axis of size 1."""
    if op.kind == "Gather":
        return normalize_axis(op.attrs.axis, 4) == 0 and is_filled(body.known(op.inputs[1]), 0)
    axes = ints(body, op.input(1))
    return axes is not None and set(axes) <= {0, 1}


# ---------------------------------------------------------------- the new operators


def _weights(patch: Patch, scalars: Scalars, axis: _Axis, pixels: int, resize: Op, dtype: DType) -> Value:
    """Weights [iterations, canvas, picture] of a picture with ``pixels`` along an axis, computed in ``dtype``."""
    one, half, nothing, last, count = (patch.constant(np.array(v, dtype), "") for v in (1, 0.5, 0, pixels - 1, pixels))
    at, size = (scalars.value(patch, v, dtype) for v in (axis.at, axis.resized))
    begin, end = (_inside(patch, scalars.value(patch, v, dtype), size, nothing) for v in (axis.begin, axis.end))
    places = patch.constant(np.arange(axis.size, dtype=dtype)[None], "places")
    inner = patch.add("Add", [patch.add("Sub", [places, at]), begin])  # rows of the resized picture
    inside = patch.add("And", [
        patch.add("GreaterOrEqual", [places, at]), patch.add("Less", [inner, end]),
    ])  # fmt: skip
    sampled = patch.add(
        "Sub", [patch.add("Div", [patch.add("Mul", [patch.add("Add", [inner, half]), count]), size]), half]
    )
    if resize.attrs.coordinate_transformation_mode == "pytorch_half_pixel":
        sampled = patch.add("Where", [patch.add("Greater", [size, one]), sampled, nothing])
    sampled = patch.add("Min", [patch.add("Max", [sampled, nothing]), last])
    column = patch.add("Unsqueeze", [sampled, integers(patch, [2], "axes")])
    own = patch.constant(np.arange(pixels, dtype=dtype), "pixel")
    far = patch.add("Abs", [patch.add("Sub", [column, own])])
    weights = patch.add("Max", [patch.add("Sub", [one, far]), nothing])
    return patch.add("Where", [patch.add("Unsqueeze", [inside, integers(patch, [2], "axes")]), weights, nothing])


def _inside(patch: Patch, bound: Value, size: Value, zero: Value) -> Value:
    """A bound of a Slice of ``size`` rows: a negative one counts from the end."""
    from_end = patch.add("Where", [patch.add("Less", [bound, zero]), patch.add("Add", [bound, size]), bound])
    return patch.add("Min", [patch.add("Max", [from_end, zero]), size])


class PastedPictures(RulePass):
    name = "pasted_pictures"
    rules = (pasted_picture,)
