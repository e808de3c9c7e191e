"""NumPy kernels of detectors: RoiAlign, MaxRoiPool, DeformConv."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array

# ---------------------------------------------------------------- regions of interest


Samples: TypeAlias = tuple[Array, Array, Array]
"""Low index, fraction and validity of the sampling points of an axis, each (bins, samples)."""


def _samples(start: float, extent: float, bins: int, ratio: int, size: int) -> tuple[Samples, int]:
    """The sampling points of one axis of a region, and the number that a bin has.

    A bin of a huge region has a point per pixel. Only those inside of the image are returned, and at least one other.
    """
    grid, step = max(ratio if ratio > 0 else math.ceil(extent / bins), 0), extent / bins
    begin = start + np.arange(bins)[:, None] * step
    count = grid if ratio > 0 or not grid else min(grid, math.ceil((size + 1) * grid / step) + 3)
    first = np.clip(np.floor((-1 - begin) * grid / step - 0.5), 0, grid - count) if count < grid else 0
    at = begin + (first + np.arange(count, dtype=np.float64) + 0.5) * step / max(grid, 1)
    valid = (at >= -1) & (at <= size)
    at = np.clip(at, 0, size - 1)
    low = np.minimum(at.astype(np.int64), max(size - 2, 0))
    return (low, at - low, valid), grid


def _weights(samples: Samples, count: int, size: int) -> tuple[Array, int]:
    """Weights (bins, span) of the sampled stretch of an axis, which begins at the returned index. ``count``: points of a bin."""
    low, fraction, valid = samples
    bins = len(low)
    if not valid.any():
        return np.zeros((bins, 1)), 0
    first, last = int(low[valid].min()), min(int(low[valid].max()) + 1, size - 1)
    out = np.zeros((bins, last - first + 1))
    rows = np.broadcast_to(np.arange(bins)[:, None], low.shape)[valid]
    np.add.at(out, (rows, low[valid] - first), 1 - fraction[valid])
    np.add.at(out, (rows, np.minimum(low[valid] + 1, last) - first), fraction[valid])
    return out / count, first


def _greatest(image: Array, ys: Samples, xs: Samples) -> Array:
    """mode "max": the largest of the weighted neighbors (each one separately) over all samples of a bin."""
    height, width = image.shape[1:]
    (y, fy, vy), (x, fx, vx) = ys, xs
    if not y.size or not x.size:
        return np.zeros((len(image), len(y), len(x)), image.dtype)
    best: Array | None = None
    for dy, wy in ((0, 1 - fy), (1, fy)):
        for dx, wx in ((0, 1 - fx), (1, fx)):
            rows, cols = np.minimum(y + dy, height - 1), np.minimum(x + dx, width - 1)
            weight = (wy * vy)[:, :, None, None] * (wx * vx)[None, None]
            values = image[:, rows[:, :, None, None], cols[None, None]] * weight
            found = values.max(axis=(2, 4))
            best = found if best is None else np.maximum(best, found)
    assert best is not None
    return best


def roi_align(
    x: Array,
    rois: Array,
    batch_indices: Array,
    *,
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    mode: str = "avg",
    coordinate_transformation_mode: str = "half_pixel",
) -> tuple[Array, ...]:
    """RoiAlign (ONNX opset 22): x (N, C, H, W), rois (R, 4) as (x1, y1, x2, y2); result (R, C, output_height, output_width).

    Bilinear weights are separable, so mode "avg" is two small matrix products per region.
    """
    offset = 0.5 if coordinate_transformation_mode == "half_pixel" else 0.0
    y = np.zeros((len(rois), x.shape[1], output_height, output_width), x.dtype)
    scaled = rois * rois.dtype.type(spatial_scale) - rois.dtype.type(offset)
    for r, (x1, y1, x2, y2) in enumerate(scaled.tolist()):
        width, height = x2 - x1, y2 - y1
        if not offset:
            width, height = max(width, 1.0), max(height, 1.0)
        image = x[int(batch_indices[r])]
        ys, rows = _samples(y1, height, output_height, sampling_ratio, x.shape[2])
        xs, columns = _samples(x1, width, output_width, sampling_ratio, x.shape[3])
        if mode == "max":
            y[r] = _greatest(image, ys, xs)
        elif ys[0].size and xs[0].size:
            (wy, top), (wx, left) = _weights(ys, rows, x.shape[2]), _weights(xs, columns, x.shape[3])
            part = image[:, top : top + wy.shape[1], left : left + wx.shape[1]]
            y[r] = wy.astype(x.dtype) @ part @ wx.T.astype(x.dtype)
    return (y,)


def max_roi_pool(
    x: Array, rois: Array, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0
) -> tuple[Array, ...]:
    """MaxRoiPool (ONNX opset 22): rois (R, 5) as (batch, x1, y1, x2, y2), rounded to whole pixels; an empty bin is 0."""
    y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
    sizes = x.shape[2:]
    for r, (batch, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (math.floor(abs(v * spatial_scale) + 0.5) * (1 if v >= 0 else -1) for v in corners)
        bounds = []
        for start, stop, bins, size in ((y1, y2, pooled_shape[0], sizes[0]), (x1, x2, pooled_shape[1], sizes[1])):
            step = np.float32(max(stop - start + 1, 1)) / np.float32(bins)
            low = np.floor(np.arange(bins, dtype=np.float32) * step).astype(int) + start
            high = np.ceil(np.arange(1, bins + 1, dtype=np.float32) * step).astype(int) + start
            bounds.append([(min(max(a, 0), size), min(max(b, 0), size)) for a, b in zip(low, high, strict=True)])
        for i, (top, bottom) in enumerate(bounds[0]):
            for j, (left, right) in enumerate(bounds[1]):
                if bottom > top and right > left:
                    y[r, :, i, j] = x[int(batch), :, top:bottom, left:right].max(axis=(1, 2))
    return (y,)


# ---------------------------------------------------------------- deformable convolution


def deform_conv(
    x: Array,
    w: Array,
    offset: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int = 1,
    offset_group: int = 1,
) -> tuple[Array, ...]:
    """DeformConv (ONNX opset 22), two-dimensional: each tap reads x bilinearly at its own offset; outside of x is 0.

    offset (N, offset_group * kh * kw * 2, oh, ow), as (y, x); mask (N, offset_group * kh * kw, oh, ow).
    """
    n, channels, height, width = x.shape
    m, _, kh, kw = w.shape
    oh, ow = offset.shape[2:]
    taps = offset.reshape(n, offset_group, kh, kw, 2, oh, ow)
    base_y = np.arange(kh)[:, None, None, None] * dilations[0] + np.arange(oh)[:, None] * strides[0] - pads[0]
    base_x = np.arange(kw)[:, None, None] * dilations[1] + np.arange(ow) * strides[1] - pads[1]
    y = np.empty((n, m, oh, ow), x.dtype)
    weights = w.reshape(group, m // group, -1)
    for i in range(n):
        py, px = taps[i, :, :, :, 0] + base_y.astype(x.dtype), taps[i, :, :, :, 1] + base_x.astype(x.dtype)
        y0, x0 = np.floor(py).astype(np.int64), np.floor(px).astype(np.int64)
        image = x[i].reshape(offset_group, channels // offset_group, height, width)
        columns = np.zeros((offset_group, channels // offset_group, kh, kw, oh, ow), x.dtype)
        groups = np.arange(offset_group).reshape(-1, 1, 1, 1, 1)
        for dy in (0, 1):
            for dx in (0, 1):
                yy, xx = y0 + dy, x0 + dx
                weight = (1 - np.abs(py - yy)) * (1 - np.abs(px - xx))
                inside = (yy >= 0) & (yy < height) & (xx >= 0) & (xx < width)
                values = image[groups, :, np.clip(yy, 0, height - 1), np.clip(xx, 0, width - 1)]
                columns += np.moveaxis(values, -1, 1) * np.where(inside, weight, 0).astype(x.dtype)[:, None]
        if mask is not None:
            columns *= mask[i].reshape(offset_group, 1, kh, kw, oh, ow)
        y[i] = np.matmul(weights, columns.reshape(group, -1, oh * ow)).reshape(m, oh, ow)
    if bias is not None:
        y += bias.reshape(-1, 1, 1)
    return (y,)


KERNELS: dict[str, Kernel] = {
    "RoiAlign": roi_align,
    "MaxRoiPool": max_roi_pool,
    "DeformConv": deform_conv,
}
