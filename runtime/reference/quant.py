"""NumPy kernels. Quantized operators, in exact integer arithmetic.

Values are rounded half to even, then shifted by the zero point, then saturated. Integer products are summed in float64, which
is exact up to 2**53 and runs on BLAS; sums wrap to 32 bits as ONNX's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.conv import conv
from optdnn.types import FP32, FP64, INT32, Array, DType, is_float


def along(v: Array, x: Array, axis: int, block_size: int) -> Array:
    """A scale or zero point in the shape that broadcasts with ``x``: one value, one per entry of ``axis``, or one per
    block of it."""
    if v.size == 1 and v.ndim <= 1:
        return v.reshape(())
    if block_size:
        return np.asarray(np.take(v, np.arange(x.shape[axis]) // block_size, axis))
    return v.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def saturated(rounded: Array, zero_point: Array | float, dtype: DType) -> Array:
    """Whole numbers plus the zero point, clamped to the integer type's range (NaN becomes 0)."""
    info = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    wide = np.nan_to_num(rounded.astype(FP64, copy=False), nan=0.0, posinf=np.inf, neginf=-np.inf)
    bounded: Array = np.clip(wide + zero_point, info.min, info.max)
    return bounded.astype(dtype)


def quantize_linear(
    x: Array,
    scale: Array,
    zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: DType,
    saturate: bool = True,
    precision: DType | None = None,
) -> tuple[Array, ...]:
    """QuantizeLinear (ONNX opset 25): ``saturate(round(x / scale) + zero_point)``; fp8 types have no zero point."""
    dtype = precision or scale.dtype
    quotient = x.astype(dtype) / along(scale, x, axis, block_size).astype(dtype)
    if not is_float(output_dtype):
        shift = 0 if zero_point is None else along(zero_point, x, axis, block_size).astype(FP64)
        return (saturated(np.rint(quotient), shift, output_dtype),)
    if saturate:
        top = quotient.dtype.type(float(ml_dtypes.finfo(output_dtype).max))  # type: ignore[no-untyped-call]
        quotient = np.clip(quotient, -top, top)
    return (quotient.astype(output_dtype),)


def dequantize_linear(
    x: Array,
    scale: Array,
    zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: DType | None = None,
) -> tuple[Array, ...]:
    """DequantizeLinear (ONNX opset 25): ``(x - zero_point) * scale``, computed in fp32 or in the scale's wider type."""
    wide = FP64 if FP64 in (scale.dtype, output_dtype) else FP32
    if zero_point is not None and not is_float(x.dtype):
        value = (x.astype(np.int64) - along(zero_point, x, axis, block_size).astype(np.int64)).astype(wide)
    else:
        value = x.astype(wide)
    y = value * along(scale, x, axis, block_size).astype(wide)
    return (y.astype(output_dtype or scale.dtype, copy=False),)


def _range(x: Array) -> tuple[Any, Any]:
    """The scale and zero point (a whole number) of uint8 for the range of x and 0, in the type of x."""
    zero = x.dtype.type(0)
    low, high = min(x.min(initial=zero), zero), max(x.max(initial=zero), zero)
    scale = (high - low) / x.dtype.type(255)
    scale = scale if scale > 0 else x.dtype.type(1)
    return scale, np.rint(np.clip(-low / scale, 0, 255))


def dynamic_range(x: Array) -> tuple[Array, ...]:
    """The scale and zero point of DynamicQuantizeLinear, computed in fp32 at least."""
    scale, zero_point = _range(x if x.dtype == FP64 else x.astype(FP32))
    return np.asarray(scale, FP32), np.asarray(zero_point, np.uint8)


def dynamic_quantize_linear(x: Array) -> tuple[Array, ...]:
    """DynamicQuantizeLinear (ONNX opset 11): uint8 values, and the scale and zero point for the range of x, in fp32 at least."""
    x = x if x.dtype == FP64 else x.astype(FP32)
    scale, zero_point = _range(x)
    y = saturated(np.rint(x / scale), float(zero_point), np.dtype(np.uint8))
    return y, np.asarray(scale, FP32), np.asarray(zero_point, np.uint8)


