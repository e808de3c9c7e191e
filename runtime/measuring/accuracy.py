"""The distance between two sets of outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.types import Array


def errors_between(got: Sequence[Array], want: Sequence[Array]) -> tuple[float, float]:
    """(largest absolute error, largest relative error) over all outputs.

    The relative error of one output is max|got - want| / max|want|: relative to the output's scale, because elements near
    zero have no meaningful relative error. Equal infinities and NaNs at the same positions count as equal; any
    other mismatch of them, or of shapes, is an infinite error. An output that should be all zeros has its absolute error.
    """
    worst_abs = worst_rel = 0.0
    for a, b in zip(got, want, strict=True):
        absolute, scale = _error(np.asarray(a), np.asarray(b))
        worst_abs = max(worst_abs, absolute)
        worst_rel = max(worst_rel, absolute / scale if scale else absolute)
    return worst_abs, worst_rel


def holds_nan(array: Array) -> bool:
    """Whether an array of floating-point or complex numbers has a NaN."""
    return array.dtype.kind in "fcV" and bool(np.isnan(array).any())


def _error(a: Array, b: Array) -> tuple[float, float]:
    if a.shape != b.shape:
        return float("inf"), 1.0
    if not a.size:
        return 0.0, 1.0
    kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    x, y = a.astype(kind), b.astype(kind)
    finite = np.isfinite(x) & np.isfinite(y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    if not (finite | same).all():
        return float("inf"), 1.0
    least = 0.0
    if a.dtype.kind in "biu" and b.dtype.kind in "biu" and not np.array_equal(a, b):
        least = 1.0  # large integers that differ may round to the same float64
    scale = float(np.abs(y[finite]).max()) if finite.any() else 0.0
    return (max(least, float(np.abs(x[finite] - y[finite]).max())) if finite.any() else 0.0), scale
