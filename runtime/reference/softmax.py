"""NumPy kernels. Softmax, LogSoftmax, Hardmax."""

from __future__ import annotations

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array


def softmax(x: Array, *, axis: int = -1) -> tuple[Array, ...]:
    """Softmax (ONNX opset 13), stable: the maximum is subtracted first."""
    if not x.size:
        return (x,)
    y = np.exp(x - x.max(axis=axis, keepdims=True))
    y /= y.sum(axis=axis, keepdims=True)
    return (y,)


def masked_softmax(x: Array) -> tuple[Array, ...]:
    """Softmax over the last axis; a row of nothing but -inf gives zeros."""
    top = x.max(axis=-1, keepdims=True)
    e = np.exp(x - np.where(np.isneginf(top), 0, top).astype(x.dtype))
    total = e.sum(axis=-1, keepdims=True)
    return (e / np.where(total == 0, 1, total).astype(x.dtype),)


def log_softmax(x: Array, *, axis: int = -1) -> tuple[Array, ...]:
    """LogSoftmax (ONNX opset 13), stable."""
    if not x.size:
        return (x,)
    shifted = x - x.max(axis=axis, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True)),)


def hardmax(x: Array, *, axis: int = -1) -> tuple[Array, ...]:
    """Hardmax (ONNX opset 13): 1 at the first maximum along ``axis``, 0 elsewhere."""
    y = np.zeros_like(x)
    if x.size:
        np.put_along_axis(y, np.expand_dims(x.argmax(axis=axis), axis), 1, axis=axis)
    return (y,)


KERNELS: dict[str, Kernel] = {"Softmax": softmax, "LogSoftmax": log_softmax, "Hardmax": hardmax}
