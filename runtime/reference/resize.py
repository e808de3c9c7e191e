"""NumPy kernels. Resize and Upsample.

Interpolation is separable: each axis is resized on its own, as a sum over the taps of its filter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.errors import InternalError
from optdnn.runtime.reference.base import Kernel
from optdnn.types import FP32, Array, is_float


@dataclass(frozen=True)
class AxisPlan:
    """How one axis is resized: input and output length, their ratio (not exactly their quotient when ``scales`` are
    given), the exact output length before rounding, and the region of interest (start, end)."""

    axis: int
    size: int
    out: int
    scale: float
    width: float
    roi: tuple[float, float] = (0.0, 1.0)


def scaled_size(size: int, scale: float) -> int:
    """floor(size * scale), in fp32 like ONNX's implementations (in fp32, 0.7 * 10 is 7)."""
    return math.floor(np.float32(size) * np.float32(scale))


def aspect_scale(sizes: Sequence[int], given: Sequence[int], policy: str) -> float:
    """The single scale of all resized axes under "not_larger" or "not_smaller"."""
    ratios = [g / s for g, s in zip(given, sizes, strict=True)]
    return min(ratios) if policy == "not_larger" else max(ratios)


def plan(
    shape: Sequence[int],
    roi: Array | None,
    scales: Array | None,
    sizes: Array | None,
    axes: Sequence[int] | None,
    policy: str,
) -> list[AxisPlan]:
    """The plan of each resized axis. One of ``scales`` and ``sizes`` is given, for ``axes`` (None: all)."""
    which = list(range(len(shape))) if axes is None else [a % len(shape) for a in axes]
    lengths = [int(shape[a]) for a in which]
    regions = [(0.0, 1.0)] * len(which)
    if roi is not None:
        half = len(which)
        regions = [(float(roi[i]), float(roi[half + i])) for i in range(half)]
    plans = []
    if sizes is not None:
        given = [int(s) for s in sizes]
        if policy == "stretch":
            for a, n, g, r in zip(which, lengths, given, regions, strict=True):
                plans.append(AxisPlan(a, n, g, g / n if n else 1.0, g, r))
        else:
            scale = aspect_scale(lengths, given, policy)
            for a, n, r in zip(which, lengths, regions, strict=True):
                plans.append(AxisPlan(a, n, math.floor(scale * n + 0.5), scale, scale * n, r))
    elif scales is not None:
        for a, n, s, r in zip(which, lengths, scales, regions, strict=True):
            out, width = scaled_size(n, float(s)), float(s) * n
            # 1/3 is not an fp32 number; it still means a third.
            plans.append(AxisPlan(a, n, out, float(s), out if math.isclose(width, out, rel_tol=1e-6) else width, r))
    else:
        raise InternalError("Resize with neither scales nor sizes")
    return plans


def coordinates(p: AxisPlan, mode: str) -> Array:
    """The position of each output element in the input, in float64."""
    x = np.arange(p.out, dtype=np.float64)
    # The quotient of two integers, not a product with a rounded scale: positions that fall on a pixel are then exact.
    exact = p.width == p.out

    def unscaled(v: Array) -> Array:
        return v * p.size / p.out if exact else v / p.scale

    if mode == "half_pixel":
        return unscaled(x + 0.5) - 0.5
    if mode == "half_pixel_symmetric":
        return p.size / 2 * (1 - p.out / p.width) + unscaled(x + 0.5) - 0.5
    if mode == "pytorch_half_pixel":
        return unscaled(x + 0.5) - 0.5 if p.out > 1 else np.zeros_like(x)
    if mode == "align_corners":
        return np.zeros_like(x) if p.width == 1 or p.out == 1 else x * (p.size - 1) / (p.width - 1)
    if mode == "asymmetric":
        return unscaled(x)
    if mode == "tf_half_pixel_for_nn":
        return unscaled(x + 0.5)
    if mode == "tf_crop_and_resize":
        start, end = p.roi
        if p.width == 1:
            return np.full_like(x, 0.5 * (start + end) * (p.size - 1))
        return start * (p.size - 1) + x * (end - start) * (p.size - 1) / (p.width - 1)
    raise InternalError(f"Resize has no coordinate transformation {mode!r}")


