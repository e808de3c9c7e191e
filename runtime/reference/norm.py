"""NumPy kernels. Normalizations: Batch-, Instance-, Group-, LayerNormalization, LRN, and the like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from optdnn.runtime.reference.base import Kernel

from optdnn.types import Array


def _per_channel(v: Array, rank: int) -> Array:
    return v.reshape(-1, *(1,) * (rank - 2))


def batch_normalization(
    x: Array, scale: Array, bias: Array, mean: Array, var: Array, *, epsilon: float = 1e-5
) -> tuple[Array, ...]:
    """BatchNormalization (ONNX opset 15, inference): x (N, C, *), the others (C)."""
    wide = np.result_type(x, scale, mean)
    factor = scale / np.sqrt(var.astype(wide) + wide.type(epsilon))
    y = (x - _per_channel(mean, x.ndim)) * _per_channel(factor, x.ndim) + _per_channel(bias, x.ndim)
    return (y.astype(x.dtype, copy=False),)


def _standardize(x: Array, axes: Sequence[int], epsilon: float) -> tuple[Array, Array, Array]:
    """(x - mean) / sqrt(variance + epsilon), with the mean and the inverse deviation."""
    axes = tuple(axes)
    mean = x.mean(axis=axes, keepdims=True)
    centred = x - mean
    inverse = 1 / np.sqrt(np.square(centred).mean(axis=axes, keepdims=True) + x.dtype.type(epsilon))
    return centred * inverse, mean, inverse


def instance_normalization(x: Array, scale: Array, bias: Array, *, epsilon: float = 1e-5) -> tuple[Array, ...]:
    """InstanceNormalization (ONNX opset 22): x (N, C, *), scale and bias (C)."""
    y, _, _ = _standardize(x, range(2, x.ndim), epsilon)
    return (y * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim),)


KERNELS: dict[str, Kernel] = {
    "BatchNormalization": batch_normalization,
    "InstanceNormalization": instance_normalization,
}
