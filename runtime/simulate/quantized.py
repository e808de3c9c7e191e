"""What the quantized kernels compute, to the bit: integer sums, then one fp32 rounding per step (no contraction)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array

F = np.float32


def _sigmoid(x: Array) -> Array:
    return np.asarray(F(1) / (F(1) + np.exp(-x)))


def _erf(x: Array) -> Array:
    return np.asarray(run_kernel("Erf", [x], {})[0])


STAGES: dict[str, Callable[..., Array]] = {
    "relu": lambda x: np.maximum(x, F(0)),
    "clip": lambda x, low, high: np.minimum(np.maximum(x, F(low)), F(high)),
    "leaky_relu": lambda x, alpha: np.asarray(np.where(x < 0, F(alpha) * x, x)),
    "elu": lambda x, alpha: np.asarray(np.where(x < 0, F(alpha) * (np.exp(x) - F(1)), x)),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
    "hard_sigmoid": lambda x, alpha, beta: np.clip(F(alpha) * x + F(beta), F(0), F(1)),
    "hard_swish": lambda x: x * np.clip(x * F(0.16666667) + F(0.5), F(0), F(1)),
    "gelu": lambda x: F(0.5) * x * (F(1) + _erf(x * F(0.70710678))),
    "gelu_tanh": lambda x: F(0.5) * x * (F(1) + np.tanh(F(0.79788456) * (x + F(0.044715) * x * x * x))),
    "softplus": lambda x: np.asarray(np.where(x > 20, x, np.log1p(np.exp(x)))),
    "mul_const": lambda x, value: x * F(value),
    "add_const": lambda x, value: x + F(value),
}
"""The kernels' stages but for those with a second tensor, in fp32 (see :data:`optdnn.runtime.cuda.render.STAGES`)."""

_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_NARROW = {"int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8), "float8_e4m3fn": _FLOAT8}


def epilogue(total: Array, channel: Array, residual: Array | None, attrs: Mapping[str, Any]) -> Array:
    """Sums ``[n, channels, ...]`` to results. ``channel``: scale and bias of each channel ``[channels, 2]``.

    ``attrs``: ``stages``, ``residual_scale``, ``residual_zero``, ``low``, ``high``, ``zero``, ``dtype`` (of the result; with
    a float one there is no rounding).
    """
    shape = (1, -1, *(1,) * (total.ndim - 2))
    x = total.astype(F) * channel[:, 0].reshape(shape)
    r = None
    if residual is not None:
        r = residual.astype(F)
        if residual.dtype.itemsize == 1:
            r = (r - F(attrs["residual_zero"])) * F(attrs["residual_scale"])
    for name, *values in attrs["stages"]:
        if name == "bias":
            x = x + channel[:, 1].reshape(shape)
        elif name in ("add", "mul"):
            assert r is not None
            x = x + r if name == "add" else x * r
        else:
            x = STAGES[name](x, *values).astype(F)
    dtype = _NARROW.get(attrs["dtype"])
    if dtype is None:
        return np.asarray(x)
    x = np.minimum(np.maximum(x, F(attrs["low"])), F(attrs["high"]))
    return np.asarray(
        x.astype(dtype) if dtype == _FLOAT8 else (np.rint(x).astype(np.int64) + int(attrs["zero"])).astype(dtype)
    )


def unpermuted(weight: Array, channels: int) -> Array:
    """Weights whose rows are viewed as ``[sixteens, 8, 2, i, h, w]`` (see ``conv.pack_weights``) as OIHW."""
    flat = weight.reshape(-1, *weight.shape[3:]) if weight.ndim == 6 else weight
    return np.asarray(flat[:channels])


def conv(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """Pixels ``[n, i, h, w]``, weights, channel pairs, residual or None. ``attrs``: as :func:`epilogue`, and ``strides``, ``pads``,
    ``dilations``, ``group``."""
    x, weight, channel, residual = operands
    assert x is not None
    assert weight is not None
    assert channel is not None
    wide = np.float64  # sums of integers are exact in it
    w = unpermuted(weight, len(channel)).astype(wide)
    names = ("strides", "pads", "dilations", "group")
    (total,) = run_kernel("Conv", [x.astype(wide), w], {**{k: attrs[k] for k in names}, "auto_pad": "NOTSET"})
    return (epilogue(total, channel, residual, attrs),)
