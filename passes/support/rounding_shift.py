"""Rounded weights shift the mean of a result; this module computes the shift, which a bias corrects.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Op
from optdnn.runtime.reference.window import resolve_pads
from optdnn.types import Array


def rounding_shift(op: Op, error: Array, means: Array, dims: Sequence[DimLike]) -> Array | None:
    """The shift of each output channel's mean of a Conv, Gemm or MatMul, caused by the rounding of its weights.

    The shift is the rounding error (``error``, with the shape of the weights) times ``means``, the mean of each channel of the
    operand. ``dims`` are the operand's dimensions.

    Padding is zero, so each tap of a convolution is weighted by the share of windows in which it lies inside the image. None if the
    number of means differs from the number of channels, or if a size is not known.
    """
    if op.kind == "Conv":
        group, per_group = op.attrs.group, error.shape[1]
        if len(dims) not in (4, 5) or len(means) != group * per_group:
            return None
        shares = _shares(op, error.shape[2:], dims[2:])
        if shares is None:
            return None
        rows = (error * shares).reshape(group, len(error) // group, per_group, -1).sum(axis=3)
        shift: Array = np.einsum("gmi,gi->gm", rows, means.reshape(group, per_group)).reshape(-1)
        return shift
    if op.kind not in ("Gemm", "MatMul") or error.ndim != 2:
        return None
    columns = error.T if op.kind == "Gemm" and op.attrs.transB else error
    return means @ columns if len(means) == len(columns) else None


def _shares(op: Op, kernel: Sequence[int], sizes: Sequence[DimLike]) -> Array | None:
    """For each tap of the kernel, the share of a convolution's windows in which the tap lies inside the image."""
    pads = resolve_pads(op.attrs.auto_pad, op.attrs.pads, sizes, kernel, op.attrs.strides, op.attrs.dilations)
    if pads is None:
        return None
    along: list[Array] = []
    for k, (taps, size, out) in enumerate(zip(kernel, sizes, op.outputs[0].type.dims[2:], strict=True)):
        if not isinstance(size, int) or not isinstance(out, int):
            return None
        at = np.arange(out)[:, None] * op.attrs.strides[k] - pads[k] + np.arange(taps) * op.attrs.dilations[k]
        along.append(((at >= 0) & (at < size)).mean(axis=0) if out else np.zeros(taps))
    return reduce(np.multiply.outer, along)
