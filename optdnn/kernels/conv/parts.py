"""Convolutions and matrix products of fp32 on Hopper's tensor cores: three products of tf32 for each, as exact as fp32
(``conv_parts.cuh``).
"""

from __future__ import annotations

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv.fp32 import TiledConv, TiledGemm
from optdnn.kernels.conv.hopper import HopperConv
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.kernels.tactic import costlier


class PartsConv(HopperConv):
    """Ungrouped convolutions of fp32 over one or two spatial axes."""

    name = "conv_parts_sm90"
    parts = True

    def defer(self, b: Builder, op: Op) -> str | None:
        """Where scalar units are predicted to be faster."""
        return None if TiledConv().refuse(b, op) is not None else costlier(b, op, self, TiledConv())


class PartsGemm(HopperGemm):
    """MatMul and Gemm of fp32 whose second operand is a constant matrix."""

    name = "gemm_parts_sm90"
    parts = True

    def defer(self, b: Builder, op: Op) -> str | None:
        """Where scalar units are predicted to be faster."""
        return None if TiledGemm().refuse(b, op) is not None else costlier(b, op, self, TiledGemm())
