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
    """``y[n, c, r]`` is the sum, over images and their points ``p``, of the image's value at ``places[n, g, r, p]`` times a weight.
    The channels are divided into groups of neighbors (heads of attention); channel ``c`` is in group ``g``.

    Operands: images [N, C, H, W], each followed by its places [N, groups, R, P, 2], then optional weights, which broadcast to
    [N, groups, R, number of all points]. Images may differ in height and width, places in P. The result is [N, C, R], of the
    images' type. A place is a position as in GridSample; ``mode``, ``padding_mode`` and ``align_corners`` are GridSample's, too.
    """

    mode: str = "linear"
    padding_mode: str = "zeros"
    align_corners: bool = False


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
        require_rank(places, 5, f"SampledSum places {k}")
        if image.dtype != x.dtype or image.dims[:2] != x.dims[:2]:
            raise ShapeError(f"image {k} of a SampledSum is {image}, the first one {x}")
        agree(places.dims[0], image.dims[0], f"SampledSum places {places} for {image}")
        for axis in (1, 2):
            agree(places.dims[axis], first.dims[axis], f"SampledSum places {places} and {first}")
        agree(places.dims[4], 2, f"SampledSum places {places} need two coordinates")
        points = points + places.dims[3]
    batch, groups, rows = first.dims[:3]
    if isinstance(x.dims[1], int) and isinstance(groups, int) and (groups == 0 or x.dims[1] % groups):
        raise ShapeError(f"SampledSum: {groups} groups do not divide {x.dims[1]} channels")
    if len(call.types) % 2:
        weights, whole = call.type(len(call.types) - 1), (batch, groups, rows, points)
        if weights.rank != 4 or broadcast_dims(weights.dims, whole) != whole:
            raise ShapeError(f"SampledSum weights {weights} are no factors of {points} points of {rows} results")
    return Result((x.with_shape((batch, x.dims[1], rows)),))


def _cost(call: Call, result: Result) -> Cost:
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[call.attrs.mode] ** 2
    points = sum(extent(call.type(2 * k + 1).dims[3]) for k in range(_images(call.types)))
    return Cost(2 * taps * points * elements(result.types[0]))


def _export(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """A GridSample of each image, concatenated, multiplied by the weights and summed. Groups become items of the batch."""
    (n, c), (groups, rows) = e.type(inputs[0]).dims[:2], e.type(inputs[1]).dims[1:3]
    plain = {"mode": attrs.mode, "padding_mode": attrs.padding_mode, "align_corners": int(attrs.align_corners)}

    def shaped(name: str, dims: Sequence[DimLike]) -> str:
        """The groups of ``name`` as items of the batch, in the shape ``dims``. A single group's axis is dropped, for any batch."""
        dtype = e.type(name).dtype
        kind, given = ("Squeeze", [1]) if groups == 1 else ("Reshape", dims)
        (made,) = e.node(kind, [name, e.const(np.array(given, np.int64))], 1)
        e.declare(made, TensorType(dtype, tuple(dims)))
        return made

    found: list[str] = []
    for image, places in zip(inputs[0:-1:2], inputs[1::2], strict=False):
        size, rest = e.type(image).dims[2:], e.type(places).dims[2:]
        items = image if groups == 1 else shaped(image, (n * groups, c // groups, *size))
        found += e.node("GridSample", [items, shaped(places, (n * groups, *rest))], 1, **plain)
    (y,) = e.node("Concat", found, 1, axis=3)
    if len(inputs) % 2:
        weights, t = inputs[-1], e.type(inputs[-1])
        if groups != 1 and t.dims[:2] != (1, 1):
            (weights,) = e.node("Expand", [weights, e.const(np.array([n, groups, *t.dims[2:]], np.int64))], 1)
            e.declare(weights, TensorType(t.dtype, (n, groups, *t.dims[2:])))
            weights = shaped(weights, (n * groups, 1, *t.dims[2:]))
        (y,) = e.node("Mul", [y, weights], 1)
    (y,) = e.node("ReduceSum", [y, e.const(np.array([3], np.int64))], 1, keepdims=0)
    if groups == 1:
        return [y]
    e.declare(y, TensorType(e.type(inputs[0]).dtype, (n * groups, c // groups, rows)))
    return [shaped(y, (n, c, rows))]


DEFS: tuple[OpDef, ...] = (OpDef("SampledSum", _infer, SampledSumAttrs, {}, _export, cost=_cost),)
