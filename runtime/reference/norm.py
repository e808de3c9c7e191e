"""NumPy kernels. Normalizations: Batch-, Instance-, Group-, LayerNormalization, LRN, and the like."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.reduce import mean
from optdnn.types import FP32, FP64, Array, DType


def _per_channel(v: Array, rank: int) -> Array:
    return v.reshape(-1, *(1,) * (rank - 2))


def _wide(*arrays: Array) -> DType:
    """The type to compute in: float64 if an operand is float64, otherwise fp32."""
    return FP64 if any(a.dtype == FP64 for a in arrays) else FP32


def batch_normalization(
    x: Array, scale: Array, bias: Array, mean: Array, var: Array, *, epsilon: float = 1e-5
) -> tuple[Array, ...]:
    """BatchNormalization (ONNX opset 15, inference): x (N, C, *), the others (C), possibly of other float types."""
    wide = _wide(x, scale, mean)
    factor = scale.astype(wide) / np.sqrt(var.astype(wide) + wide.type(epsilon))
    y = (x - _per_channel(mean.astype(wide), x.ndim)) * _per_channel(factor, x.ndim)
    y += _per_channel(bias.astype(wide), x.ndim)
    return (y.astype(x.dtype, copy=False),)


def _standardize(x: Array, axes: Sequence[int], epsilon: float) -> tuple[Array, Array, Array]:
    """(x - mean) / sqrt(variance + epsilon), with the mean and the inverse deviation."""
    axes = tuple(axes)
    center = mean(x, axes)
    centered = x - center
    inverse = 1 / np.sqrt(mean(np.square(centered), axes) + x.dtype.type(epsilon))
    return centered * inverse, center, inverse


def instance_normalization(x: Array, scale: Array, bias: Array, *, epsilon: float = 1e-5) -> tuple[Array, ...]:
    """InstanceNormalization (ONNX opset 22): x (N, C, *), scale and bias (C)."""
    y, _, _ = _standardize(x, range(2, x.ndim), epsilon)
    return (y * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim),)


def group_normalization(
    x: Array, scale: Array, bias: Array, *, num_groups: int, epsilon: float = 1e-5, stash_type: DType = FP32
) -> tuple[Array, ...]:
    """GroupNormalization (ONNX opset 21): x (N, C, *), scale and bias (C). Never computes below fp32 or below x's type."""
    n, c = x.shape[:2]
    grouped = x.reshape(n, num_groups, (c // num_groups) * math.prod(x.shape[2:]))
    y = _standardize(grouped, (2,), epsilon)[0].reshape(x.shape)
    return (y * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim),)


def layer_normalization(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: DType = FP32,
) -> tuple[Array, ...]:
    """LayerNormalization (ONNX opset 17) over the axes from ``axis`` on: y, and the mean and inverse deviation.

    The statistics have ``stash_type``; the computation never runs below fp32 or below x's type.
    """
    wide = _wide(x)
    y, center, inverse = _standardize(x.astype(wide, copy=False), range(axis % x.ndim, x.ndim), epsilon)
    y = y * scale.astype(wide, copy=False)
    if bias is not None:
        y += bias.astype(wide, copy=False)
    return y.astype(x.dtype, copy=False), center.astype(stash_type, copy=False), inverse.astype(stash_type, copy=False)


def rms_normalization(
    x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: DType = FP32
) -> tuple[Array, ...]:
    """RMSNormalization (ONNX opset 23) over the axes from ``axis`` on; the result has scale's type."""
    wide = _wide(x, scale)
    x = x.astype(wide, copy=False)
    axes = tuple(range(axis % x.ndim, x.ndim))
    y = x / np.sqrt(mean(np.square(x), axes) + wide.type(epsilon))
    return ((y * scale.astype(wide, copy=False)).astype(scale.dtype, copy=False),)


def deviation_normalization(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    axis: int = -1,
    epsilon: float = 0.0,
    root_epsilon: float = 0.0,
    about_mean: bool = True,
    centered: bool = True,
) -> tuple[Array, ...]:
    """``x``, less its mean if ``centered``, divided by the deviation over the axes from ``axis`` on; then scale and bias.

    The deviation is about the mean, or about 0, and ``root_epsilon`` is added to it. Never computes below fp32 or below x's type.
    """
    wide = _wide(x)
    y, axes = x.astype(wide, copy=False), tuple(range(axis % x.ndim, x.ndim))
    deviations = y - mean(y, axes) if about_mean else y
    spread = np.sqrt(mean(np.square(deviations), axes) + wide.type(epsilon)) + wide.type(root_epsilon)
    y = (deviations if centered else y) / spread * scale.astype(wide, copy=False)
    if bias is not None:
        y = y + bias.astype(wide, copy=False)
    return (y.astype(x.dtype, copy=False),)


def lrn(x: Array, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> tuple[Array, ...]:
    """LRN (ONNX opset 13): x (N, C, *), the sum of squares runs over ``size`` neighboring channels."""
    before = (size - 1) // 2
    squares = np.square(x)
    total = np.zeros_like(x)
    channels = x.shape[1]
    for shift in range(max(-before, 1 - channels), min(size - before, channels)):
        low, high = max(0, -shift), min(x.shape[1], x.shape[1] - shift)
        if low < high:
            total[:, low:high] += squares[:, low + shift : high + shift]
    one = x.dtype.type
    return (x / (one(bias) + one(alpha / size) * total) ** one(beta),)


def lp_normalization(x: Array, *, axis: int = -1, p: int = 2, epsilon: float = 0.0) -> tuple[Array, ...]:
    """LpNormalization (ONNX opset 22), with norms of at least ``epsilon``; zero if the norm is zero."""
    norm = (np.abs(x) if p == 1 else np.square(x)).sum(axis=axis, keepdims=True)
    if p == 2:
        norm = np.sqrt(norm)
    norm = np.maximum(norm, norm.dtype.type(epsilon))
    return (x / np.where(norm == 0, np.ones_like(norm), norm),)


def mean_variance_normalization(x: Array, *, axes: Sequence[int] = (0, 2, 3)) -> tuple[Array, ...]:
    """MeanVarianceNormalization (ONNX opset 13): 1e-9 is added to the deviation, as in ONNX's function body."""
    axes = tuple(axes)
    centered = x - mean(x, axes)
    deviation = np.sqrt(mean(np.square(centered), axes))
    return (centered / (deviation + x.dtype.type(1e-9)),)


def sinkhorn(x: Array, *, axis: int, count: int, epsilon: float = 0.0, floor: float = 0.0) -> tuple[Array, ...]:
    """Matrices (the last two axes) divided ``count`` times by their sums plus ``epsilon``: first along ``axis``, then in turn.

    A divisor is at least ``floor``, if that is not 0."""
    for k in range(count):
        divisor = x.sum(axis=axis if k % 2 == 0 else -3 - axis, keepdims=True) + x.dtype.type(epsilon)
        x = x / (np.maximum(divisor, x.dtype.type(floor)) if floor else divisor)
    return (x,)


KERNELS: dict[str, Kernel] = {
    "BatchNormalization": batch_normalization,
    "InstanceNormalization": instance_normalization,
    "GroupNormalization": group_normalization,
    "LayerNormalization": layer_normalization,
    "RMSNormalization": rms_normalization,
    "DeviationNormalization": deviation_normalization,
    "LRN": lrn,
    "LpNormalization": lp_normalization,
    "MeanVarianceNormalization": mean_variance_normalization,
    "Sinkhorn": sinkhorn,
}
