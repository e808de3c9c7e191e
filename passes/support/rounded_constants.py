"""Constants as 16-bit floats: each is rounded once, and large ones on threads (NumPy releases the GIL).

A finite constant never becomes infinite: it saturates. A scalar constant never becomes zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

import numpy as np

from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph
from optdnn.passes.support.precision_report import FP16_LEAST, vanishes
from optdnn.types import BF16, FP16, FP32, Array, DType

LARGE = 1 << 20
"""Constants of at least this many bytes are rounded on threads."""
LARGEST: Mapping[DType, float] = {FP16: 65504.0, BF16: 3.3895313892515355e38}
"""Largest finite value."""


class RoundedConstants:
    """The rounded constants of a graph. ``kept``: results of earlier builds of the same process."""

    def __init__(self, kept: ConstantCache):
        self._kept = kept
        self._coming: dict[tuple[int, DType], Future[tuple[Array, Array]]] = {}
        """Large constants that threads are rounding, by identity."""

    def begin(self, graph: Graph, dtype: DType, pool: ThreadPoolExecutor) -> None:
        """Start rounding all large constants to ``dtype``."""
        for op in graph.of_kind("Constant"):
            array = op.attrs.value
            if array.dtype == FP32 and array.nbytes >= LARGE and not self._kept.has(("rounded", dtype.name), [array]):
                self._coming[id(array), dtype] = pool.submit(_narrowed, array, dtype)

    def rounded(self, array: Array, dtype: DType) -> tuple[bool, Array]:
        """Whether elements saturate, and the array in ``dtype``."""
        coming = self._coming.get((id(array), dtype))
        find = cache(partial(_narrowed, array, dtype)) if coming is None else coming.result
        beyond = self._kept.once(("beyond", dtype.name), [array], lambda: find()[0])
        return bool(beyond.any()), self._kept.once(("rounded", dtype.name), [array], lambda: find()[1])


def _narrowed(array: Array, dtype: DType) -> tuple[Array, Array]:
    """A mask and the array in ``dtype``. The mask marks finite elements that would become infinite (a single False if there are
    none); the array has these saturated. A scalar that is not zero does not become zero."""
    top = np.float32(LARGEST[dtype])
    if dtype == FP16 and vanishes(array):  # an epsilon in an epilogue, say
        return np.zeros((), np.bool_), np.copysign(np.float32(2 * FP16_LEAST), array).astype(dtype)
    if array.size and -top <= array.min() and array.max() <= top:  # nearly always, and NaN is not
        return np.zeros((), np.bool_), array.astype(dtype)
    beyond = np.isfinite(array) & (np.abs(array) > top)
    return beyond, np.where(beyond, np.copysign(top, array), array).astype(dtype)
