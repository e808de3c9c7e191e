"""The quantized kernels, bit-exact: integer sums, then one fp32 rounding per step (no contraction)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optdnn.errors import InternalError
from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.conv import conv as float_conv
from optdnn.runtime.reference.conv import pad_spatial
from optdnn.runtime.reference.unary import KERNELS as UNARY
from optdnn.types import Array, DType, is_float

F = np.float32


def _sigmoid(x: Array) -> Array:
    return np.asarray(F(1) / (F(1) + np.exp(-x)))


def _rounded(x: Array, by: float, most: float, step: float) -> Array:
    """Numbers that are not negative, rounded to multiples of ``step``, at most ``most * step``; ``by`` is 1 / step."""
    return np.asarray(np.minimum(np.rint(x * F(by)), F(most)) * F(step))


def _mish(x: Array) -> Array:
    e = np.exp(np.minimum(x, F(20)))
    return np.asarray(x * (e * (e + F(2)) / (e * (e + F(2)) + F(2))))


def _erf(x: Array) -> Array:
    return np.asarray(UNARY["Erf"](x)[0])


STAGES: dict[str, Callable[..., Array]] = {
    "relu": lambda x: np.maximum(x, F(0)),
    "clip": lambda x, low, high: np.minimum(np.maximum(x, F(low)), F(high)),
    "leaky_relu": lambda x, alpha: np.asarray(np.where(x < 0, F(alpha) * x, x)),
    "elu": lambda x, alpha: np.asarray(np.where(x < 0, F(alpha) * (np.exp(x) - F(1)), x)),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "swish": lambda x, alpha: x * _sigmoid(F(alpha) * x),
    "tanh": np.tanh,
    "hard_sigmoid": lambda x, alpha, beta: np.clip(F(alpha) * x + F(beta), F(0), F(1)),
    "hard_swish": lambda x: x * np.clip(x * F(0.16666667) + F(0.5), F(0), F(1)),
    "rounded_silu": lambda x, by, most, step: x * _rounded(_sigmoid(x), by, most, step),
    "rounded_hard_swish": lambda x, by, most, step: (
        x * _rounded(np.clip(x * F(0.16666667) + F(0.5), F(0), F(1)), by, most, step)
    ),
    "gelu": lambda x: F(0.5) * x * (F(1) + _erf(x * F(0.70710678))),
    "gelu_tanh": lambda x: F(0.5) * x * (F(1) + np.tanh(F(0.79788456) * (x + F(0.044715) * x * x * x))),
    "softplus": lambda x: np.asarray(np.where(x > 20, x, np.log1p(np.exp(x)))),
    "mish": _mish,
    "selu": lambda x, alpha, gamma: np.asarray(F(gamma) * np.where(x < 0, F(alpha) * (np.exp(x) - F(1)), x)),
    "celu": lambda x, alpha: np.asarray(np.where(x < 0, F(alpha) * (np.exp(x / F(alpha)) - F(1)), x)),
    "softsign": lambda x: x / (F(1) + np.abs(x)),
    "sqrt": np.sqrt,
    "reciprocal": lambda x: F(1) / x,
    "abs": np.abs,
    "round": np.rint,
    "fake_quantize": lambda x, inverse, low, high, scale: (
        np.fmin(np.fmax(np.rint(x * F(inverse)), F(low)), F(high)) * F(scale)
    ),
    "sin": np.sin,
    "cos": np.cos,
    "square": lambda x: x * x,
    "mul_const": lambda x, value: x * F(value),
    "add_const": lambda x, value: x + F(value),
}
"""The kernels' stages, except those with a second tensor, in fp32 (see :data:`optdnn.runtime.cuda.compile.render.STAGES`)."""


