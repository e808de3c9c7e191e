"""NumPy kernel of ResizedPeaks: the largest element of each channel of images resized to sizes of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.resize import resize
from optdnn.types import Array

MOST_PIXELS = 1 << 14
"""The most rows and columns of a resized image: sizes are data, and a kernel must end."""


def resized_peaks(x: Array, sizes: Array, **modes: Any) -> tuple[Array, ...]:
    """Images (N, C, H, W) and sizes (N, 2); positions and values (N, C) (:class:`optdnn.ops.resized_peaks.ResizedPeaksAttrs`).

    Narrow floats are resized in float32, so that neighbors of a largest element are not rounded to the same number."""
    wide = np.promote_types(x.dtype, np.float32) if x.dtype.kind == "f" else np.dtype(np.float32)
    places, values = np.zeros(x.shape[:2], np.int64), np.full(x.shape[:2], np.nan, x.dtype)
    for n, size in enumerate(sizes):
        if not 1 <= size.min() <= size.max() <= MOST_PIXELS:
            continue
        (large,) = resize(x[n].astype(wide), sizes=np.array([x.shape[1], *size]), **modes)
        flat = large.reshape(len(large), -1)
        places[n] = flat.argmax(1)
        values[n] = flat.max(1).astype(x.dtype)
    return places, values


KERNELS: dict[str, Kernel] = {"ResizedPeaks": resized_peaks}
