"""SampledSum: weighted sums of image values sampled between pixels (multi-scale deformable attention, deformed columns)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.dim import DimLike
from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Call, Cost, Result
from optdnn.ops.checks import agree, elements, extent, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export
from optdnn.types import TensorType, broadcast_dims, is_float

MOST_IMAGES = 8
"""The most images of a sum."""


@dataclass(frozen=True)
class SampledSumAttrs(Attrs):
    """``y[n, c, r]`` is the sum, over images and their points ``p``, of the image's value at ``places[n, r, p]`` times a weight.

    Operands: images [N, C, H, W], each followed by its places [N * groups, R, P, 2], then optional weights, which broadcast to
    [N * groups, 1, R, number of all points]. Images may differ in height and width, places in P. The result is
    [N * groups, C / groups, R], of the images' type. A place is a position as in GridSample; ``mode``, ``padding_mode`` and
    ``align_corners`` are GridSample's, too. With ``groups``, each group of channels has its own places.
    """

    mode: str = "linear"
    padding_mode: str = "zeros"
    align_corners: bool = False
    groups: int = 1


def _images(given: Sequence[Any]) -> int:
    """The number of images among the operands."""
    return len(given) // 2


def _infer(call: Call) -> Result:
    a, x = call.attrs, call.type(0)
    if len(call.types) < 2 or not is_float(x.dtype):
        raise ShapeError(f"SampledSum of {x} at {len(call.types) // 2} tensors of places")
    if a.mode not in ("linear", "nearest", "cubic") or a.padding_mode not in ("zeros", "border", "reflection"):
        raise ShapeError(f"SampledSum mode {a.mode!r} with padding {a.padding_mode!r}")
    first = call.type(1)
    points: DimLike = 0
    for k in range(_images(call.types)):
        image, places = call.type(2 * k), call.type(2 * k + 1)
        require_rank(image, 4, f"SampledSum image {k}")
        require_rank(places, 4, f"SampledSum places {k}")
        if image.dtype != x.dtype or image.dims[:2] != x.dims[:2]:
            raise ShapeError(f"image {k} of a SampledSum is {image}, the first one {x}")
        agree(places.dims[0], image.dims[0] * a.groups, f"SampledSum places {places} for {image} in {a.groups} groups")
        agree(places.dims[1], first.dims[1], f"SampledSum places {places} and {first}")
        agree(places.dims[3], 2, f"SampledSum places {places} need two coordinates")
        points = points + places.dims[2]
    if isinstance(x.dims[1], int) and x.dims[1] % a.groups:
        raise ShapeError(f"SampledSum: {a.groups} groups do not divide {x.dims[1]} channels")
    batch, rows = x.dims[0] * a.groups, first.dims[1]
    if len(call.types) % 2:
        weights, whole = call.type(len(call.types) - 1), (batch, 1, rows, points)
        if weights.rank != 4 or broadcast_dims(weights.dims, whole) != whole:
            raise ShapeError(f"SampledSum weights {weights} are no factors of {points} points of {rows} results")
    return Result((x.with_shape((batch, x.dims[1] // a.groups, rows)),))


def _cost(call: Call, result: Result) -> Cost:
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[call.attrs.mode] ** 2
    points = sum(extent(call.type(2 * k + 1).dims[2]) for k in range(_images(call.types)))
    return Cost(2 * taps * points * elements(result.types[0]))


def _export(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """A GridSample of each image, concatenated, multiplied by the weights and summed."""
    found: list[str] = []
    for k in range(_images(inputs)):
        image, t = inputs[2 * k], e.type(inputs[2 * k])
        if attrs.groups > 1:
            n, c, *size = t.static_shape
            shape = np.array([n * attrs.groups, c // attrs.groups, *size], np.int64)
            (image,) = e.node("Reshape", [image, e.const(shape)], 1)
            e.declare(image, TensorType(t.dtype, tuple(shape.tolist())))
        plain = {"mode": attrs.mode, "padding_mode": attrs.padding_mode, "align_corners": int(attrs.align_corners)}
        found += e.node("GridSample", [image, inputs[2 * k + 1]], 1, **plain)
    (y,) = e.node("Concat", found, 1, axis=3)
    if len(inputs) % 2:
        (y,) = e.node("Mul", [y, inputs[-1]], 1)
    return e.node("ReduceSum", [y, e.const(np.array([3], np.int64))], 1, keepdims=0)


DEFS: tuple[OpDef, ...] = (OpDef("SampledSum", _infer, SampledSumAttrs, {}, _export, cost=_cost),)
