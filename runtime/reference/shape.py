"""NumPy kernels. Operators on shapes: Reshape, Flatten, Transpose, Squeeze, Expand, Shape, Range, Identity, and the like."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.binary import as_dtype
from optdnn.types import Array, is_float


def ints(values: Array) -> list[int]:
    return [int(v) for v in np.reshape(values, -1).tolist()]


def _reshape(x: Array, shape: Array, allowzero: bool) -> tuple[Array, ...]:
    dims = ints(shape)
    if not allowzero:
        if any(d == 0 and i >= x.ndim for i, d in enumerate(dims)):
            raise ValueError(f"the target shape {dims} copies a dimension that operand 0 lacks")
        dims = [x.shape[i] if d == 0 else d for i, d in enumerate(dims)]
    if -1 in dims:
        left, right = list(x.shape), [d for d in dims if d != -1]
        for d in tuple(right):  # an empty batch stays empty, and does not determine the requested dimension
            if d in left:
                left.remove(d)
                right.remove(d)
        if 0 in right:
            raise ValueError(f"-1 next to an empty dimension in the target shape {dims} could be anything")
        dims[dims.index(-1)] = math.prod(left) // math.prod(right)
    return (x.reshape(dims),)


def _flatten(x: Array, axis: int) -> tuple[Array, ...]:
    axis = axis + x.ndim if axis < 0 else axis
    return (x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])),)


def _transpose(x: Array, perm: Sequence[int] | None) -> tuple[Array, ...]:
    return (np.transpose(x, None if perm is None else tuple(perm)),)


def _squeeze(x: Array, axes: Array | None = None) -> tuple[Array, ...]:
    return (np.squeeze(x, axis=None if axes is None else tuple(ints(axes))),)


def _unsqueeze(x: Array, axes: Array) -> tuple[Array, ...]:
    places = ints(axes)
    if len(places) == 1 and 0 <= places[0] <= x.ndim:  # the same result, several times faster
        return (x[(slice(None),) * places[0] + (None,)],)
    return (np.expand_dims(x, tuple(places)),)


def _expand(x: Array, shape: Array) -> tuple[Array, ...]:
    return (np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(ints(shape)))),)


def _shape(x: Array, start: int, end: int | None) -> tuple[Array, ...]:
    return (np.asarray(x.shape[start:end], dtype=np.int64),)


def _size(x: Array) -> tuple[Array, ...]:
    return (np.asarray(x.size, dtype=np.int64),)


def _range(start: Array, limit: Array, delta: Array) -> tuple[Array, ...]:
    dtype = start.dtype
    start, limit, delta = (np.reshape(v, ()) for v in (start, limit, delta))
    if delta == 0:
        raise ValueError("the step is zero")
    if is_float(dtype):
        count = math.ceil((float(limit) - float(start)) / float(delta))
    else:
        count = -((int(start) - int(limit)) // int(delta))
    return ((start + np.arange(max(count, 0)).astype(dtype) * delta).astype(dtype),)


def _constant_of_shape(shape: Array, value: float, dtype: npt.DTypeLike | str) -> tuple[Array, ...]:
    return (np.full(tuple(ints(shape)), value, dtype=as_dtype(dtype)),)


def _identity(x: Array) -> tuple[Array, ...]:
    return (x,)


def _eye_like(x: Array, dtype: npt.DTypeLike | str | None, k: int) -> tuple[Array, ...]:
    rows, columns = x.shape
    return (np.eye(rows, columns, k, dtype=x.dtype if dtype is None else as_dtype(dtype)),)


def _trilu(x: Array, k: Array | None = None, *, upper: bool) -> tuple[Array, ...]:
    diagonal = 0 if k is None else ints(k)[0]
    return (np.triu(x, diagonal) if upper else np.tril(x, diagonal),)


KERNELS: dict[str, Kernel] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Shape": _shape,
    "Size": _size,
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "Identity": _identity,
    "Pointwise": _identity,  # its body is its epilogue
    "Layout": lambda x, layout: (x,),  # logical axes do not change
    "EyeLike": _eye_like,
    "Trilu": _trilu,
}
