"""Integer weights of at most 8 bits, minus their zero points."""

from __future__ import annotations

import numpy as np

from optdnn.types import INT8, Array


def centered(array: Array, zero: Array | None, axis: int) -> Array | None:
    """Integers of at most 8 bits minus their zero points (one, or one per entry of ``axis``), as int8.

    None if a difference exceeds int8."""
    wide = array.astype(np.int16)
    if zero is not None:
        points = zero.astype(np.int16)
        wide = wide - points.reshape(() if points.size == 1 else [-1 if i == axis else 1 for i in range(array.ndim)])
    info = np.iinfo(INT8)
    return wide.astype(INT8) if wide.size and info.min <= wide.min() and wide.max() <= info.max else None
