"""Long chains of stages over one 8-bit tensor as a table: its results for all 256 bytes, computed at build time.

ONNX Runtime quantizes an activation operator by operator. A GELU then is five operators with a rounding after each, or 39 stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.kernels.builder import Builder, TensorView
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import DTYPES, Array

BYTES = (DTYPES["int8"], DTYPES["uint8"])
LEAST_STAGES = 8
"""Stages from which on a table is used. A look-up takes about as many instructions as two stages."""


def byte_table(
    b: Builder, operands: Sequence[TensorView | None], attrs: Mapping[str, Any], out: TensorView
) -> tuple[int, Array] | None:
    """The number of the operand that is looked up, and the table: an element of the result's type for each of its bytes, as an
    unsigned number. None if the stages are few, or read anything but one tensor of int8 or uint8 and constant scalars."""
    moving = [i for i, x in enumerate(operands) if x is not None and constant_scalar(b, x) is None]
    if len(attrs["epilogue"]) < LEAST_STAGES or len(moving) != 1:
        return None
    (slot,) = moving
    x = operands[slot]
    if x is None or x.dtype not in BYTES or x.shape != out.shape:
        return None
    values = np.arange(256, dtype=np.uint8).view(x.dtype)
    given = [values if i == slot else None if v is None else constant_scalar(b, v) for i, v in enumerate(operands)]
    (table,) = run_kernel("Pointwise", given, attrs, [out.dtype])
    return (slot, np.ascontiguousarray(table)) if table.shape == values.shape else None


def constant_scalar(b: Builder, x: TensorView) -> Array | None:
    """The value of a constant of one element, with shape []; else None."""
    blob = b.buffers[x.buffer].blob
    return None if blob is None or b.blobs[blob].size != 1 else b.blobs[blob].reshape(())
