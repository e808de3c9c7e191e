"""The results of calibration: for each value of a graph, the range that its integers cover and statistics of its elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.errors import UsageError
from optdnn.types import UINT8, Array

FP8_LARGEST = 448.0
"""Largest finite value of fp8 e4m3."""


@dataclass(frozen=True)
class Range:
    """The real numbers from ``low`` to ``high`` that the integers cover. Numbers outside saturate."""

    low: float
    high: float

    def hull(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class Calibration:
    """The result of calibrating one graph.

    ``ranges``: value name -> the range that ``method`` chose. ``seen``: value name -> the smallest and the largest element that
    occurred. ``channels``: value name -> the largest magnitude in each channel (axis 1 of images, the last axis of other tensors).
    ``means``: value name -> the mean of each channel. ``samples``: the number of batches that were run.
    """

    method: str
    ranges: Mapping[str, Range]
    seen: Mapping[str, Range] = field(default_factory=dict)
    channels: Mapping[str, Array] = field(default_factory=dict)
    means: Mapping[str, Array] = field(default_factory=dict)
    samples: int = 0
    other_sizes: bool = False
    """Whether the same network was calibrated at other sizes. Some of its values may not exist there."""

    def range(self, name: str) -> Range | None:
        return self.ranges.get(name)


NEARLY_EVEN = 1.125
"""An even range may increase the step by this factor at most."""


def integer_parameters(range_: Range, *, even: bool = False) -> tuple[Array, Array]:
    """(scale float32 [], zero point uint8 []) with which uint8 covers a range. Zero is always represented exactly.

    ``even``: the zero point is 128 if that increases the step little (:data:`NEARLY_EVEN`). As int8, it is 0, and convolutions pad
    with zeros in the fastest way.

    If the scale would be zero or subnormal, it is 1 instead: all numbers of the range then become the zero point. Raises UsageError
    for a range that is not finite.
    """
    low, high = min(range_.low, 0.0), max(range_.high, 0.0)
    if not (np.isfinite(low) and np.isfinite(high)):
        raise UsageError(
            f"a range of {range_.low} to {range_.high} cannot be quantized", hint="calibrate with finite data"
        )
    scale = (high - low) / 255
    if scale < np.finfo(np.float32).tiny:
        return np.asarray(1.0, np.float32), np.asarray(0, UINT8)
    if even and (step := max(high / 127, -low / 128)) <= NEARLY_EVEN * scale:
        return np.asarray(step, np.float32), np.asarray(128, UINT8)
    return np.asarray(scale, np.float32), np.asarray(np.clip(np.rint(-low / scale), 0, 255), UINT8)


def fp8_scale(range_: Range) -> Array:
    """The scale, float32 [], with which fp8 e4m3 covers a range."""
    scale = range_.largest / FP8_LARGEST
    return np.asarray(scale if scale >= np.finfo(np.float32).tiny else 1.0, np.float32)


def channel_axis(rank: int) -> int:
    """The axis of channels in :class:`Calibration`: 1 for images (rank 4 or 5), the last axis for other tensors."""
    return 1 if rank in (4, 5) else max(rank - 1, 0)


def to_plain(calibration: Calibration) -> dict[str, Any]:
    """JSON data for a calibration. Floats are written exactly: their shortest form reads back to the same number."""
    return {
        "method": calibration.method,
        "samples": calibration.samples,
        "ranges": {n: [r.low, r.high] for n, r in sorted(calibration.ranges.items())},
        "seen": {n: [r.low, r.high] for n, r in sorted(calibration.seen.items())},
        "channels": {n: [float(v) for v in a] for n, a in sorted(calibration.channels.items())},
        "means": {n: [float(v) for v in a] for n, a in sorted(calibration.means.items())},
    }


def from_plain(plain: Mapping[str, Any]) -> Calibration:
    """The inverse of :func:`to_plain`. Raises KeyError, TypeError, ValueError, AttributeError or OverflowError for other data."""
    return Calibration(
        str(plain["method"]),
        {str(n): _range(pair) for n, pair in plain["ranges"].items()},
        {str(n): _range(pair) for n, pair in plain["seen"].items()},
        {str(n): finite(a, 1) for n, a in plain["channels"].items()},
        {str(n): finite(a, 1) for n, a in plain["means"].items()},
        int(plain["samples"]),
    )


def _range(pair: Any) -> Range:
    low, high = finite(pair, 1)
    return Range(float(low), float(high))


def finite(plain: Any, rank: int) -> Array:
    """A number or nested list as a finite float64 array with ``rank`` axes. Raises TypeError, ValueError or OverflowError for other
    data, including NaN and infinities, which no calibration writes."""
    found = np.asarray(plain, np.float64)
    if found.ndim != rank or not np.isfinite(found).all():
        raise ValueError(f"the data is not an array of finite numbers with {rank} axes")
    return found
