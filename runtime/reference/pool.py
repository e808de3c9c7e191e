"""NumPy kernels. Pooling: MaxPool, AveragePool, LpPool and their global forms, MaxUnpool.

Maximum and sum over a rectangular window are separable, so each pool runs one axis after the other: a kernel of k x k
costs 2 k vectorized passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import RunError
from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.reduce import mean
from optdnn.runtime.reference.window import static_window
from optdnn.types import Array, is_float


@dataclass(frozen=True)
class _Window:
    """A window's sizes per spatial axis: ``pads`` are explicit, ``out`` the number of windows."""

    kernel: Sequence[int]
    strides: Sequence[int]
    pads: Sequence[int]
    dilations: Sequence[int]
    out: Sequence[int]

    @classmethod
    def of(
        cls,
        x: Array,
        kernel_shape: Sequence[int],
        strides: Sequence[int],
        pads: Sequence[int],
        dilations: Sequence[int],
        ceil_mode: bool = False,
        auto_pad: str = "NOTSET",
    ) -> _Window:
        """From a pool's attributes."""
        explicit, out = static_window(auto_pad, pads, x.shape[2:], kernel_shape, strides, dilations, ceil_mode)
        return cls(kernel_shape, strides, explicit, dilations, out)

    def taps(self, x: Array, i: int, fill: float) -> list[Array]:
        """The elements that each tap along spatial axis ``i`` reads: views of ``x``, padded by ``fill``."""
        begin, stride, dilation, out = self.pads[i], self.strides[i], self.dilations[i], self.out[i]
        # The end padding that makes the last window fit exactly (negative: elements no window reaches).
        end = (out - 1) * stride + (self.kernel[i] - 1) * dilation + 1 - x.shape[2 + i] - begin
        x = _along(x, 2 + i, begin, end, fill)
        lead = (slice(None),) * (2 + i)
        return [
            x[(*lead, slice(k * dilation, k * dilation + (out - 1) * stride + 1 if out else 0, stride))]
            for k in range(self.kernel[i])
        ]


def _along(x: Array, axis: int, begin: int, end: int, value: float) -> Array:
    """``x`` padded (or, for a negative ``end``, cropped) along one axis."""
    if begin > 0 or end > 0:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (max(begin, 0), max(end, 0))
        x = np.pad(x, widths, constant_values=np.asarray(value).astype(x.dtype))
    if end < 0:
        x = x[(slice(None),) * axis + (slice(0, end),)]
    return x


def _pooled_sum(x: Array, window: _Window) -> Array:
    for i in reversed(range(len(window.kernel))):
        first, *others = window.taps(x, i, 0)
        x = first.copy()
        for view in others:
            x += view
    return x


def max_pool(x: Array, *, storage_order: int = 0, indices: bool = False, **window: Any) -> tuple[Array, ...]:
    """MaxPool (ONNX opset 22): values and, with ``indices``, the flat index of each maximum (the first of equals).

    An index counts through the whole tensor; ``storage_order`` 1 counts the spatial axes in column-major order. ``window``: the
    attributes of all pools.
    """
    w = _Window.of(x, **window)
    lowest = -math.inf if is_float(x.dtype) else int(np.iinfo(x.dtype).min)
    rank, spatial = len(w.kernel), x.shape[2:]
    y, where = x, None
    if indices:
        flat = np.arange(math.prod(spatial)).reshape(spatial, order="F" if storage_order else "C")
        channels = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1,) * rank) * flat.size
        where = channels + flat
    for i in reversed(range(rank)):
        first_view, *views = w.taps(y, i, lowest)
        best = first_view.copy()
        if where is None:
            for view in views:
                np.maximum(best, view, out=best)
        else:
            first_mark, *marks = w.taps(where, i, -1)
            first = first_mark.copy()
            for view, mark in zip(views, marks, strict=True):
                better = (view > best) | (first < 0)
                np.copyto(best, view, where=better)
                np.copyto(first, mark, where=better)
            where = first
        y = best
    return (y,) if where is None else (y, where)


def average_pool(x: Array, *, count_include_pad: bool = False, **window: Any) -> tuple[Array, ...]:
    """AveragePool (ONNX opset 22). Positions that ``ceil_mode`` adds beyond the padding never count."""
    w = _Window.of(x, **window)
    total = _pooled_sum(x, w)
    rank = len(w.kernel)
    counts: Array = np.ones((1,) * rank, x.dtype)
    for i in range(rank):
        at = np.arange(w.out[i])[:, None] * w.strides[i] + np.arange(w.kernel[i]) * w.dilations[i] - w.pads[i]
        low, high = (-w.pads[i], x.shape[2 + i] + w.pads[rank + i]) if count_include_pad else (0, x.shape[2 + i])
        counted = ((at >= low) & (at < high)).sum(axis=1).astype(x.dtype)
        counts = counts * counted.reshape(-1, *(1,) * (rank - 1 - i))
    with np.errstate(invalid="ignore"):
        return (total / counts,)


def lp_pool(x: Array, *, p: int = 2, **window: Any) -> tuple[Array, ...]:
    """LpPool (ONNX opset 22): ``(sum |x|^p)^(1/p)`` over each window."""
    return (_root(_pooled_sum(_power(x, p), _Window.of(x, **window)), p),)


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
    """GlobalMaxPool (ONNX opset 22), also of 8-bit integers."""
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
