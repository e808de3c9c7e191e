"""The largest element of each channel of a resized image, as PyTorch's Keypoint R-CNN finds it in each iteration of a loop.

large = Resize(image, sizes)        (C, 1, height, width)
place = ArgMax(Reshape(large, [C, -1]))
x, y = place % width, place / width
score = Gather(Gather(large, y), x)[c, c, c]   for each channel c
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.resized_peaks import COORDINATES, MODES, ResizedPeaksAttrs
from optdnn.passes.support.facts import ints, is_filled, operand, producer
from optdnn.types import normalize_axis


@dataclass(frozen=True)
class Peaks:
    """``place`` has the positions of the largest elements of ``image``, resized to ``sizes``: one or two values, which hold the
    height, then the width. ``extents``: scalars with the height (0) or width (1). ``elements``: vectors with the largest
    elements."""

    place: Value
    image: Value
    sizes: tuple[Value, ...]
    attrs: ResizedPeaksAttrs
    extents: dict[Value, int]
    elements: tuple[Value, ...]


def peaks_of(body: Graph) -> Iterator[Peaks]:
    """All of them in a graph."""
    for op in body.of_kind("ArgMax"):
        if (found := _peaks(body, op)) is not None:
            yield found


def _peaks(body: Graph, arg: Op) -> Peaks | None:
    rows = body.type(operand(arg))
    plain = rows.rank == 2 and normalize_axis(arg.attrs.axis, 2) == 1 and not arg.attrs.keepdims
    flat = producer(body, arg.inputs[0], {"Reshape"})
    if not plain or arg.attrs.select_last_index or flat is None:
        return None
    resize = next(
        (r for v in (operand(flat), body.op(operand(flat)).input(0)) if (r := producer(body, v, {"Resize"}))), None
    )
    sizes = None if resize is None else _sizes(body, resize)
    if resize is None or sizes is None:
        return None
    image, a = operand(resize), resize.attrs
    views = [resize.value, *_without_unit_axis(body, resize)]
    if operand(flat) not in views:
        return None
    channels = math.prod(body.type(image).static_shape[:2])
    if rows.dims[0] != channels or a.mode not in MODES or a.coordinate_transformation_mode not in COORDINATES:
        return None
    if a.antialias or a.exclude_outside or a.axes is not None or a.keep_aspect_ratio_policy != "stretch":
        return None
    extents = {v: k for view in views for v, k in _extents(body, view)}
    elements = tuple(_elements(body, views, arg.value, channels, extents))
    attrs = ResizedPeaksAttrs(a.mode, a.coordinate_transformation_mode, a.cubic_coeff_a)
    return Peaks(arg.value, image, sizes, attrs, extents, elements)


def _without_unit_axis(body: Graph, resize: Op) -> Iterator[Value]:
    """The resized image without its leading axis of one element."""
    dims = body.type(operand(resize)).static_shape
    for op in body.users(resize.value):
        first = op.kind == "Gather" and is_filled(body.known(op.inputs[1]), 0) and not body.type(operand(op, 1)).dims
        axes = (op.attrs.axis,) if first else ints(body, op.input(1)) if op.kind == "Squeeze" else None
        dropped = [normalize_axis(k, len(dims)) for k in axes or ()]
        if len(dropped) == 1 and dropped[0] <= 1 and dims[dropped[0]] == 1:
            yield op.value


def _sizes(body: Graph, resize: Op) -> tuple[Value, ...] | None:
    """The values with the computed height and width of a Resize of an image (C, 1, H, W) or (1, C, H, W)."""
    joined = producer(body, resize.input(3), {"Concat"})
    image = body.type(operand(resize))
    if joined is None or image.rank != 4 or not image.is_static or 1 not in image.static_shape[:2]:
        return None
    kept, parts = list(image.static_shape[:2]), [v for v in joined.inputs if v is not None]
    while kept and parts and (known := body.constant_value(parts[0])) is not None:
        if kept[: known.size] != known.reshape(-1).tolist():
            return None
        kept, parts = kept[known.size :], parts[1:]
    lengths = [body.type(v).dims for v in parts]
    return tuple(parts) if not kept and lengths in ([(2,)], [(1,), (1,)]) else None


def _extents(body: Graph, view: Value) -> Iterator[tuple[Value, int]]:
    """The scalars with the height (0) or width (1) of a resized image."""
    rank = len(body.type(view).dims)
    for shape in body.users(view):
        if shape.kind != "Shape" or shape.attrs.start or shape.attrs.end is not None:
            continue
        for taken in body.users(shape.value):
            which = body.constant_value(taken.inputs[1]) if taken.kind == "Gather" else None
            if which is not None and not which.ndim and (k := normalize_axis(int(which), rank) - rank + 2) >= 0:
                yield taken.value, k


def _elements(
    body: Graph, views: Sequence[Value], place: Value, channels: int, extents: dict[Value, int]
) -> Iterator[Value]:
    """The values with the largest elements: of rows and columns that are looked up for all channels, those of the own channel."""
    own = tuple(c * (channels * channels + channels + 1) for c in range(channels))
    for taken in body.of_kind("Gather"):
        flat = producer(body, taken.inputs[0], {"Reshape"})
        columns = None if flat is None else producer(body, flat.inputs[0], {"Gather"})
        rows = None if columns is None else producer(body, columns.inputs[0], {"Gather"})
        if flat is None or columns is None or rows is None or rows.inputs[0] not in views:
            continue
        ranks = [len(body.type(v).dims) for v in (flat.value, operand(rows))]
        if ranks != [1, 3] or not _takes(rows, 1) or not _takes(columns, 2) or ints(body, taken.inputs[1]) != own:
            continue
        if _is_row(body, rows.inputs[1], place, extents) and _is_column(body, columns.inputs[1], place, extents):
            yield taken.value


def _takes(gather: Op, axis: int) -> bool:
    return normalize_axis(gather.attrs.axis, 3) == axis


def _uncast(body: Graph, value: Value | None) -> Value | None:
    """A value before conversions, also to fp32 and back: rows and columns are small integers."""
    while (cast := producer(body, value, {"Cast", "Identity"})) is not None:
        value = cast.inputs[0]
    return value


def _is_column(body: Graph, value: Value | None, place: Value, extents: dict[Value, int]) -> bool:
    """Whether a value is the column of each place: its remainder of the width."""
    op = producer(body, _uncast(body, value), {"Mod"})
    return op is not None and op.inputs[0] == place and _is_width(body, op.inputs[1], extents)


def _is_row(body: Graph, value: Value | None, place: Value, extents: dict[Value, int]) -> bool:
    """Whether a value is the row of each place: its quotient by the width, perhaps without the remainder."""
    op = producer(body, _uncast(body, value), {"Div"})
    if op is None or not _is_width(body, op.inputs[1], extents) or body.type(op.value).dtype.kind not in "iu":
        return False
    whole = producer(body, op.inputs[0], {"Sub"})
    return op.inputs[0] == place or (
        whole is not None and whole.inputs[0] == place and _is_column(body, whole.inputs[1], place, extents)
    )


def _is_width(body: Graph, value: Value | None, extents: dict[Value, int]) -> bool:
    found = _uncast(body, value)
    return found is not None and extents.get(found) == 1
