"""NumPy kernels. Pointwise operators of several operands: arithmetic, comparison, logic, Where, Clip; and Cast."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from optdnn.runtime.reference.base import Kernel
from optdnn.types import (
    BF16,
    BOOL,
    DTYPES,
    FP16,
    FP32,
    FP64,
    NARROW_FLOATS,
    NARROW_INTEGERS,
    Array,
    DType,
    is_float,
    is_int,
)


def _two(fn: Callable[[Any, Any], Any]) -> Kernel:
    return lambda a, b: (fn(a, b),)


def _many(fn: Callable[[Any, Any], Any]) -> Kernel:
    return lambda *arrays: (reduce(fn, arrays),)


def _snake(x: Array, rate: Array, gain: Array) -> tuple[Array, ...]:
    """``x + gain sin(rate x)^2`` (Ziyin et al., "Neural networks fail to learn periodic functions and how to fix it", 2020)."""
    return (x + gain * np.square(np.sin(rate * x)),)


def _div(a: Array, b: Array) -> tuple[Array, ...]:
    if not is_int(a.dtype):
        return (a / b,)
    quotient = np.floor_divide(a, b)
    if a.dtype.kind == "i":  # ONNX rounds toward zero, NumPy down
        quotient = quotient + ((quotient * b != a) & ((a < 0) != (b < 0)) & (b != 0))
    return (np.asarray(quotient, dtype=a.dtype),)


def _pow(x: Array, y: Array) -> tuple[Array, ...]:
    if is_int(x.dtype) and is_int(y.dtype) and np.all(y >= 0):
        return (np.power(x, y.astype(x.dtype)),)
    if is_int(x.dtype):
        return (np.power(x.astype(np.float64), y.astype(np.float64)).astype(x.dtype),)
    return (np.power(x, y.astype(x.dtype)),)


def _mod(a: Array, b: Array, fmod: bool) -> tuple[Array, ...]:
    return (np.fmod(a, b) if fmod else np.mod(a, b),)


def _bit_shift(x: Array, y: Array, direction: str) -> tuple[Array, ...]:
    """ONNX BitShift (opset 28): a shift by a negative count or past the width leaves only the bits of the sign extension."""
    x, y = np.broadcast_arrays(x, y)
    width = x.dtype.itemsize * 8
    beyond = (y < 0) | (y >= width)
    count = np.where(beyond, 0, y).astype(x.dtype)
    if direction == "LEFT":
        return (np.where(beyond, 0, np.left_shift(x, count)).astype(x.dtype),)
    return (np.where(beyond, np.where(x < 0, -1, 0), np.right_shift(x, count)).astype(x.dtype),)


def _mean(*arrays: Array) -> tuple[Array, ...]:
    return (reduce(np.add, arrays) / len(arrays),)


def _clip(x: Array, low: Array | None = None, high: Array | None = None) -> tuple[Array, ...]:
    """``min(max(x, low), high)``; ``low`` and ``high`` hold one element each."""
    if low is not None:
        x = np.maximum(x, np.reshape(low, ()))
    return (x if high is None else np.minimum(x, np.reshape(high, ())),)


def _where(condition: Array, x: Array, y: Array) -> tuple[Array, ...]:
    return (np.where(condition, x, y),)


def as_dtype(to: npt.DTypeLike | str) -> DType:
    """A dtype from a dtype or from its short name."""
    return DTYPES[to] if isinstance(to, str) and to in DTYPES else np.dtype(to)


_E8M0 = DTYPES["fp8_e8m0"]


def cast(x: Array, to: npt.DTypeLike | str, saturate: bool = True, round_mode: str = "up") -> tuple[Array, ...]:
    """ONNX Cast: floats to integers truncate, to narrower floats round to nearest even; ``saturate`` clamps floats of 8 and
    fewer bits. ``round_mode`` is for E8M0, powers of two: "up", "down" or "nearest"."""
    dtype = as_dtype(to)
    if dtype == x.dtype:
        return (x,)
    if x.dtype in (BF16, *NARROW_FLOATS):  # float32 holds them exactly
        x = x.astype(np.float32)
    if x.dtype in NARROW_INTEGERS:
        x = x.astype(np.int32)
    if dtype == BOOL:
        return (x != 0,)
    if dtype == _E8M0:
        return (_power_of_two(x.astype(np.float32), saturate, round_mode),)
    if dtype in (BF16, *NARROW_FLOATS) and x.dtype not in (FP16, FP32):
        x = _round_to_odd(x.astype(np.float64))
    if dtype in NARROW_FLOATS:
        top = x.dtype.type(float(ml_dtypes.finfo(dtype).max))  # type: ignore[no-untyped-call]
        return ((np.clip(x, -top, top) if saturate else x).astype(dtype),)
    if dtype in NARROW_INTEGERS:  # out-of-range floats are undefined; the low bits are kept, as for integers
        whole = np.trunc(x).astype(np.int64) if is_float(x.dtype) else x.astype(np.int64)
        return (whole.astype(dtype),)
    if is_float(x.dtype) and dtype.kind == "u":  # negative values are undefined; wrap them as a signed cast does
        x = np.where(x < 0, np.trunc(x).astype(np.int64).astype(np.uint64), x.astype(np.uint64))
    return (x.astype(dtype),)


def _power_of_two(x: Array, saturate: bool, round_mode: str) -> Array:
    """float32 magnitudes as E8M0: only the biased exponent, 255 for NaN and infinity (OCP Microscaling Formats 1.0)."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    exponent = (bits >> 23) & np.uint32(0xFF)
    fraction = bits & np.uint32(0x7FFFFF)
    half = np.uint32(1 << 22)
    above = {
        "up": fraction > 0,
        "down": fraction < 0,
        "nearest": (fraction > half) | ((fraction == half) & (exponent > 0)),
    }
    code = exponent + (above[round_mode] & (exponent < 255))
    if saturate:
        code = np.where((exponent < 255) & (code > 254), 254, code)
    made: Array = code.astype(np.uint8).view(_E8M0).reshape(x.shape)
    return made


