"""Products with triangular matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.types import Array


def chosen(patch: Patch, mask: Array, one: Value, other: Value) -> Value:
    """``one`` where the constant mask is true, ``other`` elsewhere."""
    return patch.add("Where", [patch.constant(mask, "mask"), one, other])


def times(patch: Patch, one: Value, other: Value) -> Value:
    """The matrix product."""
    return patch.add("MatMul", [one, other], MatMulAttrs())


def inverse_of_rest(patch: Patch, a: Value, size: int, dtype: Any) -> Value:
    """``(I - L)^-1``, with L the part of ``a`` (..., size, size) below the diagonal.

    It is computed for blocks along the diagonal. Two products double the size of the blocks: ``S + S L_b S``, where L_b is the part
    of L below the first block of each pair and left of the second one. This is as stable as forward substitution.
    """
    rows, columns = np.indices((size, size))
    zero, eye = patch.constant(np.array(0, dtype), "zero"), patch.constant(np.eye(size, dtype=dtype), "eye")
    blocks, inverse = 1, eye
    while blocks < size:
        pairs = (rows // blocks % 2 == 1) & (columns // blocks == rows // blocks - 1)
        if blocks == 1:
            inverse = chosen(patch, pairs, a, eye)
        else:
            between = times(patch, chosen(patch, pairs, a, zero), inverse)
            inverse = patch.add("Add", [inverse, times(patch, inverse, between)])
        blocks *= 2
    return inverse
