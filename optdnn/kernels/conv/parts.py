"""Convolutions and matrix products of fp32 on Hopper's tensor cores: three products of tf32 for each, as exact as fp32
(``conv_parts.cuh``).
"""

from __future__ import annotations

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.fp32 import TiledConv, TiledGemm
from optdnn.kernels.conv.fused import ConvolutionKernel
from optdnn.kernels.conv.hopper import HopperConv
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.kernels.tactic import Tactic, costlier


def _later(b: Builder, op: Op, own: ConvolutionKernel, other: Tactic, result: TensorView) -> str | None:
    """Why scalar units go first until both are measured, or None: they read and write tensors as they lie, or are predicted to be
    faster. ``result``: where the result goes."""
    if other.refuse(b, op) is not None:
        return None
    c = own.convolution(b, op)
    if any(x is not None and x.make is not None for x in (*(f.x for f in c.feeds), c.residual)):
        return "its operands would be copied first"
    if not c.ep.rest and c.between.strides != result.strides:
        return "its result would be copied"
    return costlier(b, op, own, other)


class PartsConv(HopperConv):
    """Ungrouped convolutions of fp32 over one or two spatial axes."""

    name = "conv_parts_sm90"
    parts = True

    def defer(self, b: Builder, op: Op) -> str | None:
        return _later(b, op, self, TiledConv(), b.result(op.value))


class PartsGemm(HopperGemm):
    """MatMul and Gemm of fp32 whose second operand is a constant matrix."""

    name = "gemm_parts_sm90"
    parts = True

    def defer(self, b: Builder, op: Op) -> str | None:
        return _later(b, op, self, TiledGemm(), b.result(op.value, self._strides(b, op)))