def _round_to_odd(x: Array) -> Array:
    """float64 to float32 by rounding to odd, after which rounding once more to bf16 rounds as if from float64 itself."""
    y = x.astype(np.float32)
    back = y.astype(FP64)
    bits = np.atleast_1d(y).view(np.int32).copy()
    exact = np.atleast_1d((back == x) | ~np.isfinite(x) | ~np.isfinite(back))
    away = np.atleast_1d(np.abs(back) > np.abs(x))
    bits[~exact & away] -= 1  # truncate toward zero …
    bits[~exact] |= 1  # … and remember that something was lost
    return bits.view(np.float32).reshape(x.shape)


KERNELS: dict[str, Kernel] = {
    "Add": _two(np.add),
    "Sub": _two(np.subtract),
    "Mul": _two(np.multiply),
    "Div": _div,
    "Pow": _pow,
    "Mod": _mod,
    "Snake": _snake,
    "PRelu": _two(lambda x, slope: np.where(x < 0, x * slope, x)),
    "Min": _many(np.minimum),
    "Max": _many(np.maximum),
    "Sum": _many(np.add),
    "Mean": _mean,
    "Equal": _two(np.equal),
    "Less": _two(np.less),
    "LessOrEqual": _two(np.less_equal),
    "Greater": _two(np.greater),
    "GreaterOrEqual": _two(np.greater_equal),
    "And": _two(np.logical_and),
    "Or": _two(np.logical_or),
    "Xor": _two(np.logical_xor),
    "BitwiseAnd": _two(np.bitwise_and),
    "BitwiseOr": _two(np.bitwise_or),
    "BitwiseXor": _two(np.bitwise_xor),
    "BitShift": _bit_shift,
    "Where": _where,
    "Clip": _clip,
    "Cast": cast,
}
