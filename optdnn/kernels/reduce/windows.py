"""Pools over large windows that do not overlap, as reductions of parts of each axis: many threads share a window.

With a window per thread, a thread adds all elements of the window one after another: an average of 16 x 16 pixels takes ten times
as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import TensorView
from optdnn.kernels.pool.window import MOST_APART, pads_of, pool_attrs

WINDOWS = {"AveragePool": "ReduceMean", "MaxPool": "ReduceMax"}
"""Kinds of pools over windows, and their rules."""


def refuse_windows(op: Op, shape: Sequence[int]) -> str | None:
    """The reason why a pool of an operand of this shape is no reduction of parts of each axis, or needs none; else None."""
    a = op.attrs
    if len(op.outputs) > 1:
        return "it does not give indices"
    if a.kernel_shape != a.strides or any(d != 1 for d in a.dilations):
        return "its windows overlap, or leave elements out"
    if any(pads_of(op, shape, a.kernel_shape)) or any(n % k for n, k in zip(shape[2:], a.kernel_shape, strict=True)):
        return "its windows do not divide the image"
    if math.prod(a.kernel_shape) <= MOST_APART:
        return f"one thread loads windows of up to {MOST_APART} elements at once"
    return None


def windows(op: Op, x: TensorView) -> tuple[TensorView, tuple[int, ...], dict[str, Any]]:
    """The operand with two axes for each spatial axis (windows, and elements of a window), the axes to reduce, and the attributes of the
    launch's meaning."""
    shape, strides = list(x.shape[:2]), list(x.strides[:2])
    for k, n, s in zip(op.attrs.kernel_shape, x.shape[2:], x.strides[2:], strict=True):
        shape += [n // k, k]
        strides += [s * k, s]
    attrs = pool_attrs(op, x.shape)
    if op.kind == "AveragePool":
        attrs["count_include_pad"] = op.attrs.count_include_pad
    return x.view(tuple(shape), tuple(strides)), tuple(range(3, len(shape), 2)), attrs
