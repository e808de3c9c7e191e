"""Weights of recurrent layers in the order of ``rnn_sm90.cu``: tiles of tensor-core operands."""

from __future__ import annotations

import numpy as np

from optdnn.types import Array


def _places(ranks: int, chunks: int) -> tuple[Array, ...]:
    """Gate, cell and column of each element ``[ranks, warps, K tiles, lanes, 8]`` of the fragments."""
    rank, warp, tile, lane, element = np.ogrid[:ranks, :8, : 2 * chunks, :32, :8]
    register, low = element // 2, element % 2
    row = lane // 4 + 8 * (register % 2)
    k = tile // 2 * 32 + lane % 4 * 8 + tile % 2 * 4 + register // 2 * 2 + low
    return row // 4, rank * 32 + warp * 4 + row % 4, k


def pack_matrix(matrix: Array, hidden: int) -> Array:
    """One layer's [gates * hidden, K] matrix -> ``[ranks, warps, K tiles, lanes, 8]`` mma fragments. Keeps the dtype.

    K is padded with zeros to a multiple of 32; a GRU's fourth gate is zero.
    """
    gates, ranks = matrix.shape[0] // hidden, hidden // 32
    chunks = -(-matrix.shape[1] // 32)
    full = np.zeros((4, hidden, chunks * 32), matrix.dtype)
    full[:gates, :, : matrix.shape[1]] = matrix.reshape(gates, hidden, -1)
    return np.ascontiguousarray(full[_places(ranks, chunks)])


def unpack_matrix(packed: Array, hidden: int, gates: int, inputs: int) -> Array:
    """The [gates * hidden, inputs] matrix that :func:`pack_matrix` packed."""
    ranks, chunks = hidden // 32, -(-inputs // 32)
    full = np.zeros((4, hidden, chunks * 32), packed.dtype)
    full[_places(ranks, chunks)] = packed.reshape(ranks, 8, 2 * chunks, 32, 8)
    return full[:gates, :, :inputs].reshape(gates * hidden, inputs)
