"""NumPy kernels. Packed weights: numbers of 2, 4 and 8 bits with scales by block, as in :mod:`optdnn.ops.packed_layout`."""

from __future__ import annotations

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.gemm import matmul
from optdnn.types import DTYPES, FP32, FP64, Array, DType, bits_of, is_float, unpacked


def numbers_of(weights: Array, code: str, K: int, block_size: int) -> Array:
    """The numbers of packed weights as type ``code``: uint8 [N, row bytes] -> [N, K]."""
    blocks, dtype = -(-K // block_size), DTYPES[code]
    per_byte = 8 // bits_of(dtype)
    if per_byte == 1:
        codes = weights.view(dtype)
    else:
        per_block = weights.shape[1] // blocks * per_byte
        codes = unpacked(weights.reshape(-1), dtype, per_byte * weights.size)
        codes = codes.reshape(len(weights), blocks, per_block)[..., :block_size]
    return codes.reshape(len(weights), -1)[:, :K]


def by_number(parameters: Array, rows: int, K: int, block_size: int, block_rows: int) -> Array:
    """Scales or zero points of blocks, repeated for each number: [row blocks, blocks] -> [rows, K]."""
    columns = np.repeat(parameters, block_size, axis=1)[:, :K]
    return columns if block_rows == 1 else np.repeat(columns, block_rows, axis=0)[:rows]


def dequantized(
    weights: Array,
    scales: Array,
    zeros: Array | None,
    *,
    code: str,
    K: int,
    block_size: int,
    block_rows: int = 1,
    wide: DType = FP32,
) -> Array:
    """``(number - zero point) * scale`` in the type ``wide``: [N, K]."""
    y = numbers_of(weights, code, K, block_size).astype(wide)
    rows = len(weights)
    if zeros is not None:
        y -= by_number(zeros, rows, K, block_size, block_rows).astype(wide)
    elif not is_float(DTYPES[code]):
        y -= wide.type(1 << (bits_of(DTYPES[code]) - 1))
    y *= by_number(scales, rows, K, block_size, block_rows).astype(wide)
    return y


def packed_matmul(
    x: Array,
    weights: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    code: str,
    K: int,
    block_size: int,
    block_rows: int = 1,
) -> tuple[Array, ...]:
    """PackedMatMul: rows of ``x`` [..., K] times packed weights [N, K], transposed."""
    wide = FP64 if x.dtype == FP64 else FP32
    w = dequantized(weights, scales, zeros, code=code, K=K, block_size=block_size, block_rows=block_rows, wide=wide)
    return matmul(x, w.T)


def packed_gather(
    weights: Array,
    indices: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    code: str,
    K: int,
    block_size: int,
    output_dtype: DType,
) -> tuple[Array, ...]:
    """PackedGather: the rows of packed weights that ``indices`` name, as floats [*indices, K]."""
    rows = indices.reshape(-1)
    zeros = None if zeros is None else zeros[rows]
    wide = FP64 if output_dtype == FP64 else FP32
    y = dequantized(weights[rows], scales[rows], zeros, code=code, K=K, block_size=block_size, wide=wide)
    return (y.reshape(*indices.shape, K).astype(output_dtype, copy=False),)


KERNELS: dict[str, Kernel] = {"PackedMatMul": packed_matmul, "PackedGather": packed_gather}
