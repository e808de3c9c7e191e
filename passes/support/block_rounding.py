"""Rounds floats to integers of 4 or 8 bits, with a scale and a zero point for each block of a row.

An integer is ``round(w / scale) + zero``. A block's range always covers 0, so zeros stay exact and zero points have the same type
as the integers. Outliers may be clipped if that makes the other weights more exact: several ranges are tried, and the least-squares
scale for the best one. Each block keeps the scale with the smallest squared error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from optdnn.ops.packed_layout import blocks_of, packed_rows
from optdnn.passes.support.packed import PackedArrays
from optdnn.types import DTYPES, FP16, FP32, UINT8, Array, DType

BLOCK = 128
"""The number of weights along K that share a scale."""
CLIPS = {4: (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68), 8: (1.0, 0.99, 0.98)}
"""Bits -> the fractions of a block's range that are tried. The whole range comes first and wins ties."""
LARGEST = 1e18
"""The square of a larger weight may overflow fp32."""
_AT_ONCE = 1 << 20
"""Weights that one task rounds."""
_LEAST_NORMAL = 2.0**-14
"""The smallest normal number of fp16."""


@dataclass(frozen=True)
class RoundedBlocks:
    """``numbers`` [..., block] and ``zeros`` [..., 1] from 0 to ``2 ** bits - 1`` as fp32; ``scales`` fp32 [..., 1]."""

    numbers: Array
    scales: Array
    zeros: Array

    @property
    def floats(self) -> Array:
        """The weights that these integers represent, fp32 [..., block]."""
        return (self.numbers - self.zeros) * self.scales


def packed_floats(weights: Array, bits: int, dtype: DType) -> PackedArrays:
    """Finite weights [N, K] as packed integers of ``bits`` bits, each rounded to the nearest one.

    ``dtype`` is the type of the activations. Scales are fp32 numbers that ``dtype`` can hold exactly, unless they would be
    subnormal in fp16.
    """
    width = min(BLOCK, weights.shape[1])
    scale_dtype = scale_type(weights, bits, dtype)
    return packed_by_rows(weights, bits, lambda rows: rounded_blocks(in_blocks(rows, width), bits, scale_dtype))


def packed_by_rows(weights: Array, bits: int, rounded: Callable[[Array], RoundedBlocks]) -> PackedArrays:
    """Weights [N, K] as packed integers of ``bits`` bits, computed by several threads.

    ``rounded`` gets some of the rows and returns their blocks [rows, blocks, width]."""
    K = weights.shape[1]
    step = max(1, _AT_ONCE // max(1, K))

    def stored(begin: int) -> tuple[Array, Array, Array]:
        found = rounded(weights[begin : begin + step])
        count, _, width = found.numbers.shape
        numbers = found.numbers.astype(UINT8).reshape(count, -1)[:, :K].view(DTYPES[f"uint{bits}"])
        scales, zeros = (a.reshape(count, -1) for a in (found.scales, found.zeros))
        return packed_rows(numbers, width), scales, zeros.astype(UINT8)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "optdnn-pack") as pool:
        parts = zip(*pool.map(stored, range(0, len(weights), step)), strict=True)
    numbers, scales, zeros = (np.concatenate(part) for part in parts)
    return PackedArrays(numbers, scales, zeros, f"uint{bits}", K, min(BLOCK, K))


def in_blocks(weights: Array, width: int) -> Array:
    """Rows [N, K] as fp32 blocks [N, blocks, width]; the last block is padded with 0."""
    rows, K = weights.shape
    filled = np.zeros((rows, blocks_of(K, width) * width), np.float32)
    filled[:, :K] = weights
    return filled.reshape(rows, -1, width)


def scale_type(weights: Array, bits: int, dtype: DType) -> DType:
    """The type to which scales are rounded: ``dtype``, or fp32 if scales would be subnormal in fp16 or overflow it."""
    if dtype != FP16:
        return dtype
    blocks = in_blocks(weights, min(BLOCK, weights.shape[1]))
    spans = _bounds(blocks)[1] - _bounds(blocks)[0]
    least = spans[spans > 0].min(initial=np.inf) * min(CLIPS[bits]) / ((1 << bits) - 1)
    return FP16 if least >= _LEAST_NORMAL and spans.max(initial=0.0) < 6e4 else FP32


def rounded_blocks(blocks: Array, bits: int, dtype: DType) -> RoundedBlocks:
    """fp32 blocks [..., width] as integers, each block with its best scale. ``dtype``: the type to which scales are rounded."""
    levels = (1 << bits) - 1
    low, high = _bounds(blocks)
    best, error = None, None
    for clip in CLIPS[bits]:
        scales = _rounded_scales((high - low) * np.float32(clip / levels), dtype)
        zeros = np.clip(np.rint(-low * np.float32(clip) / scales), 0, levels)
        best, error = _better(best, error, _rounded(blocks, scales, zeros, levels), blocks)
    assert best is not None
    steps = best.numbers - best.zeros
    squares = (steps * steps).sum(axis=-1, keepdims=True)
    fitted = (steps * blocks).sum(axis=-1, keepdims=True) / np.maximum(squares, np.float32(1))
    scales = np.where(fitted > 0, _rounded_scales(fitted, dtype), best.scales)
    return _better(best, error, _rounded(blocks, scales, best.zeros, levels), blocks)[0]


def _bounds(blocks: Array) -> tuple[Array, Array]:
    """The smallest and the largest element of each block and 0, [..., 1] each."""
    return blocks.min(axis=-1, keepdims=True, initial=0.0), blocks.max(axis=-1, keepdims=True, initial=0.0)


def _rounded_scales(scales: Array, dtype: DType) -> Array:
    """Scales rounded to ``dtype``, as fp32; 1 for a block of zeros."""
    rounded: Array = (
        np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1)).astype(dtype).astype(np.float32)
    )
    return rounded


def _rounded(blocks: Array, scales: Array, zeros: Array, levels: int) -> RoundedBlocks:
    numbers = np.rint(blocks / scales)
    numbers += zeros
    return RoundedBlocks(np.clip(numbers, 0, levels, out=numbers), scales, zeros)


def _better(
    best: RoundedBlocks | None, error: Array | None, other: RoundedBlocks, blocks: Array
) -> tuple[RoundedBlocks, Array]:
    """For each block, the one of ``best`` and ``other`` with the smaller squared error, and this error [..., 1]."""
    off = other.floats
    off -= blocks
    found = np.einsum("...k,...k->...", off, off)[..., None]
    if best is None or error is None:
        return other, found
    wins = found < error
    arrays = zip((best.numbers, best.scales, best.zeros), (other.numbers, other.scales, other.zeros), strict=True)
    return RoundedBlocks(*(np.where(wins, new, old) for old, new in arrays)), np.where(wins, found, error)