def rounded(x: Array, mode: str) -> Array:
    """Positions as integers, under a ``nearest_mode``.

    They are rounded to fp32 first, as other runtimes compute them: 17 / 1.7 is then 10, though 1.7 is not an fp32 number.
    """
    x = x.astype(np.float32)
    if mode == "round_prefer_floor":
        return np.ceil(x - 0.5)
    if mode == "round_prefer_ceil":
        return np.floor(x + 0.5)
    return np.floor(x) if mode == "floor" else np.ceil(x)


def _linear(x: Array) -> Array:
    weight: Array = np.maximum(1 - np.abs(x), 0)
    return weight


def _cubic(x: Array, a: float) -> Array:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    weight: Array = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
    return weight


def _filter(p: AxisPlan, at: Array, mode: str, antialias: bool, a: float) -> tuple[Array, Array]:
    """Input positions (which may be outside) and weights of every tap: two arrays (out, taps)."""
    stretch = min(p.scale, 1.0) if antialias else 1.0
    reach = 2 if mode == "cubic" else 1
    first = math.floor(-reach / stretch) + 1
    base = np.floor(at)
    offsets = np.arange(first, 2 - first)
    distance = (offsets - (at - base)[:, None]) * stretch
    weights = _cubic(distance, a) if mode == "cubic" else _linear(distance)
    if antialias:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return (base[:, None] + offsets).astype(np.int64), weights


def taps(p: AxisPlan, at: Array, mode: str, antialias: bool, a: float, exclude_outside: bool) -> tuple[Array, Array]:
    """Input positions, clamped to the axis, and weights of every tap of an interpolation: two arrays (out, taps)."""
    found, weights = _filter(p, at, mode, antialias, a)
    if exclude_outside:
        weights = np.where((found < 0) | (found >= p.size), 0.0, weights)
        weights = weights / weights.sum(axis=1, keepdims=True)
    return np.clip(found, 0, p.size - 1), weights


def resize(
    x: Array,
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Array | None = None,
    *,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: bool = False,
    extrapolation_value: float = 0.0,
    antialias: bool = False,
    keep_aspect_ratio_policy: str = "stretch",
    axes: Sequence[int] | None = None,
) -> tuple[Array, ...]:
    """Resize (ONNX opset 19). Integers are interpolated in float64, rounded and clamped to their range."""
    crop = coordinate_transformation_mode == "tf_crop_and_resize"
    y = x
    if mode != "nearest" and not is_float(x.dtype):
        y = x.astype(np.float64)
    for p in plan(x.shape, roi if crop else None, scales, sizes, axes, keep_aspect_ratio_policy):
        if p.out == p.size and math.isclose(p.scale, 1.0) and p.roi == (0.0, 1.0):
            continue
        at = coordinates(p, coordinate_transformation_mode)
        if mode == "nearest":
            y = y.take(np.clip(rounded(at, nearest_mode), 0, p.size - 1).astype(np.int64), axis=p.axis)
        else:
            y = _interpolate(y, p, at, mode, antialias, cubic_coeff_a, exclude_outside)
        if crop:
            outside = ((at < 0) | (at > p.size - 1)).reshape(-1, *(1,) * (y.ndim - 1 - p.axis))
            y = np.where(outside, np.asarray(extrapolation_value).astype(y.dtype), y)
    if y.dtype != x.dtype:
        limits = np.iinfo(x.dtype)
        y = np.clip(np.round(y), limits.min, limits.max).astype(x.dtype)
    return (y,)


def _interpolate(
    x: Array, p: AxisPlan, at: Array, mode: str, antialias: bool, a: float, exclude_outside: bool
) -> Array:
    where, weights = taps(p, at, mode, antialias, a, exclude_outside)
    dtype = x.dtype if x.dtype.itemsize >= FP32.itemsize else FP32
    column = (-1, *(1,) * (x.ndim - 1 - p.axis))
    total = np.zeros((*x.shape[: p.axis], p.out, *x.shape[p.axis + 1 :]), dtype)
    for i in range(where.shape[1]):
        if weights[:, i].any():
            total += x.take(where[:, i], axis=p.axis) * weights[:, i].astype(dtype).reshape(column)
    return total


KERNELS: dict[str, Kernel] = {"Resize": resize}
