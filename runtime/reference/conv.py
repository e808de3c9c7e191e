"""NumPy kernels. Convolutions: Conv, ConvTranspose.

Conv gathers the windows of a bounded number of images at a time (im2col) and leaves the arithmetic to one matrix product
per group; depthwise convolutions accumulate over the kernel's taps instead, vectorized over channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.window import static_window
from optdnn.types import Array

Index: TypeAlias = tuple[Any, ...]
BUFFER_BYTES = 2 << 20
"""Bound of the im2col buffer: it stays in the processor's cache."""


def pad_spatial(x: Array, pads: Sequence[int], value: int = 0) -> Array:
    """``x`` (N, C, *spatial) padded with ``value`` by ``pads`` (begins then ends; a negative pad crops)."""
    n = x.ndim - 2
    before, after = pads[:n], pads[n:]
    if any(p > 0 for p in pads):
        widths = [(0, 0), (0, 0), *((max(b, 0), max(a, 0)) for b, a in zip(before, after, strict=True))]
        x = np.pad(x, widths, constant_values=value)
    if any(p < 0 for p in pads):
        cut: Index = tuple(slice(max(-b, 0), x.shape[2 + i] - max(-after[i], 0)) for i, b in enumerate(before))
        x = x[(..., *cut)]
    return x


def taps(
    kernel: Sequence[int], out: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Iterator[tuple[Index, Index]]:
    """Each position in the kernel, with the part of the padded input that it is multiplied with; both index (N, C, *spatial)
    arrays."""
    images_and_channels = (slice(None), slice(None))
    for at in itertools.product(*map(range, kernel)):
        where = (
            slice(i * d, i * d + (o - 1) * s + 1, s) if o else slice(0, 0)
            for i, o, s, d in zip(at, out, strides, dilations, strict=True)
        )
        yield (*images_and_channels, *at), (*images_and_channels, *where)


def conv(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int = 1,
    auto_pad: str = "NOTSET",
) -> tuple[Array, ...]:
    """Conv (ONNX opset 22): x (N, C, *spatial), w (M, C / group, *kernel), bias (M); result (N, M, *out)."""
    kernel, spatial = w.shape[2:], x.shape[2:]
    explicit, out = static_window(auto_pad, pads, spatial, kernel, strides, dilations)
    x = pad_spatial(x, explicit)
    n, m, per_group = x.shape[0], w.shape[0], w.shape[1]
    y = np.empty((n, m, *out), np.result_type(x, w))
    if per_group == 1 and group > 1:
        _depthwise(x, w, y, strides, dilations)
    elif y.size:
        _im2col(x, w, y, strides, dilations, group)
    if bias is not None:
        y += bias.reshape(-1, *(1,) * len(kernel))
    return (y,)


def _depthwise(x: Array, w: Array, y: Array, strides: Sequence[int], dilations: Sequence[int]) -> None:
    kernel, out = w.shape[2:], y.shape[2:]
    channels, each = x.shape[1], w.shape[0] // x.shape[1]
    y5 = y.reshape(y.shape[0], channels, each, *out)
    y5[...] = 0
    scratch = np.empty_like(y5)
    for at, where in taps(kernel, out, strides, dilations):
        factor = w[at].reshape(channels, each, *(1,) * len(out))
        np.multiply(x[where][:, :, None], factor, out=scratch)
        y5 += scratch


def _im2col(x: Array, w: Array, y: Array, strides: Sequence[int], dilations: Sequence[int], group: int) -> None:
    kernel, out = w.shape[2:], y.shape[2:]
    n, channels = x.shape[:2]
    depth, points = w.shape[1] * math.prod(kernel), math.prod(out)
    weights = w.reshape(group, len(w) // group, depth)
    target = y.reshape(n, group, len(w) // group, points)
    if math.prod(kernel) == 1 and all(s == 1 for s in strides):
        np.matmul(weights, np.ascontiguousarray(x).reshape(n, group, depth, points), out=target)
        return
    # Bands of the first spatial axis bound the buffer if even one image's windows are too many.
    row = max(1, channels * math.prod(kernel) * (points // out[0]) * x.itemsize)
    rows = max(1, min(out[0], BUFFER_BYTES // row))
    images = max(1, min(n, BUFFER_BYTES // (row * rows)))
    for start in range(0, n, images):
        part = x[start : start + images]
        for top in range(0, out[0], rows):
            size = (min(rows, out[0] - top), *out[1:])
            band = part[:, :, top * strides[0] :]
            columns = np.empty((len(part), channels, *kernel, *size), x.dtype)
            for at, where in taps(kernel, size, strides, dilations):
                columns[at] = band[where]
            result = np.matmul(weights, columns.reshape(len(part), group, depth, math.prod(size)))
            y[start : start + images, :, top : top + rows] = result.reshape(len(part), len(w), *size)


def conv_transpose(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    output_padding: Sequence[int],
    group: int = 1,
    output_shape: Sequence[int] = (),
    auto_pad: str = "NOTSET",
) -> tuple[Array, ...]:
    """ConvTranspose (ONNX opset 22): x (N, C, *spatial), w (C, M / group, *kernel), bias (M); result (N, M, *out)."""
    kernel, spatial = w.shape[2:], x.shape[2:]
    rank = len(kernel)
    n, per_group = x.shape[0], w.shape[1]
    full = [(spatial[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 for i in range(rank)]
    if output_shape:
        both = [transpose_pads(full[i] + output_padding[i] - output_shape[i], auto_pad) for i in range(rank)]
        pads = [b for b, _ in both] + [e for _, e in both]
    weights = w.reshape(group, w.shape[0] // group, per_group * math.prod(kernel)).swapaxes(1, 2)
    points = math.prod(spatial)
    y = np.zeros((n, group * per_group, *full), np.result_type(x, w))
    images = max(1, BUFFER_BYTES // max(1, weights.shape[0] * weights.shape[1] * points * y.itemsize))
    for start in range(0, n, images):
        part, target = x[start : start + images], y[start : start + images]
        columns = np.matmul(weights, part.reshape(len(part), group, w.shape[0] // group, points))
        columns = columns.reshape(len(part), group * per_group, *kernel, *spatial)
        for at, where in taps(kernel, spatial, strides, dilations):
            target[where] += columns[at]
    crop = [-p for p in pads[:rank]] + [o - p for o, p in zip(output_padding, pads[rank:], strict=True)]
    y = pad_spatial(y, crop)
    if bias is not None:
        y = y + bias.reshape(-1, *(1,) * rank)
    return (y,)


def transpose_pads(total: int, auto_pad: str) -> tuple[int, int]:
    """The split of ConvTranspose's total padding into (begin, end)."""
    half = total // 2
    return (half, total - half) if auto_pad == "SAME_UPPER" else (total - half, half)


KERNELS: dict[str, Kernel] = {"Conv": conv, "ConvTranspose": conv_transpose}
