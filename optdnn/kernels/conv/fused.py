"""What the launches of convolutions and products have in common: the bias, what stages read, and the attributes of the meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.ir.epilogue import RESIDUAL, Epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.types import Array

Geometry = tuple[tuple[int, int], tuple[int, int, int, int], tuple[int, int]]
"""Strides, pads (top, left, bottom, right), dilations."""
POINTWISE: Geometry = ((1, 1), (0, 0, 0, 0), (1, 1))
"""Of a product of rows with a matrix, which is a convolution of 1 x 1 images."""


def conv_attrs(
    geometry: tuple[Sequence[int], Sequence[int], Sequence[int]], group: int, epilogue: Sequence[Stage],
    prologue: Sequence[Stage] = (), arity: int = RESIDUAL,
) -> dict[str, Any]:  # fmt: skip
    """The attributes of a Conv as its reference kernel takes them. ``geometry``: strides, pads, dilations."""
    strides, pads, dilations = geometry
    return {
        "strides": strides, "pads": pads, "dilations": dilations, "group": group, "auto_pad": "NOTSET",
        "prologue": plain_stages(prologue), "epilogue": plain_stages(epilogue), "arity": arity,
    }  # fmt: skip


def bias_row(b: Builder, op: Op, bias: Array | None, size: int) -> TensorView:
    """The fp32 constant ``[size]`` of a bias (None: zeros), with zeros behind it."""
    row = np.zeros(size, np.float32)
    if bias is not None:
        row[: len(bias)] = bias
    return b.constant(row, f"{op.outputs[0].name}.bias")


def stage_operands(b: Builder, ep: Epilogue, residual: TensorView | None) -> list[TensorView | None]:
    """The operands of the stages, which stand behind input, weights and bias."""
    constants = [b.constant(c, "scalar") for c in ep.constants]
    return [residual, *constants] if residual is not None or constants else []