# ---------------------------------------------------------------- integer products


def _shifted(x: Array, zero_point: Array | None, shape: Sequence[int]) -> Array:
    """x minus its zero point, in float64; ``shape`` is the shape of a zero point with more than one entry."""
    if zero_point is None:
        return x.astype(FP64)
    return np.asarray(x.astype(FP64) - zero_point.astype(FP64).reshape(() if zero_point.size == 1 else shape))


def _wrapped(total: Array) -> Array:
    return total.astype(np.int64).astype(INT32)


def _by_row(v: Array, rank: int) -> tuple[int, ...]:
    """The shape in which a parameter of A (one per row, or with all axes) broadcasts with the product."""
    return v.shape if v.ndim == rank and rank > 1 else (-1, 1)


def _by_column(v: Array, rank: int) -> tuple[int, ...]:
    return v.shape if v.ndim == rank and rank > 1 else (-1,)


def matmul_integer(
    a: Array, b: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None
) -> tuple[Array, ...]:
    """MatMulInteger (ONNX opset 10): int32; zero points are scalars, or one per row of A and per column of B."""
    left = _shifted(a, a_zero_point, () if a_zero_point is None else _by_row(a_zero_point, a.ndim))
    right = _shifted(b, b_zero_point, () if b_zero_point is None else _by_column(b_zero_point, b.ndim))
    return (_wrapped(np.asarray(np.matmul(left, right))),)


def _requantized(total: Array, factor: Array, y_zero_point: Array, wide: DType) -> Array:
    """int32 sums converted to the output's type: scaled in the scales' type, rounded, shifted, saturated."""
    return saturated(np.rint(total.astype(wide) * factor.astype(wide)), y_zero_point.astype(FP64), y_zero_point.dtype)


def qlinear_matmul(
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
) -> tuple[Array, ...]:
    """QLinearMatMul (ONNX opset 21): scales and zero points are scalars, or one per row of A and per column of B."""
    (total,) = matmul_integer(a, b, a_zero_point, b_zero_point)
    wide = np.result_type(a_scale, FP32)
    left = a_scale.reshape(() if a_scale.size == 1 else _by_row(a_scale, a.ndim)).astype(wide)
    right = b_scale.reshape(() if b_scale.size == 1 else _by_column(b_scale, b.ndim)).astype(wide)
    return (_requantized(total, left * right / y_scale.astype(wide).reshape(()), y_zero_point.reshape(()), wide),)


def conv_integer(
    x: Array,
    w: Array,
    x_zero_point: Array | None = None,
    w_zero_point: Array | None = None,
    **window: Any,
) -> tuple[Array, ...]:
    """ConvInteger (ONNX opset 10): int32; padding has the value of x's zero point; w's may be one per output channel.

    ``window``: the attributes of a convolution.
    """
    shifted = _shifted(w, w_zero_point, (-1, *(1,) * (w.ndim - 1)))
    return (_wrapped(conv(_shifted(x, x_zero_point, ()), shifted, **window)[0]),)


def qlinear_conv(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    w: Array,
    w_scale: Array,
    w_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
    bias: Array | None = None,
    **window: Any,
) -> tuple[Array, ...]:
    """QLinearConv (ONNX opset 10): the bias is int32 with scale ``x_scale * w_scale``; w's scale may be one per channel."""
    (total,) = conv_integer(x, w, x_zero_point, w_zero_point, **window)
    channels = (-1, *(1,) * (x.ndim - 2))
    if bias is not None:
        total = total + bias.reshape(channels)
    wide = np.result_type(x_scale, FP32)
    factor = x_scale.astype(wide).reshape(()) * w_scale.astype(wide) / y_scale.astype(wide).reshape(())
    factor = factor.reshape(()) if factor.size == 1 else factor.reshape(channels)
    return (_requantized(total, factor, y_zero_point.reshape(()), wide),)


KERNELS: dict[str, Kernel] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "DynamicRange": dynamic_range,
    "MatMulInteger": matmul_integer,
    "QLinearMatMul": qlinear_matmul,
    "ConvInteger": conv_integer,
    "QLinearConv": qlinear_conv,
}
