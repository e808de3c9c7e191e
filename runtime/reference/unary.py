"""NumPy kernels. Unary pointwise operators and activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array


def _one(fn: Callable[..., Array]) -> Kernel:
    return lambda x, **attrs: (fn(x, **attrs),)


# Coefficients of W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969) 631-637,
# highest power first: erf on [0, 0.46875], then erfc on [0.46875, 4] and on [4, inf).
_ERF_P = (
    1.85777706184603153e-1,
    3.16112374387056560e0,
    1.13864154151050156e2,
    3.77485237685302021e2,
    3.20937758913846947e3,
)
_ERF_Q = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_MID_P = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e0,
    6.61191906371416295e1,
    2.98635138197400131e2,
    8.81952221241769090e2,
    1.71204761263407058e3,
    2.05107837782607147e3,
    1.23033935479799725e3,
)
_MID_Q = (
    1.0,
    1.57449261107098347e1,
    1.17693950891312499e2,
    5.37181101862009858e2,
    1.62138957456669019e3,
    3.29079923573345963e3,
    4.36261909014324716e3,
    3.43936767414372164e3,
    1.23033935480374942e3,
)
_FAR_P = (
    1.63153871373020978e-2,
    3.05326634961232344e-1,
    3.60344899949804439e-1,
    1.25781726111229246e-1,
    1.60837851487422766e-2,
    6.58749161529837803e-4,
)
_FAR_Q = (
    1.0,
    2.56852019228982242e0,
    1.87295284992346725e0,
    5.27905102951428412e-1,
    6.05183413124413191e-2,
    2.33520497626869185e-3,
)


def _horner(coefficients: tuple[float, ...], x: Array) -> Array:
    total = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total *= x
        total += c
    return total


def _erfc_tail(x: Array) -> Array:
    """erfc for x >= 0.46875 in float64."""
    out = np.empty_like(x)
    near = x <= 4.0
    y = x[near]
    out[near] = _horner(_MID_P, y) / _horner(_MID_Q, y)
    y = x[~near]
    z = 1.0 / (y * y)
    out[~near] = (1.0 / math.sqrt(math.pi) - z * _horner(_FAR_P, z) / _horner(_FAR_Q, z)) / y
    # exp(-x*x) in two factors: the square of the leading bits is exact, so no relative accuracy is lost in the tail.
    lead = np.trunc(x * 16.0) / 16.0
    return np.asarray(out * np.exp(-lead * lead) * np.exp(-(x - lead) * (x + lead)))


def erf(x: Array) -> Array:
    """Error function to 1e-15; evaluated in float64 and rounded once to the dtype of ``x``."""
    x64 = np.atleast_1d(np.asarray(x, dtype=np.float64))
    size = np.abs(x64)
    out = np.where(np.isnan(x64), np.nan, np.sign(x64))  # correct to the last bit beyond 6
    near = size <= 0.46875
    y = x64[near]
    z = y * y
    out[near] = y * _horner(_ERF_P, z) / _horner(_ERF_Q, z)
    middle = (size > 0.46875) & (size < 6.0)
    y = size[middle]
    out[middle] = np.copysign(1.0 - _erfc_tail(y), x64[middle])
    return out.reshape(np.shape(x)).astype(x.dtype)


def sigmoid(x: Array) -> Array:
    """Logistic function, without overflow for either sign."""
    t = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + t), t / (1 + t))


def softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def gelu(x: Array, approximate: str = "none") -> Array:
    """ONNX Gelu: ``x * Phi(x)``, by erf or by its tanh approximation."""
    if approximate == "tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))))
    return np.asarray(0.5 * x * (1 + erf(x * math.sqrt(0.5))))


def _elu(x: Array, alpha: float) -> Array:
    return np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x)


def _celu(x: Array, alpha: float) -> Array:
    return np.maximum(x, 0) + np.minimum(alpha * np.expm1(x / alpha), 0)


def _selu(x: Array, alpha: float, gamma: float) -> Array:
    return gamma * np.where(x <= 0, alpha * np.expm1(np.minimum(x, 0)), x)


def _shrink(x: Array, lambd: float, bias: float) -> Array:
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)).astype(x.dtype)


def _isinf(x: Array, detect_negative: bool, detect_positive: bool) -> Array:
    return np.asarray((np.isposinf(x) & bool(detect_positive)) | (np.isneginf(x) & bool(detect_negative)))


def _same(fn: Callable[[Any], Any]) -> Kernel:
    return lambda x: (fn(x),)


KERNELS: dict[str, Kernel] = {
    "Relu": _one(lambda x: np.maximum(x, 0)),
    "LeakyRelu": _one(lambda x, alpha: np.where(x < 0, alpha * x, x)),
    "Elu": _one(_elu),
    "Selu": _one(_selu),
    "Celu": _one(_celu),
    "ThresholdedRelu": _one(lambda x, alpha: np.where(x > alpha, x, 0).astype(x.dtype)),
    "Sigmoid": _one(sigmoid),
    "HardSigmoid": _one(lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1)),
    "HardSwish": _one(lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    "Softplus": _one(softplus),
    "Softsign": _one(lambda x: x / (1 + np.abs(x))),
    "Mish": _one(lambda x: x * np.tanh(softplus(x))),
    "Gelu": _one(gelu),
    "Swish": _one(lambda x, alpha: x * sigmoid(alpha * x)),
    "FakeQuantize": _one(lambda x, scale, low, high: np.fmin(np.fmax(np.rint(x / scale), low), high) * scale),
    "Erf": _one(erf),
    "Reciprocal": _one(lambda x: 1 / x),
    "Shrink": _one(_shrink),
    "IsInf": _one(_isinf),
    "Not": _same(np.logical_not),
    "BitwiseNot": _same(np.bitwise_not),
    "IsNaN": _same(np.isnan),
    "Exp": _same(np.exp),
    "Log": _same(np.log),
    "Sqrt": _same(np.sqrt),
    "Neg": _same(np.negative),
    "Abs": _same(np.abs),
    "Ceil": _same(np.ceil),
    "Floor": _same(np.floor),
    "Round": _same(np.rint),
    "Sign": _same(np.sign),
    "Sin": _same(np.sin),
    "Cos": _same(np.cos),
    "Tan": _same(np.tan),
    "Asin": _same(np.arcsin),
    "Acos": _same(np.arccos),
    "Atan": _same(np.arctan),
    "Sinh": _same(np.sinh),
    "Cosh": _same(np.cosh),
    "Tanh": _same(np.tanh),
    "Asinh": _same(np.arcsinh),
    "Acosh": _same(np.arccosh),
    "Atanh": _same(np.arctanh),
}
