"""NumPy kernels of detectors: NonMaxSuppression, RoiAlign, MaxRoiPool, DeformConv."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array

PAIRS = 1 << 20
"""Number of pairs of boxes that are compared at a time."""
OVERHEAD = 4000
"""Comparing one box with all others costs as much as comparing this many further pairs."""


def _corners(boxes: Array, center_point_box: int) -> tuple[Array, Array, Array, Array]:
    """The low and high corners of boxes (..., 4): (y1, x1, y2, x2) in any order of corners, or (x, y, width, height)."""
    a, b, c, d = np.moveaxis(boxes, -1, 0)
    if center_point_box:
        half = boxes.dtype.type(2)
        return b - d / half, a - c / half, b + d / half, a + c / half
    return np.minimum(a, c), np.minimum(b, d), np.maximum(a, c), np.maximum(b, d)


def non_max_suppression(
    boxes: Array,
    scores: Array,
    max_output_boxes_per_class: Array | None = None,
    iou_threshold: Array | None = None,
    score_threshold: Array | None = None,
    *,
    center_point_box: int = 0,
) -> tuple[Array, ...]:
    """NonMaxSuppression (ONNX opset 11): boxes (B, N, 4), scores (B, C, N); result (M, 3): batch, class and box.

    Of equal scores the first box wins. Scores must exceed their threshold; boxes that overlap a chosen one by more than
    ``iou_threshold`` are removed.
    """
    limit = 0 if max_output_boxes_per_class is None else int(max_output_boxes_per_class.reshape(-1)[0])
    threshold = boxes.dtype.type(0 if iou_threshold is None else iou_threshold.reshape(-1)[0])
    least = None if score_threshold is None else score_threshold.reshape(-1)[0]
    chosen = [np.zeros((0, 3), np.int64)]
    for b in range(len(boxes)) if limit > 0 else ():
        corners = _corners(boxes[b], center_point_box)
        for c in range(scores.shape[1]):
            own = scores[b, c]
            candidates = np.arange(len(own)) if least is None else np.flatnonzero(own > least)
            candidates = candidates[np.argsort(-own[candidates], kind="stable")]
            kept = candidates[_greedy(tuple(x[candidates] for x in corners), threshold, limit)]
            chosen.append(np.stack([np.full_like(kept, b), np.full_like(kept, c), kept], axis=1))
    return (np.concatenate(chosen).astype(np.int64, copy=False),)


def _greedy(corners: tuple[Array, ...], threshold: np.generic, limit: int) -> Array:
    """The kept boxes, given boxes in the order of their scores: each that overlaps no kept box by more than ``threshold``."""
    n = len(corners[0])
    meeting = min((_meeting(corners[k], corners[k + 2]) for k in (0, 1)), key=lambda found: found[0])
    if min(limit, n) * (n + OVERHEAD) < 4 * meeting[0]:
        return _one_by_one(corners, threshold, limit)
    better, worse = _overlapping(corners, threshold, *meeting[1:])
    order = np.argsort(better, kind="stable")
    worse, first = worse[order], np.searchsorted(better[order], np.arange(n + 1)).tolist()
    gone, kept = np.zeros(n, np.bool_), 0
    for i in range(n):
        if gone[i]:
            continue
        kept += 1
        if kept == limit:
            gone[i + 1 :] = True
            break
        if first[i] < first[i + 1]:
            gone[worse[first[i] : first[i + 1]]] = True
    return np.flatnonzero(~gone)


def _one_by_one(corners: tuple[Array, ...], threshold: np.generic, limit: int) -> Array:
    """The same by comparing each kept box with all remaining ones: faster if few of many overlapping boxes are kept."""
    kept: list[int] = []
    left = np.arange(len(corners[0]))
    while len(left) and len(kept) < limit:
        best, rest = left[0], left[1:]
        kept.append(int(best))
        left = rest[~_overlap(corners, best, rest, threshold)]
    return np.array(kept, np.int64)


def _overlap(corners: tuple[Array, ...], i: Array, j: Array, threshold: np.generic) -> Array:
    """Whether the boxes ``i`` (one or more) and ``j`` overlap by more than ``threshold`` of their union."""
    y1, x1, y2, x2 = corners
    height = np.minimum(y2[i], y2[j]) - np.maximum(y1[i], y1[j])
    width = np.minimum(x2[i], x2[j]) - np.maximum(x1[i], x1[j])
    overlap = np.maximum(height, 0) * np.maximum(width, 0)
    a, b = ((y2[k] - y1[k]) * (x2[k] - x1[k]) for k in (i, j))
    union = a + b - overlap
    real = (overlap > 0) & (a > 0) & (b > 0) & (union > 0)
    found: Array = real & (overlap / np.where(real, union, 1) > threshold)
    return found


def _overlapping(corners: tuple[Array, ...], threshold: np.generic, order: Array, count: Array) -> tuple[Array, Array]:
    """The pairs of boxes that overlap by more than ``threshold``, the lower index first, among the pairs that overlap along an
    axis: each box and the next ``count`` ones in ``order``."""
    ends = np.cumsum(count)
    first, pairs = 0, [np.zeros((2, 0), np.int64)]
    while first < len(order):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + PAIRS, side="right")))
        own = count[first:last]
        i = np.repeat(np.arange(first, last), own)
        j = np.arange(len(i)) - np.repeat(np.cumsum(own) - own, own) + i + 1
        i, j = order[i], order[j]
        for low, high in ((0, 2), (1, 3)):  # most pairs do not overlap along the other axis
            met = np.minimum(corners[high][i], corners[high][j]) > np.maximum(corners[low][i], corners[low][j])
            i, j = i[met], j[met]
        found = _overlap(corners, i, j, threshold)
        pairs.append(np.stack([np.minimum(i[found], j[found]), np.maximum(i[found], j[found])]))
        first = last
    better, worse = np.concatenate(pairs, axis=1)
    return better, worse


def _meeting(low: Array, high: Array) -> tuple[int, Array, Array]:
    """The number of pairs of boxes that overlap along an axis; the boxes in the order of their low ends along it; and for each
    box the number of later boxes that begin before it ends."""
    order = np.argsort(low, kind="stable")
    behind = np.searchsorted(low[order], high[order]) - np.arange(1, len(low) + 1)
    count = np.maximum(behind, 0)
    return int(count.sum()), order, count


# ---------------------------------------------------------------- regions of interest


def _samples(start: float, extent: float, bins: int, ratio: int, size: int) -> tuple[Array, Array, Array]:
    """The sampling points of one axis of a region: low index, fraction and validity, each (bins, samples)."""
    grid = ratio if ratio > 0 else math.ceil(extent / bins)
    step = extent / bins
    inside = (np.arange(max(grid, 0), dtype=np.float64) + 0.5) * step / max(grid, 1)
    at = start + np.arange(bins)[:, None] * step + inside
    valid = (at >= -1) & (at <= size)
    at = np.clip(at, 0, size - 1)
    low = np.minimum(at.astype(np.int64), max(size - 2, 0))
    return low, at - low, valid


def _weights(low: Array, fraction: Array, valid: Array, size: int) -> tuple[Array, int]:
    """Weights (bins, span) of the sampled stretch of an axis, which begins at the returned index."""
    bins, count = low.shape
    if not valid.any():
        return np.zeros((bins, 1)), 0
    first, last = int(low[valid].min()), min(int(low[valid].max()) + 1, size - 1)
    out = np.zeros((bins, last - first + 1))
    rows = np.broadcast_to(np.arange(bins)[:, None], low.shape)[valid]
    np.add.at(out, (rows, low[valid] - first), 1 - fraction[valid])
    np.add.at(out, (rows, np.minimum(low[valid] + 1, last) - first), fraction[valid])
    return out / count, first


def _greatest(image: Array, ys: tuple[Array, Array, Array], xs: tuple[Array, Array, Array]) -> Array:
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
        ys = _samples(y1, height, output_height, sampling_ratio, x.shape[2])
        xs = _samples(x1, width, output_width, sampling_ratio, x.shape[3])
        if mode == "max":
            y[r] = _greatest(image, ys, xs)
        elif ys[0].size and xs[0].size:
            (wy, top), (wx, left) = _weights(*ys, x.shape[2]), _weights(*xs, x.shape[3])
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
    "NonMaxSuppression": non_max_suppression,
    "RoiAlign": roi_align,
    "MaxRoiPool": max_roi_pool,
    "DeformConv": deform_conv,
}
