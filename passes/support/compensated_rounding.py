"""Rounds weights one after another, so that later weights compensate the errors of earlier ones on calibration data.

The method is GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023).
With ``H`` the second moments of a product's operand, the squared error of its result is ``d H d^T`` for a row ``d`` of weight
errors. After a weight of a row is rounded, the remaining weights change so that this error is minimal. A row is rounded to the
nearest numbers instead if its error is then smaller.
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
"""This fraction of the diagonal's mean is added to the diagonal of the second moments. It limits the changes of weights if inputs
are nearly linearly dependent."""


def compensated_floats(weights: Array, moments: Array, bits: int, dtype: DType) -> PackedArrays:
    """Weights [N, K] as packed integers of ``bits`` bits. ``moments`` [K, K]: the mean of ``x^T x`` over rows ``x`` of data.

    ``dtype`` is the type of the activations, as in :func:`optdnn.passes.support.block_rounding.packed_floats`.
    """
    width = min(BLOCK, weights.shape[1])
    scale_dtype, factor = scale_type(weights, bits, dtype), _factor(moments)

    def rounded(rows: Array) -> RoundedBlocks:
        nearest = rounded_blocks(in_blocks(rows, width), bits, scale_dtype)
        moved = _compensated(rows, factor, width, bits, scale_dtype)
        better = (_error(moved, rows, moments) < _error(nearest, rows, moments))[:, None, None]
        pairs = ((nearest.numbers, moved.numbers), (nearest.scales, moved.scales), (nearest.zeros, moved.zeros))
        return RoundedBlocks(*(np.where(better, new, old) for old, new in pairs))

    return packed_by_rows(weights, bits, rounded)


def _factor(moments: Array) -> Array:
    """The upper triangular U with U^T U equal to the inverse of the damped moments. Inputs that are always 0 are independent."""
    damped = moments.astype(np.float64)
    added = max(DAMPING * float(np.mean(np.diag(damped))), float(np.finfo(np.float32).tiny))
    damped += added * np.eye(len(damped))
    factor: Array = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    return factor


def _compensated(weights: Array, factor: Array, width: int, bits: int, scale_dtype: DType) -> RoundedBlocks:
    """Round weights [rows, K] block by block: first the block's scales from the current weights, then one weight after another."""
    left, K = weights.astype(np.float32, copy=True), weights.shape[1]
    blocks: list[RoundedBlocks] = []
    for begin in range(0, K, width):
        end = min(begin + width, K)
        block = rounded_blocks(in_blocks(left[:, begin:end], width), bits, scale_dtype)
        found, errors = _block(left[:, begin:end], factor[begin:end, begin:end], block, (1 << bits) - 1)
        left[:, end:] -= errors @ factor[begin:end, end:]
        blocks.append(found)
    arrays = zip(*((r.numbers, r.scales, r.zeros) for r in blocks), strict=True)
    return RoundedBlocks(*(np.concatenate(a, axis=1) for a in arrays))


def _block(weights: Array, factor: Array, block: RoundedBlocks, levels: int) -> tuple[RoundedBlocks, Array]:
    """Weights [rows, count] rounded with the scales of ``block``, and their errors divided by the factor's diagonal."""
    left = np.ascontiguousarray(weights.T)  # each step then works on contiguous memory
    scales, zeros = block.scales[:, 0, 0], block.zeros[:, 0, 0]
    numbers = np.repeat(zeros[None], block.numbers.shape[-1], axis=0)
    errors = np.empty_like(left)
    for k in range(len(left)):
        np.clip(np.rint(left[k] / scales) + zeros, 0, levels, out=numbers[k])
        np.divide(left[k] - (numbers[k] - zeros) * scales, factor[k, k], out=errors[k])
        left[k + 1 :] -= factor[k, k + 1 :, None] * errors[k]
    return RoundedBlocks(np.ascontiguousarray(numbers.T)[:, None], block.scales, block.zeros), errors.T


def _error(rounded: RoundedBlocks, weights: Array, moments: Array) -> Array:
    """The mean squared error of each result on the calibration data, [N]."""
    rows, K = weights.shape
    off = rounded.floats.reshape(rows, -1)[:, :K] - weights
    error: Array = np.einsum("nk,nk->n", off @ moments.astype(np.float32, copy=False), off)
    return error
