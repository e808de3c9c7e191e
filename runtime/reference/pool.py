"""NumPy kernels. Pooling: MaxPool, AveragePool, LpPool and their global forms, MaxUnpool.

Maximum and sum over a rectangular window are separable, so each pool runs one axis after the other: a kernel of k x k
costs 2 k vectorized passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from optdnn.errors import InternalError, RunError
from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.reduce import mean
from optdnn.runtime.reference.window import resolve_pads, static_sizes
from optdnn.types import Array, is_float


def _geometry(
    x: Array,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    ceil_mode: bool,
    auto_pad: str,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Explicit pads and output sizes."""
    explicit = resolve_pads(auto_pad, pads, x.shape[2:], kernel_shape, strides, dilations)
    if explicit is None:
        raise InternalError("a kernel met a symbolic size")
    return explicit, static_sizes(explicit, x.shape[2:], kernel_shape, strides, dilations, ceil_mode)


def _along(x: Array, axis: int, begin: int, end: int, value: float) -> Array:
    """``x`` padded (or, for a negative ``end``, cropped) along one axis."""
    if begin > 0 or end > 0:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (max(begin, 0), max(end, 0))
        x = np.pad(x, widths, constant_values=np.asarray(value).astype(x.dtype))
    if end < 0:
        x = x[(slice(None),) * axis + (slice(0, end),)]
    return x


def _windows(x: Array, axis: int, kernel: int, out: int, stride: int, dilation: int) -> list[Array]:
    """The views of (padded) ``x`` that each tap of a one-dimensional kernel meets."""
    lead = (slice(None),) * axis
    return [
        x[(*lead, slice(i * dilation, i * dilation + (out - 1) * stride + 1 if out else 0, stride))]
        for i in range(kernel)
    ]


def _tail(size: int, begin: int, kernel: int, out: int, stride: int, dilation: int) -> int:
    """End padding that makes the last window fit exactly (negative: elements no window reaches)."""
    return (out - 1) * stride + (kernel - 1) * dilation + 1 - size - begin


def _pooled_sum(
    x: Array,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    out: Sequence[int],
) -> Array:
    for i in reversed(range(len(kernel))):
        tail = _tail(x.shape[2 + i], pads[i], kernel[i], out[i], strides[i], dilations[i])
        views = _windows(_along(x, 2 + i, pads[i], tail, 0), 2 + i, kernel[i], out[i], strides[i], dilations[i])
        total = views[0].copy()
        for view in views[1:]:
            total += view
        x = total
    return x


def max_pool(
    x: Array,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    ceil_mode: bool = False,
    storage_order: int = 0,
    auto_pad: str = "NOTSET",
    indices: bool = False,
) -> tuple[Array, ...]:
    """MaxPool (ONNX opset 22): values and, with ``indices``, the flat index of each maximum (the first of equals).

    An index counts through the whole tensor; ``storage_order`` 1 counts the spatial axes in column-major order.
    """
    pads, out = _geometry(x, kernel_shape, strides, pads, dilations, ceil_mode, auto_pad)
    lowest = -math.inf if is_float(x.dtype) else int(np.iinfo(x.dtype).min)
    rank, spatial = len(kernel_shape), x.shape[2:]
    y, where = x, None
    if indices:
        flat = np.arange(math.prod(spatial)).reshape(spatial, order="F" if storage_order else "C")
        channels = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1,) * rank) * flat.size
        where = channels + flat
    for i in reversed(range(rank)):
        k, s, d, o = kernel_shape[i], strides[i], dilations[i], out[i]
        tail = _tail(y.shape[2 + i], pads[i], k, o, s, d)
        views = _windows(_along(y, 2 + i, pads[i], tail, lowest), 2 + i, k, o, s, d)
        best = views[0].copy()
        if where is None:
            for view in views[1:]:
                np.maximum(best, view, out=best)
        else:
            marks = _windows(_along(where, 2 + i, pads[i], tail, -1), 2 + i, k, o, s, d)
            first = marks[0].copy()
            for view, mark in zip(views[1:], marks[1:], strict=True):
                better = (view > best) | (first < 0)
                np.copyto(best, view, where=better)
                np.copyto(first, mark, where=better)
            where = first
        y = best
    return (y,) if where is None else (y, where)


