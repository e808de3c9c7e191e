"""NumPy kernels. Packed weights: 2-, 4- and 8-bit values with scales by block, as in :mod:`optdnn.ops.packed_layout`."""

from __future__ import annotations

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.gemm import matmul
from optdnn.types import DTYPES, FP32, FP64, Array, DType, bits_of, is_float, unpacked


def numbers_of(weights: Array, code: str, K: int, block_size: int) -> Array:
    """The values of packed weights as type ``code``: uint8 [N, row bytes] -> [N, K]."""
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
    """Scales or zero points of blocks, repeated for each value: [row blocks, blocks] -> [rows, K]."""
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


def row_numbers(x: Array) -> tuple[Array, Array]:
    """Rows of floats as int8 values [..., K] and fp32 scales [...]: a row's largest magnitude becomes 127. A row with non-finite
    elements has a non-finite scale."""
    rows = x.astype(FP32)
    largest = np.abs(rows).max(axis=-1, initial=0)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    with np.errstate(invalid="ignore"):
        numbers = np.nan_to_num(np.rint(rows * inverse[..., None]), posinf=0.0, neginf=0.0)
    return numbers.astype(np.int8), largest / np.float32(127)


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
    rounded_rows: bool = False,
) -> tuple[Array, ...]:
    """PackedMatMul: rows of ``x`` [..., K] times packed weights [N, K], transposed."""
    wide = FP64 if x.dtype == FP64 else FP32
    w = dequantized(weights, scales, zeros, code=code, K=K, block_size=block_size, block_rows=block_rows, wide=wide)
    if not rounded_rows:
        return matmul(x, w.T)
    numbers, row_scales = row_numbers(x)
    (y,) = matmul(numbers.astype(wide), w.T)
    return ((y * row_scales[..., None]).astype(x.dtype, copy=False),)


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
    """PackedGather: the rows of packed weights at ``indices``, as floats [*indices, K]."""
    rows = indices.reshape(-1)
    zeros = None if zeros is None else zeros[rows]
    wide = FP64 if output_dtype == FP64 else FP32
    y = dequantized(weights[rows], scales[rows], zeros, code=code, K=K, block_size=block_size, wide=wide)
    return (y.reshape(*indices.shape, K).astype(output_dtype, copy=False),)


# ---------------------------------------------------------------- tiles, as kernels for GPUs read them


def numbers_of_tiles(tiles: Array, bits: int) -> Array:
    """The values in tiles of 16 channels: uint8 [tiles, chunks, 1024] -> uint8 [16 * tiles, K padded to whole chunks].

    A chunk is [half of the channels, channel of 8, lane of 4, word of 4]. A word has ``8 / bits`` products of 16 values of K.
    Lane t has two pairs of them: from 2 t on, and from 2 t + 8 on. A pair is stored in the two halves of the word.
    """
    count, chunks, _ = tiles.shape
    words = np.ascontiguousarray(tiles).view("<u4").reshape(count, chunks, 2, 8, 4, 4)
    made = np.empty((count, 2, 8, chunks, 4, 8 // bits, 2, 4, 2), np.uint8)
    ordered = words.transpose(0, 2, 3, 1, 5, 4)
    for product, pair, half in np.ndindex(8 // bits, 2, 2):
        up = 16 * half + bits * (2 * product + pair) if bits < 8 else 8 * (2 * pair + half)
        made[..., product, pair, :, half] = ordered >> np.uint32(up) & np.uint32((1 << bits) - 1)
    return made.reshape(16 * count, -1)


def by_number_of_tiles(parameters: Array, N: int, K: int, block_size: int) -> Array:
    """Scales or zero points of tiles as fp32, repeated for each value: [tiles, sets, 16, groups] -> [N, K]."""
    count, sets, channels, groups = parameters.shape
    rows = parameters.transpose(0, 2, 1, 3).reshape(count * channels, sets * groups)
    return by_number(rows[:N], N, K, block_size, 1).astype(FP32)


def unpacked_tiles(
    tiles: Array,
    scales: Array,
    zeros: Array | None = None,
    after: Array | None = None,
    *,
    code: str,
    K: int,
    N: int,
    block_size: int,
) -> tuple[Array, ...]:
    """UnpackedTiles: packed weights in tiles as fp32 [N, K]. ``after`` is not read: it only orders the steps."""
    dtype = DTYPES[code]
    numbers = numbers_of_tiles(tiles, bits_of(dtype))[:N, :K].view(dtype if bits_of(dtype) == 8 else np.uint8)
    w = numbers.astype(FP32)
    if zeros is not None:
        w -= by_number_of_tiles(zeros, N, K, block_size)
    elif not is_float(dtype):
        w -= np.float32(1 << (bits_of(dtype) - 1))
    w *= by_number_of_tiles(scales, N, K, block_size)
    return (w,)


def unpacked_bytes(
    tiles: Array,
    scales: Array,
    zeros: Array | None,
    inverse: Array,
    after: Array | None = None,
    *,
    code: str,
    K: int,
    N: int,
    block_size: int,
) -> tuple[Array, ...]:
    """UnpackedBytes: packed weights in tiles as int8 [N, K]; ``inverse`` [N] holds the inverted scales. ``after`` only orders the
    steps."""
    whole = unpacked_tiles(tiles, np.ones_like(scales), zeros, code=code, K=K, N=N, block_size=block_size)[0]
    factors = by_number_of_tiles(scales, N, K, block_size) * inverse[:N, None]
    return (np.rint(whole.astype(FP64) * factors).astype(np.int8),)


def tiled_matmul(
    x: Array,
    tiles: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    code: str,
    K: int,
    N: int,
    block_size: int,
) -> tuple[Array, ...]:
    """TiledPackedMatMul: rows of ``x`` [..., K] times packed weights in tiles."""
    (w,) = unpacked_tiles(tiles, scales, zeros, code=code, K=K, N=N, block_size=block_size)
    return matmul(x, w.T)


KERNELS: dict[str, Kernel] = {
    "PackedMatMul": packed_matmul,
    "PackedGather": packed_gather,
    "TiledPackedMatMul": tiled_matmul,
    "UnpackedTiles": unpacked_tiles,
    "UnpackedBytes": unpacked_bytes,
    "RowBytes": row_numbers,
}
