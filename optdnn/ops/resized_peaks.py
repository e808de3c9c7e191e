"""ResizedPeaks: the largest element of each channel of images that are resized to sizes of their own (keypoints of detections)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Call, Cost, Result, Unsupported
from optdnn.ops.checks import agree, elements, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export
from optdnn.types import INT64, TensorType, is_float

MODES = ("linear", "cubic")
COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
TAPS = {"linear": 2, "cubic": 4}


@dataclass(frozen=True)
class ResizedPeaksAttrs(Attrs):
    """Operands: images [N, C, H, W] of floats, and int64 sizes [N, 2] (height, width).

    Image ``n`` is resized to ``sizes[n]``, as by Resize with these attributes. Results, both [N, C]: the position
    ``y * width + x`` of the first largest element of each channel (int64), and the element, of the images' type.
    A height or width that is not in 1 to :data:`~optdnn.runtime.reference.resized_peaks.MOST_PIXELS` gives position 0 and NaN.
    """

    mode: str = "linear"
    coordinate_transformation_mode: str = "half_pixel"
    cubic_coeff_a: float = -0.75


def _infer(call: Call) -> Result:
    a, x, sizes = call.attrs, call.type(0), call.type(1)
    if a.mode not in MODES or a.coordinate_transformation_mode not in COORDINATES:
        raise ShapeError(f"ResizedPeaks in mode {a.mode!r} at coordinates {a.coordinate_transformation_mode!r}")
    require_rank(x, 4, "ResizedPeaks images")
    require_rank(sizes, 2, "ResizedPeaks sizes")
    if not is_float(x.dtype) or sizes.dtype != INT64:
        raise ShapeError(f"ResizedPeaks of {x} with sizes {sizes}")
    agree(sizes.dims[0], x.dims[0], "ResizedPeaks has one size per image")
    agree(sizes.dims[1], 2, "a size of ResizedPeaks has a height and a width")
    shape = x.dims[:2]
    return Result((TensorType(INT64, shape), x.with_shape(shape)))


def _cost(call: Call, result: Result) -> Cost:
    """As if no image changed its size: the sizes are data."""
    return Cost(4 * TAPS[call.attrs.mode] * elements(call.type(0)))


def _export(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """A Resize, an ArgMax and a ReduceMax of each image."""
    t = e.type(inputs[0])
    if not t.is_static:
        raise Unsupported("ResizedPeaks of a number of images that is not known")
    count, channels, *_ = t.static_shape
    if not count:
        raise Unsupported("ResizedPeaks without images")
    modes = {k: v for k, v in asdict(attrs).items() if k != "cubic_coeff_a" or attrs.mode == "cubic"}
    flat = e.const(np.array([1, channels, -1], np.int64))
    places: list[str] = []
    values: list[str] = []
    for n in range(count):
        row = e.const(np.array([n], np.int64))
        (image,), (size,) = (e.node("Gather", [name, row], 1, axis=0) for name in inputs)
        (size,) = e.node("Reshape", [size, e.const(np.array([2], np.int64))], 1)
        (size,) = e.node("Concat", [e.const(np.array([1, channels], np.int64)), size], 1, axis=0)
        (large,) = e.node("Resize", [image, "", "", size], 1, **modes)
        (large,) = e.node("Reshape", [large, flat], 1)
        places += e.node("ArgMax", [large], 1, axis=2, keepdims=0)
        values += e.node("ReduceMax", [large, e.const(np.array([2], np.int64))], 1, keepdims=0)
    return [e.node("Concat", parts, 1, axis=0)[0] for parts in (places, values)]


DEFS: tuple[OpDef, ...] = (OpDef("ResizedPeaks", _infer, ResizedPeaksAttrs, {}, _export, cost=_cost),)
