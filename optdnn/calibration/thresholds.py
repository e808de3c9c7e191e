"""The range that a value's integers cover, from a histogram of the value: min-max, percentile, entropy, mean squared error.

Percentile and entropy are defined as in ONNX Runtime's quantizer (``onnxruntime.quantization.calibrate``) and reproduce its
scales for the same data and number of bins. Entropy follows S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from optdnn.passes.support.ranges import Range
from optdnn.types import Array

BINS = 2048
PERCENTILE = 99.999
ENTROPY_LEVELS = 128
_SMOOTHING = 1e-4
MSE_STEPS = 128
"""Number of candidate ranges that :func:`mse` tries, from the full range down to a fiftieth of it."""


@dataclass(frozen=True)
class Histogram:
    """``counts`` int64 [bins] between ``edges`` [bins + 1], and the smallest and largest element seen.

    The edges are evenly spaced, from -T to T with T the largest magnitude.
    """

    counts: Array
    edges: Array
    low: float
    high: float


def percentile(h: Histogram, percent: float = PERCENTILE) -> Range:
    """The range that holds ``percent`` of all elements; half of the rest is cut off at either end."""
    cumulative = np.cumsum(h.counts / h.counts.sum())
    cut = (100.0 - percent) / 200.0
    left = float(h.edges[np.searchsorted(cumulative, cut)])
    return _within(left, float(h.edges[np.searchsorted(cumulative, 1.0 - cut)]), h)


def entropy(h: Histogram) -> Range:
    """The symmetric range that loses the least information when quantized to ENTROPY_LEVELS: the least Kullback-Leibler
    divergence of the quantized from the clipped distribution. Ranges grow from ENTROPY_LEVELS bins around zero to all bins."""
    bins, middle, half = h.counts.size, h.counts.size // 2, ENTROPY_LEVELS // 2
    if middle < half:
        return Range(h.low, h.high)
    below = np.concatenate([[0], np.cumsum(h.counts)])
    best, chosen = np.inf, (0.0, 0.0)
    for i in range(half, middle + 1):
        start, end = middle - i, min(middle + i + 1, bins)
        divergence = _divergence(h.counts[start:end], int(below[start]), int(below[-1] - below[end]))
        if i == half or divergence < best:
            best, chosen = divergence, (float(h.edges[start]), float(h.edges[end]))
    return _within(*chosen, h)


def _divergence(inside: Array, left: int, right: int) -> float:
    """KL divergence between a clipped distribution (outliers counted at its ends) and its quantized form."""
    clipped, levels = inside.copy(), ENTROPY_LEVELS
    clipped[0] += left
    clipped[-1] += right
    width = inside.size // levels
    occupied = clipped != 0
    starts = np.arange(levels) * width
    merged = np.add.reduceat(inside[: levels * width], starts)
    merged[-1] += inside[levels * width :].sum()
    share = np.add.reduceat(occupied[: levels * width].astype(np.int64), starts)
    # Each level's count is spread evenly, in whole numbers, over its nonempty bins.
    level = np.where(share > 0, merged / np.maximum(share, 1), 0).astype(np.int64)
    spread = np.zeros(inside.size, np.int64)
    spread[: levels * width] = np.repeat(level, width)
    p, q = _smoothed(clipped), _smoothed(spread)
    if p is None or q is None:
        return float("inf")
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p * np.log(p / q)))


def _smoothed(counts: Array) -> Array | None:
    """float32 counts without zeros: empty bins get a little, and the others lose it evenly. None if all are empty."""
    empty = counts == 0
    n = int(empty.sum())
    if n == counts.size:
        return None
    taken = _SMOOTHING * n / (counts.size - n)
    result = counts.astype(np.float32)
    result += np.float32(_SMOOTHING) * empty.astype(np.float32) + np.float32(-taken) * (~empty).astype(np.float32)
    return result if (result > 0).all() else None


def mse(h: Histogram) -> Range:
    """The range with the least mean squared error of clipping and rounding, among the full range and fractions of it."""
    low, high = min(h.low, 0.0), max(h.high, 0.0)
    centers = (h.edges[:-1].astype(np.float64) + h.edges[1:].astype(np.float64)) / 2
    counts = h.counts.astype(np.float64)
    best, chosen = np.inf, (low, high)
    for part in np.linspace(1.0, 0.02, MSE_STEPS):
        a, b = low * part, high * part
        step = (b - a) / 255
        if step <= 0:
            break
        inside = np.clip(centers, a, b)
        rounded = np.rint(inside / step) * step
        # Elements are spread within a bin: rounding costs at least a twelfth of a squared step.
        error = float(np.sum(counts * np.where(inside == centers, step**2 / 12, (centers - rounded) ** 2)))
        if error < best:
            best, chosen = error, (a, b)
    return _within(*chosen, h)


def _within(low: float, high: float, h: Histogram) -> Range:
    """A chosen range, clipped to the values seen."""
    return Range(max(low, h.low), min(high, h.high))


CHOOSE: Mapping[str, Callable[[Histogram], Range]] = {"percentile": percentile, "entropy": entropy, "mse": mse}
"""The methods that need a histogram."""
