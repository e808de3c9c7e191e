"""NumPy kernels. Matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

import math

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array


def matmul(a: Array, b: Array) -> tuple[Array, ...]:
    """MatMul (ONNX opset 13): numpy.matmul."""
    if b.ndim == 2 and a.ndim > 2:  # one large product instead of NumPy's product per matrix of the stack
        rows = np.matmul(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b)
        return (rows.reshape(*a.shape[:-1], b.shape[1]),)
    return (np.asarray(np.matmul(a, b)),)


def gemm(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: bool = False,
    transB: bool = False,
) -> tuple[Array, ...]:
    """Gemm (ONNX opset 13): ``alpha * A' B' + beta * C``; integers are scaled in float64 and truncated."""
    y = np.matmul(a.T if transA else a, b.T if transB else b)
    if alpha != 1.0:
        y = (y * alpha).astype(y.dtype)
    if c is not None and beta != 0.0:
        y = y + (c if beta == 1.0 else (c * beta).astype(c.dtype))
    return (y,)


def einsum(*operands: Array, equation: str) -> tuple[Array, ...]:
    """Einsum (ONNX opset 12)."""
    return (np.asarray(np.einsum(equation.replace(" ", ""), *operands, optimize=len(operands) > 1)),)


KERNELS: dict[str, Kernel] = {"MatMul": matmul, "Gemm": gemm, "Einsum": einsum}
