"""Copies and comparisons of large matrices with elements in different memory orders.

NumPy reads a transposed matrix against its memory order: each element costs a cache miss, over ten times the time of
the copy itself. Here the matrix is processed in strips of columns, so that the cache lines of a strip stay in the cache.
The columns may be two axes: those of one of two matrices that alternate in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from optdnn.types import Array

STRIP = 32
"""Bytes of a row in a strip."""
ROWS = 64
"""The least rows of a matrix whose columns are blocks: a short strip is not worth its call."""
LARGE = 1 << 20
"""The least bytes of a matrix for which strips are worth their calls."""


def contiguous(array: Array) -> Array:
    """An array in C order; a copy if the array is in another order."""
    if not _turned(array):
        return np.ascontiguousarray(array)
    made = np.empty(array.shape, array.dtype)
    for strip in _strips(array):
        made[strip] = array[strip]
    return made


def equal(a: Array, b: Array) -> bool:
    """Whether two arrays of one shape have equal elements."""
    if not _turned(a) and not _turned(b):
        return bool(np.array_equal(a, b))
    return a.shape == b.shape and all(np.array_equal(a[strip], b[strip]) for strip in _strips(a))


def _turned(array: Array) -> bool:
    """Whether neighbors in memory are neighbors along axis 0, in a matrix large enough for strips."""
    if array.ndim not in (2, 3) or array.nbytes < LARGE or array.flags.c_contiguous:
        return False
    return array.strides[0] == array.itemsize < min(array.strides[1:]) and (array.ndim == 2 or array.shape[0] >= ROWS)


def _strips(array: Array) -> Iterator[tuple[slice | int, ...]]:
    width = max(1, STRIP // array.itemsize)
    for block in np.ndindex(array.shape[1:-1]):
        for k in range(0, array.shape[-1], width):
            yield slice(None), *block, slice(k, k + width)
