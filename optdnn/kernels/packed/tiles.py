"""The layout of packed weights for the kernels of this family: tiles of 16 channels, in the order of mma.sync's registers.

A chunk has 1024 bytes: 16 channels times ``8192 / 16 / bits`` codes along K. ``packed.cuh`` defines which lane reads which bytes. Kernels
for every number of rows read the same tiles, so the plans of one engine share them.
"""

from __future__ import annotations

import numpy as np

from optdnn.ops.packed_layout import is_block
from optdnn.runtime.reference.packed import numbers_of
from optdnn.types import DTYPES, Array, bits_of

CHANNELS = 16
"""Channels of a tile."""
CHUNK_BYTES = 1024


def chunk_depth(bits: int) -> int:
    """Codes along K in a chunk."""
    return CHUNK_BYTES * 8 // bits // CHANNELS


def groups_of(bits: int, block_size: int) -> int:
    """Scales of a channel in a chunk. A block size that is not a power of two means a whole row: one scale, even if a chunk is deeper."""
    return max(1, chunk_depth(bits) // block_size) if is_block(block_size) else 1


def row_bytes(chunks: int, bits: int, block_size: int) -> int:
    """Bytes of shared memory of a row of ``chunks`` chunks for ``packed_few.cuh``: the padded row, and the sums of its groups."""
    return chunks * (chunk_depth(bits) * 2 + groups_of(bits, block_size) * 4) + 64


def chunks_of(depth: int, bits: int) -> int:
    """Chunks in a tile of depth ``depth``."""
    return -(-depth // chunk_depth(bits))


def sets_of(depth: int, bits: int, block_size: int) -> int:
    """Sets of scales in a tile: one per chunk, or one for all chunks that share a set."""
    return -(-depth // max(block_size, chunk_depth(bits)))


def set_shift(depth: int, bits: int, block_size: int) -> int:
    """The ``shift`` for which chunk ``c`` has the scales of set ``c >> shift``."""
    if block_size >= depth:
        return 31
    return max(block_size // chunk_depth(bits), 1).bit_length() - 1


def tiled_weights(weights: Array, code: str, depth: int, block_size: int) -> Array:
    """uint8 ``[N, bytes of a row]`` -> uint8 ``[tiles, chunks, 1024]``; channels and K are padded with zeros."""
    bits = bits_of(DTYPES[code])
    numbers = numbers_of(weights, code, depth, block_size).view(np.uint8)
    tiles, chunks = -(-len(numbers) // CHANNELS), chunks_of(depth, bits)
    filled = np.zeros((tiles * CHANNELS, chunks * chunk_depth(bits)), np.uint8)
    filled[: len(numbers), :depth] = numbers
    # tile, half, channel of the half; chunk, word, product of the word, pair of the product, lane of four, half of the pair
    axes = filled.reshape(tiles, 2, 8, chunks, 4, 8 // bits, 2, 4, 2)
    words = np.zeros((tiles, 2, 8, chunks, 4, 4), np.uint32)
    for product in range(8 // bits):
        for pair in range(2):
            for half in range(2):
                up = 16 * half + bits * (2 * product + pair) if bits < 8 else 8 * (2 * pair + half)
                words |= axes[..., product, pair, :, half].astype(np.uint32) << np.uint32(up)
    ordered = words.transpose(0, 3, 1, 2, 5, 4)  # tile, chunk, half, channel, lane of four, word
    return np.ascontiguousarray(ordered).view(np.uint8).reshape(tiles, chunks, CHUNK_BYTES)


def tiled_scales(values: Array, columns: int, depth: int, bits: int, block_size: int, block_rows: int = 1) -> Array:
    """Scales or zero points ``[rows of blocks, blocks]`` -> ``[tiles, sets, 16, groups]``, padded with zeros."""
    rows = values if block_rows == 1 else np.repeat(values, block_rows, axis=0)[:columns]
    tiles, sets, groups = -(-columns // CHANNELS), sets_of(depth, bits, block_size), groups_of(bits, block_size)
    filled = np.zeros((tiles * CHANNELS, sets * groups), values.dtype)
    filled[:columns, : rows.shape[1]] = rows
    return np.ascontiguousarray(filled.reshape(tiles, CHANNELS, sets, groups).transpose(0, 2, 1, 3))