def epilogue(
    total: Array,
    channel: Array,
    residual: Array | None,
    row_scales: Array | None = None,
    scale: Array | None = None,
    data_zero: Array | None = None,
    *,
    stages: Sequence[Sequence[Any]],
    residual_scale: float,
    residual_zero: int,
    low: float,
    high: float,
    zero: int,
    output_dtype: DType,
) -> Array:
    """Sums ``[n, channels, ...]`` to results of ``output_dtype``. ``channel``: each channel's scale and bias, ``[channels, 2]``,
    and what a stage ``channel_add`` adds.
    ``row_scales``: a further factor for each of the n. ``scale`` and ``data_zero``: the data's, if they are computed at run time;
    ``channel`` then also has the sum of each channel's weights after its bias."""
    shape = (1, -1, *(1,) * (total.ndim - 2))
    factors = channel[:, 0]
    if scale is not None and data_zero is not None:
        total = total - int(data_zero.reshape(())) * channel[:, 2].astype(np.float64).reshape(shape)
        factors = F(scale.reshape(())) * factors
    x = total.astype(F)
    if row_scales is not None:
        x = x * row_scales.reshape(-1, *(1,) * (total.ndim - 1))
    x = x * factors.reshape(shape)
    r = None
    if residual is not None:
        r = residual.astype(F)
        if residual.dtype.itemsize == 1:
            r = (r - F(residual_zero)) * F(residual_scale)
    for name, *values in stages:
        if name == "bias":
            x = x + channel[:, 1].reshape(shape)
        elif name == "channel_add":
            x = x + channel[:, 2].reshape(shape)
        elif name in ("add", "mul"):
            if r is None:
                raise InternalError(f"a quantized epilogue has a stage {name!r}, but no second tensor")
            x = x + r if name == "add" else x * r
        else:
            x = STAGES[name](x, *values).astype(F)
    return (
        np.asarray(x.astype(output_dtype)) if output_dtype.itemsize > 1 else bounded(x, low, high, zero, output_dtype)
    )


def bounded(x: Array, low: float, high: float, zero: int, dtype: DType) -> Array:
    """fp32 converted to an 8-bit type: clamped, rounded half to even, and (for integers) shifted."""
    x = np.minimum(np.maximum(x, F(low)), F(high))
    return np.asarray(x.astype(dtype) if is_float(dtype) else (np.rint(x).astype(np.int64) + zero).astype(dtype))


def unpermuted(weight: Array, channels: int) -> Array:
    """Weights whose rows are viewed as ``[sixteens, 8, 2, i, h, w]`` (see ``conv.pack_weights``) as OIHW."""
    flat = weight.reshape(-1, *weight.shape[3:]) if weight.ndim == 6 else weight
    return np.asarray(flat[:channels])


def conv(
    x: Array,
    weight: Array,
    channel: Array,
    residual: Array | None = None,
    row_scales: Array | None = None,
    scale: Array | None = None,
    data_zero: Array | None = None,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int = 1,
    input_zero: int = 0,
    **requantize: Any,
) -> tuple[Array, ...]:
    """A convolution of 8-bit values, then :func:`epilogue`. Padding has the value ``input_zero``. The sums do not use this zero
    point otherwise: its contribution is folded into the channel's bias."""
    wide = np.float64  # exact for sums of integers
    if input_zero and any(pads):
        x, pads = pad_spatial(x, pads, input_zero), (0,) * len(pads)
    w = unpermuted(weight, len(channel)).astype(wide)
    (total,) = float_conv(x.astype(wide), w, None, strides=strides, pads=pads, dilations=dilations, group=group)
    return (epilogue(total, channel, residual, row_scales, scale, data_zero, **requantize),)


def matmul(
    x: Array,
    weight: Array,
    channel: Array,
    residual: Array | None = None,
    row_scales: Array | None = None,
    scale: Array | None = None,
    data_zero: Array | None = None,
    **requantize: Any,
) -> tuple[Array, ...]:
    """Rows ``[..., k]`` times 8-bit weights ``[n, k]``, then :func:`epilogue` with one channel per column."""
    w = unpermuted(weight, len(channel)).reshape(len(channel), -1).astype(np.float64)
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64) @ w.T
    second = None if residual is None else residual.reshape(rows.shape)
    y = epilogue(rows, channel, second, row_scales, scale, data_zero, **requantize)
    return (y.reshape(*x.shape[:-1], len(channel)),)


def mean(
    x: Array, *, factor: float, input_zero: int, low: float, high: float, zero: int, output_dtype: DType
) -> tuple[Array, ...]:
    """Mean over all spatial axes (kept, with size 1) of 8-bit ``[n, c, ...]``: exact sums times ``factor``, requantized."""
    axes = tuple(range(2, x.ndim))
    total = (x.astype(np.int64) - input_zero).sum(axes, keepdims=True).astype(F) * F(factor)
    return (bounded(total, low, high, zero, output_dtype),)


KERNELS: dict[str, Kernel] = {"QuantizedConv": conv, "QuantizedMatMul": matmul, "QuantizedMean": mean}
