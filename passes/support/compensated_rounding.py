"""Weights rounded one after another, so that later ones make up for the errors of earlier ones on calibration data.

The method is GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023).
With ``H`` the second moments of a product's operand, the squared error of its result is ``d H d^T`` for a row ``d`` of weight
errors. When one weight of a row is rounded, the others move to where that error is least. A row keeps the nearest numbers where
these are better.
"""

from __future__ import annotations

import numpy as np

from optdnn.passes.support.block_rounding import (
    BLOCK,
    RoundedBlocks,
    in_blocks,
    packed_by_rows,
    rounded_blocks,
    scale_type,
)
from optdnn.passes.support.packed import PackedArrays
from optdnn.types import Array, DType

DAMPING = 0.01
"""Added to the diagonal of the second moments, of their mean: data that are nearly dependent move no weight far."""


def compensated_floats(weights: Array, moments: Array, bits: int, dtype: DType) -> PackedArrays:
    """Weights [N, K] as packed numbers of ``bits`` bits. ``moments`` [K, K]: the mean of ``x^T x`` over rows ``x`` of data.

    ``dtype`` is the type of the activations, as in :func:`optdnn.passes.support.block_rounding.packed_floats`.
    """
    width = min(BLOCK, weights.shape[1])
    kept, factor = scale_type(weights, bits, dtype), _factor(moments)

    def rounded(rows: Array) -> RoundedBlocks:
        nearest = rounded_blocks(in_blocks(rows, width), bits, kept)
        moved = _compensated(rows, factor, width, bits, kept)
        better = (_error(moved, rows, moments) < _error(nearest, rows, moments))[:, None, None]
        pairs = ((nearest.numbers, moved.numbers), (nearest.scales, moved.scales), (nearest.zeros, moved.zeros))
        return RoundedBlocks(*(np.where(better, new, old) for old, new in pairs))

    return packed_by_rows(weights, bits, rounded)


def _factor(moments: Array) -> Array:
    """The upper triangular U with U^T U the inverse of the damped moments. Numbers that no datum has count as independent."""
    damped = moments.astype(np.float64)
    added = max(DAMPING * float(np.mean(np.diag(damped))), float(np.finfo(np.float32).tiny))
    damped += added * np.eye(len(damped))
    factor: Array = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    return factor


def _compensated(weights: Array, factor: Array, width: int, bits: int, kept: DType) -> RoundedBlocks:
    """Block by block: scales of what is left of the weights, then number by number."""
    left, levels = weights.astype(np.float32, copy=True), (1 << bits) - 1
    rows, K = left.shape
    made: list[RoundedBlocks] = []
    for begin in range(0, K, width):
        end = min(begin + width, K)
        block = rounded_blocks(in_blocks(left[:, begin:end], width), bits, kept)
        scales, zeros = block.scales[:, 0, 0], block.zeros[:, 0, 0]
        numbers = np.repeat(zeros[:, None], width, axis=1)
        errors = np.empty((rows, end - begin), np.float32)
        for k in range(begin, end):
            numbers[:, k - begin] = np.clip(np.rint(left[:, k] / scales) + zeros, 0, levels)
            off = left[:, k] - (numbers[:, k - begin] - zeros) * scales
            errors[:, k - begin] = off / factor[k, k]
            left[:, k + 1 : end] -= np.outer(errors[:, k - begin], factor[k, k + 1 : end])
        left[:, end:] -= errors @ factor[begin:end, end:]
        made.append(RoundedBlocks(numbers[:, None], block.scales, block.zeros))
    arrays = zip(*((r.numbers, r.scales, r.zeros) for r in made), strict=True)
    return RoundedBlocks(*(np.concatenate(a, axis=1) for a in arrays))


def _error(rounded: RoundedBlocks, weights: Array, moments: Array) -> Array:
    """The mean squared error of each result on the data: [N]."""
    rows, K = weights.shape
    off = (rounded.floats.reshape(rows, -1)[:, :K] - weights).astype(np.float64)
    error: Array = np.einsum("nk,nk->n", off @ moments.astype(np.float64), off)
    return error
