"""The results of calibration: for each value of a graph, the range that its integers should cover, and the elements seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.errors import UsageError
from optdnn.types import UINT8, Array, DType

FP8_LARGEST = 448.0
"""Largest finite value of fp8 e4m3."""


@dataclass(frozen=True)
class Range:
    """``low`` to ``high``: real values that the integers cover; values beyond saturate."""

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

    ``ranges``: value name -> the range chosen by ``method``; ``seen``: value name -> the smallest and largest element
    seen; ``channels``: value name -> the largest magnitude in each channel (axis 1 of images, the last axis of everything else);
    ``means``: value name -> the mean of each channel. ``samples`` counts the batches that were run.
    """

    method: str
    ranges: Mapping[str, Range]
    seen: Mapping[str, Range] = field(default_factory=dict)
    channels: Mapping[str, Array] = field(default_factory=dict)
    means: Mapping[str, Array] = field(default_factory=dict)
    samples: int = 0
    other_sizes: bool = False
    """Whether it belongs to the same network at other sizes, where some values may be different."""

    def range(self, name: str) -> Range | None:
        return self.ranges.get(name)


def integer_parameters(range_: Range, dtype: DType, *, symmetric: bool) -> tuple[Array, Array]:
    """(scale float32 [], zero point []) with which ``dtype`` (int8 or uint8) covers a range; zero is always represented exactly.

    Symmetric int8 spans -127 … 127, so that a value and its negative are equally exact. A range of nothing, or one so
    narrow that its scale would be subnormal, has the scale 1: everything in it is then the zero point.
    """
    low, high = min(range_.low, 0.0), max(range_.high, 0.0)
    if not (np.isfinite(low) and np.isfinite(high)):
        raise UsageError(
            f"a range of {range_.low} to {range_.high} cannot be quantized", hint="calibrate with finite data"
        )
    info = np.iinfo(dtype)
    bottom, top = (-127, 127) if symmetric and dtype != UINT8 else (int(info.min), int(info.max))
    if symmetric:
        low, high = -max(-low, high), max(-low, high)
    scale = (high - low) / (top - bottom)
    if scale < np.finfo(np.float32).tiny:
        return np.asarray(1.0, np.float32), np.asarray(0, dtype)
    zero = round((top + bottom) / 2) if symmetric else int(np.clip(np.rint(bottom - low / scale), bottom, top))
    return np.asarray(scale, np.float32), np.asarray(zero, dtype)


def fp8_scale(range_: Range) -> Array:
    """The scale float32 [] with which fp8 e4m3 covers a range."""
    scale = range_.largest / FP8_LARGEST
    return np.asarray(scale if scale >= np.finfo(np.float32).tiny else 1.0, np.float32)


def channel_axis(rank: int) -> int:
    """The axis that counts as channels in :class:`Calibration`: 1 of images (rank 3 and up with spatial axes after it is
    rank 4 or 5), the last of everything else."""
    return 1 if rank in (4, 5) else max(rank - 1, 0)


def to_plain(calibration: Calibration) -> dict[str, Any]:
    """JSON data; floats as they are (their shortest form reads back to the same number)."""
    return {
        "method": calibration.method,
        "samples": calibration.samples,
        "ranges": {n: [r.low, r.high] for n, r in sorted(calibration.ranges.items())},
        "seen": {n: [r.low, r.high] for n, r in sorted(calibration.seen.items())},
        "channels": {n: [float(v) for v in a] for n, a in sorted(calibration.channels.items())},
        "means": {n: [float(v) for v in a] for n, a in sorted(calibration.means.items())},
    }


def from_plain(plain: Mapping[str, Any]) -> Calibration:
    """The inverse of :func:`to_plain`; KeyError, TypeError, ValueError, AttributeError or OverflowError for anything else."""
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
    """Plain numbers as float64 [...] of a rank. Raises TypeError, ValueError or OverflowError for anything else, NaN and infinities
    included: no calibration writes them."""
    found = np.asarray(plain, np.float64)
    if found.ndim != rank or not np.isfinite(found).all():
        raise ValueError(f"these are no finite numbers of rank {rank}")
    return found