def average_pool(
    x: Array,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    ceil_mode: bool = False,
    count_include_pad: bool = False,
    auto_pad: str = "NOTSET",
) -> tuple[Array, ...]:
    """AveragePool (ONNX opset 22). What ``ceil_mode`` adds beyond the padding never counts."""
    pads, out = _geometry(x, kernel_shape, strides, pads, dilations, ceil_mode, auto_pad)
    total = _pooled_sum(x, kernel_shape, strides, pads, dilations, out)
    rank = len(kernel_shape)
    counts: Array = np.ones((1,) * rank, x.dtype)
    for i in range(rank):
        at = np.arange(out[i])[:, None] * strides[i] + np.arange(kernel_shape[i]) * dilations[i] - pads[i]
        low, high = (-pads[i], x.shape[2 + i] + pads[rank + i]) if count_include_pad else (0, x.shape[2 + i])
        counted = ((at >= low) & (at < high)).sum(axis=1).astype(x.dtype)
        counts = counts * counted.reshape(-1, *(1,) * (rank - 1 - i))
    with np.errstate(invalid="ignore"):
        return (total / counts,)


def lp_pool(
    x: Array,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    p: int = 2,
    ceil_mode: bool = False,
    auto_pad: str = "NOTSET",
) -> tuple[Array, ...]:
    """LpPool (ONNX opset 22): ``(sum |x|^p)^(1/p)`` over each window."""
    pads, out = _geometry(x, kernel_shape, strides, pads, dilations, ceil_mode, auto_pad)
    return (_root(_pooled_sum(_power(x, p), kernel_shape, strides, pads, dilations, out), p),)


def _power(x: Array, p: int) -> Array:
    return np.square(x) if p == 2 else np.abs(x) ** p


def _root(x: Array, p: int) -> Array:
    if p == 1:
        return x
    root: Array = np.sqrt(x) if p == 2 else np.power(x, x.dtype.type(1.0 / p))
    return root


def _spatial(x: Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def global_max_pool(x: Array) -> tuple[Array, ...]:
    """GlobalMaxPool (ONNX opset 22); of 8-bit integers, too."""
    return (x.max(axis=_spatial(x), keepdims=True),)


def global_average_pool(x: Array) -> tuple[Array, ...]:
    """GlobalAveragePool (ONNX opset 22)."""
    return (mean(x, _spatial(x)),)


def global_lp_pool(x: Array, *, p: int = 2) -> tuple[Array, ...]:
    """GlobalLpPool (ONNX opset 22)."""
    return (_root(_power(x, p).sum(axis=_spatial(x), keepdims=True), p),)


def max_unpool(
    x: Array,
    indices: Array,
    output_shape: Array | None = None,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
) -> tuple[Array, ...]:
    """MaxUnpool (ONNX opset 22). Indices count through the tensor that MaxPool saw; ``output_shape`` may enlarge it."""
    rank = len(kernel_shape)
    sizes = [(x.shape[2 + i] - 1) * strides[i] + kernel_shape[i] - pads[i] - pads[rank + i] for i in range(rank)]
    inner = (*x.shape[:2], *sizes)
    outer = inner if output_shape is None else tuple(int(d) for d in output_shape)
    if len(outer) != len(inner) or any(o < i for o, i in zip(outer, inner, strict=True)):
        raise RunError(f"MaxUnpool: output_shape {outer} is smaller than the unpooled shape {inner}")
    flat = np.zeros(math.prod(inner), x.dtype)
    if indices.size and not (indices.min() >= 0 and indices.max() < flat.size):
        raise RunError(f"MaxUnpool: an index is outside of the unpooled shape {inner}")
    flat[indices.reshape(-1)] = x.reshape(-1)
    y = np.zeros(outer, x.dtype)
    y[tuple(slice(0, d) for d in inner)] = flat.reshape(inner)
    return (y,)


KERNELS: dict[str, Kernel] = {
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "LpPool": lp_pool,
    "GlobalMaxPool": global_max_pool,
    "GlobalAveragePool": global_average_pool,
    "GlobalLpPool": global_lp_pool,
    "MaxUnpool": max_unpool,
}
