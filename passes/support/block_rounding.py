"""Floats rounded to numbers of 4 or 8 bits by block of their rows, with the clip that fits each block best.

A number is ``round(w / scale) + zero``, with a scale and a zero point for each block. A block's range always covers 0, so that
zeros stay exact and zero points are numbers of the same type. Outliers may be clipped where that makes all other weights more
exact. Several ranges are tried, and the least-squares scale for the best of them; a block takes the one with the smallest squared
error.
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
"""Weights along K that share a scale."""
CLIPS = {4: (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68), 8: (1.0, 0.99, 0.98)}
"""Bits -> the parts of a block's range that are tried; the whole range comes first, and wins where all are equal."""
LARGEST = 1e18
"""Larger weights have squares that fp32 does not hold."""
_AT_ONCE = 1 << 20
"""Weights that are rounded in one go."""
_LEAST_NORMAL = 2.0**-14
"""The smallest number that fp16 holds with all of its precision."""


@dataclass(frozen=True)
class RoundedBlocks:
    """``numbers`` [..., block] and ``zeros`` [..., 1] from 0 to ``2 ** bits - 1`` as fp32; ``scales`` fp32 [..., 1]."""

    numbers: Array
    scales: Array
    zeros: Array

    @property
    def floats(self) -> Array:
        """The weights that they represent."""
        return (self.numbers - self.zeros) * self.scales


def packed_floats(weights: Array, bits: int, dtype: DType) -> PackedArrays:
    """Finite weights [N, K] as packed numbers of ``bits`` bits, each rounded to the nearest one.

    ``dtype``: the type of the activations. Scales are fp32 numbers that ``dtype`` holds exactly, unless fp16 would make them
    subnormal.
    """
    width = min(BLOCK, weights.shape[1])
    kept = scale_type(weights, bits, dtype)
    return packed_by_rows(weights, bits, lambda rows: rounded_blocks(in_blocks(rows, width), bits, kept))


def packed_by_rows(weights: Array, bits: int, rounded: Callable[[Array], RoundedBlocks]) -> PackedArrays:
    """Weights [N, K] as packed numbers. ``rounded`` makes some of the rows blocks [rows, blocks, width], on several threads."""
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
    """Rows [N, K] as fp32 blocks [N, blocks, width]; the last block is filled up with 0."""
    rows, K = weights.shape
    filled = np.zeros((rows, blocks_of(K, width) * width), np.float32)
    filled[:, :K] = weights
    return filled.reshape(rows, -1, width)


def scale_type(weights: Array, bits: int, dtype: DType) -> DType:
    """The type whose numbers scales are rounded to: ``dtype``, or fp32 where the least scale would be subnormal in fp16."""
    if dtype != FP16:
        return dtype
    blocks = in_blocks(weights, min(BLOCK, weights.shape[1]))
    spans = _bounds(blocks)[1] - _bounds(blocks)[0]
    least = spans[spans > 0].min(initial=np.inf) * min(CLIPS[bits]) / ((1 << bits) - 1)
    return FP16 if least >= _LEAST_NORMAL and spans.max(initial=0.0) < 6e4 else FP32


def rounded_blocks(blocks: Array, bits: int, dtype: DType) -> RoundedBlocks:
    """Blocks fp32 [..., width], each with the best of its scales. ``dtype``: the type that holds scales."""
    levels = (1 << bits) - 1
    low, high = _bounds(blocks)
    best, error = None, None
    for clip in CLIPS[bits]:
        scales = _held((high - low) * np.float32(clip / levels), dtype)
        zeros = np.clip(np.rint(-low * np.float32(clip) / scales), 0, levels)
        best, error = _better(best, error, _rounded(blocks, scales, zeros, levels), blocks)
    assert best is not None
    steps = best.numbers - best.zeros
    squares = (steps * steps).sum(axis=-1, keepdims=True)
    fitted = (steps * blocks).sum(axis=-1, keepdims=True) / np.maximum(squares, np.float32(1))
    scales = np.where(fitted > 0, _held(fitted, dtype), best.scales)
    return _better(best, error, _rounded(blocks, scales, best.zeros, levels), blocks)[0]


def _bounds(blocks: Array) -> tuple[Array, Array]:
    """The smallest and the largest weight of each block, or 0: [..., 1]."""
    return blocks.min(axis=-1, keepdims=True, initial=0.0), blocks.max(axis=-1, keepdims=True, initial=0.0)


def _held(scales: Array, dtype: DType) -> Array:
    """Scales as ``dtype`` holds them, in fp32; 1 for a block of zeros."""
    held: Array = np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1)).astype(dtype).astype(np.float32)
    return held


def _rounded(blocks: Array, scales: Array, zeros: Array, levels: int) -> RoundedBlocks:
    numbers = np.rint(blocks / scales)
    numbers += zeros
    return RoundedBlocks(np.clip(numbers, 0, levels, out=numbers), scales, zeros)


def _better(
    best: RoundedBlocks | None, error: Array | None, other: RoundedBlocks, blocks: Array
) -> tuple[RoundedBlocks, Array]:
    """Block by block the one of two with the smaller squared error, and that error [..., 1]."""
    off = other.floats
    off -= blocks
    found = np.einsum("...k,...k->...", off, off)[..., None]
    if best is None or error is None:
        return other, found
    wins = found < error
    arrays = zip((best.numbers, best.scales, best.zeros), (other.numbers, other.scales, other.zeros), strict=True)
    return RoundedBlocks(*(np.where(wins, new, old) for old, new in arrays)), np.where(wins, found, error)
