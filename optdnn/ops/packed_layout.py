"""The layout of packed weights: 2-, 4- or 8-bit values with a scale (and a zero point) for each block.

All sources (MatMulNBits, DequantizeLinear in blocks or per channel, GatherBlockQuantized) are converted to this layout.

There are N rows of K values; row n holds the weights of output n. With ``blocks = ceil(K / block_size)`` the operands are

* ``weights``: uint8 ``[N, blocks * ceil(block_size * bits / 8)]``. Values are in the order of K, the lowest bits of a byte
  first. Each block starts at a byte. Values beyond K in the last block are stored, but have no meaning: they may be anything.
* ``scales``: floats ``[ceil(N / block_rows), blocks]``, of any sign and of a separate type (fp64, fp32, fp16 or bf16).
* ``zeros`` (optional): uint8, one byte for each scale, or floats of the scales' type; in the shape of the scales.

The weight is ``w[n, k] = (value - zero) * scale``, with the scale and the zero point of the block
``[n // block_rows, k // block_size]``. It need not be rounded before the multiplication: kernels may compute it in fp32 or in the
type of the other operand.

``code`` names the type of a value: uint2, uint4, uint8, fp8_e4m3, fp8_e5m2 or fp4_e2m1. Integers are never signed: int4 is stored
as uint4 with 8 added to values and zero points, int8 as uint8 with 128 added. Without ``zeros`` the zero point of an integer
is ``2 ** (bits - 1)`` and the zero point of a float is 0; floats never have ``zeros``.

``block_size`` is a power of two from 16 on, or K (one block for each row: scales per channel). ``block_rows`` is 1, or the number
of rows that share a scale (128 for fp8 in blocks of 128 x 128).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, FusedAttrs, Unsupported
from optdnn.types import DTYPES, INT8, Array, DType, bits_of, dtype_name, packed

CODES = ("uint2", "uint4", "uint8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
"""The short names of the types of packed values."""
LEAST_BLOCK = 16
_SIGNED = {DTYPES["int4"]: "uint4", DTYPES["int2"]: "uint2", INT8: "uint8"}


@dataclass(frozen=True)
class PackedMatMulAttrs(FusedAttrs):
    """The storage of packed weights; see the module. ``rounded_rows``: each row of the other operand is rounded to int8 with its
    own scale before the multiplication (:func:`optdnn.runtime.reference.packed.row_numbers`). Kernels may be more precise."""

    code: str
    K: int
    block_size: int
    block_rows: int = 1
    rounded_rows: bool = False


@dataclass(frozen=True)
class PackedGatherAttrs(Attrs):
    """The storage of packed rows, and the type ``output_dtype`` of the unpacked rows; see the module."""

    code: str
    K: int
    block_size: int
    output_dtype: DType


def blocks_of(K: int, block_size: int) -> int:
    """Blocks of a row."""
    return -(-K // block_size)


def row_bytes(code: str, K: int, block_size: int) -> int:
    """Bytes of a row of packed weights."""
    return blocks_of(K, block_size) * -(-block_size * bits_of(DTYPES[code]) // 8)


def is_block(block_size: int) -> bool:
    """True for a power of two of at least 16."""
    return block_size >= LEAST_BLOCK and not block_size & (block_size - 1)


def check_block(block_size: int, K: int, what: str) -> None:
    """Raise ShapeError unless ``block_size`` is a power of two of at least 16, or K."""
    if not is_block(block_size) and block_size != K:
        raise ShapeError(
            f"{what} has blocks of {block_size}; a block must be a power of two and at least {LEAST_BLOCK}"
        )


def unsigned(numbers: Array) -> tuple[Array, str]:
    """Values in the form of packed weights, and their code: signed values get half of their range added. The shape stays.

    Raises Unsupported for a type that packed weights do not have.
    """
    dtype = numbers.dtype
    if dtype in _SIGNED:
        code = _SIGNED[dtype]
        half, whole = 1 << (bits_of(dtype) - 1), (1 << bits_of(dtype)) - 1
        return ((numbers.view(np.uint8) + np.uint8(half)) & np.uint8(whole)).view(DTYPES[code]), code
    code = dtype_name(dtype)
    if code not in CODES:
        raise Unsupported(f"packed weights of type {code}")
    return numbers, code


def packed_rows(numbers: Array, block_size: int) -> Array:
    """Values [N, K] (uint8, uint4, uint2 or narrow floats) as bytes [N, bytes of a row]; blocks are padded with 0."""
    rows, K = numbers.shape
    per_byte = 8 // bits_of(numbers.dtype)
    blocks, stored = blocks_of(K, block_size), -(-block_size // per_byte) * per_byte
    if stored == block_size and blocks * block_size == K:
        return packed(numbers).reshape(rows, -1)
    filled = np.zeros((rows, blocks, stored), numbers.dtype)
    whole = K // block_size
    filled[:, :whole, :block_size] = numbers[:, : whole * block_size].reshape(rows, whole, block_size)
    if whole < blocks:
        filled[:, whole, : K - whole * block_size] = numbers[:, whole * block_size :]
    return packed(filled).reshape(rows, -1)
