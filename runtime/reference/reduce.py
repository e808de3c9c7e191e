"""NumPy kernels. Reductions and ArgMax/ArgMin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array, is_float

Axes = tuple[int, ...]
Reducer = Callable[[Array, Axes], Array]


def _reduction(reduce: Reducer) -> Kernel:
    def kernel(
        x: Array, axes: Array | None = None, *, keepdims: bool = True, noop_with_empty_axes: bool = False
    ) -> tuple[Array, ...]:
        which = () if axes is None else tuple(int(a) % max(x.ndim, 1) for a in axes.reshape(-1))
        if not which and not noop_with_empty_axes:
            which = tuple(range(x.ndim))
        y = np.asarray(reduce(x, which)).astype(x.dtype, copy=False)
        return (y if keepdims else y.reshape([d for i, d in enumerate(y.shape) if i not in which]),)

    return kernel


def _add(x: Array, axes: Axes) -> Array:
    total: Array = np.add.reduce(x, axis=axes, keepdims=True, dtype=x.dtype)
    return total


def mean(x: Array, axes: Axes) -> Array:
    """The mean over ``axes``, which stay with size 1. The mean of no elements is 0: ONNX leaves it undefined, ONNX Runtime
    returns 0."""
    count = max(math.prod(x.shape[a] for a in axes), 1)
    total = _add(x, axes)
    if is_float(x.dtype):
        return np.asarray(total / x.dtype.type(count))
    if x.dtype.kind == "u":
        return np.asarray(total // count)
    return np.asarray(np.sign(total) * (np.abs(total) // count))  # integers are truncated toward zero


def _extreme(ufunc: Any, highest: bool) -> Reducer:
    def reduce(x: Array, axes: Axes) -> Array:
        if x.dtype.kind == "b":
            empty: Any = highest
        elif is_float(x.dtype):
            empty = np.inf if highest else -np.inf
        else:
            empty = np.iinfo(x.dtype).max if highest else np.iinfo(x.dtype).min
        # ``initial`` changes no result: it is the identity of the reduction, and the result for an empty set.
        return np.asarray(ufunc.reduce(x, axis=axes, keepdims=True, initial=empty))

    return reduce


def _prod(x: Array, axes: Axes) -> Array:
    return np.asarray(np.multiply.reduce(x, axis=axes, keepdims=True, dtype=x.dtype))


def _l2(x: Array, axes: Axes) -> Array:
    wide = x if is_float(x.dtype) else x.astype(np.float64)  # squares of integers overflow before their root does
    return np.asarray(np.sqrt(_add(np.square(wide), axes)))


def _log_sum(x: Array, axes: Axes) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(_add(x, axes)))


def _log_sum_exp(x: Array, axes: Axes) -> Array:
    if not is_float(x.dtype):
        x = x.astype(np.float64)
    top = np.maximum.reduce(x, axis=axes, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0).astype(x.dtype)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(_add(np.exp(x - top), axes)) + top)


def _arg(find: Any) -> Kernel:
    def kernel(x: Array, *, axis: int = 0, keepdims: bool = True, select_last_index: bool = False) -> tuple[Array, ...]:
        axis = axis % max(x.ndim, 1)
        if not x.ndim:
            return (np.zeros((), np.int64),)
        at = find(np.flip(x, axis) if select_last_index else x, axis=axis)
        if select_last_index:
            at = x.shape[axis] - 1 - at
        return (np.asarray(np.expand_dims(at, axis) if keepdims else at, np.int64),)

    return kernel


KERNELS: dict[str, Kernel] = {
    "ReduceSum": _reduction(_add),
    "ReduceMean": _reduction(mean),
    "ReduceMax": _reduction(_extreme(np.maximum, highest=False)),
    "ReduceMin": _reduction(_extreme(np.minimum, highest=True)),
    "ReduceProd": _reduction(_prod),
    "ReduceL1": _reduction(lambda x, axes: _add(np.abs(x), axes)),
    "ReduceL2": _reduction(_l2),
    "ReduceLogSum": _reduction(_log_sum),
    "ReduceLogSumExp": _reduction(_log_sum_exp),
    "ReduceSumSquare": _reduction(lambda x, axes: _add(np.square(x), axes)),
    "ArgMax": _arg(np.argmax),
    "ArgMin": _arg(np.argmin),
}
