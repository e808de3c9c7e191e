"""Convolutions and matrix products of fp32 on Hopper's tensor cores: three products of fp16 for each product, nearly as exact as fp32
(``conv_parts_sm90.cu``).
"""

from __future__ import annotations

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.cost_terms import LATENCY
from optdnn.kernels.conv.direct import DirectConv
from optdnn.kernels.conv.fp32 import TiledConv, TiledGemm
from optdnn.kernels.conv.fused import ConvolutionKernel, copy_seconds
from optdnn.kernels.conv.general import BandedConv
from optdnn.kernels.conv.hopper import HopperConv
from optdnn.kernels.conv.volume import VolumeConv
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.kernels.tactic import costlier
from optdnn.types import Array

SLOWER = 1.4
"""Scalar units took 1.2 to 2 times as long as predicted in ResNet-50, RegNetY and EfficientNet-B0 (H200, batch 1 to 32). Not counted on
if this kernel needs a copy."""

STEP, LEAST_CHANNELS = 32, 128
"""Input channels of a K step; and channels of a tile up to which its step takes the same time, since threads must divide the pixels."""


def slower_than_scalar(
    b: Builder, op: Op, own: ConvolutionKernel, other: ConvolutionKernel, result: TensorView
) -> str | None:
    """Why the tactic on scalar units is predicted to be faster, or None. It reads and writes tensors in place, which saves copies.
    ``result``: where the result goes."""
    if b.row_invariant or other.refuse(b, op) is not None:
        return None  # the faster one depends on the batch size, and they sum in different orders
    more = sum(map(copy_seconds, _copied(b, op, own, result))) - sum(map(copy_seconds, other.convolution(b, op).copied))
    return costlier(b, op, own, other, 1.0 if more > 0 else SLOWER, more)


def _copied(b: Builder, op: Op, own: ConvolutionKernel, result: TensorView) -> list[TensorView]:
    """Tensors that the tactic copies."""
    c = own.convolution(b, op)
    return [*c.copied, *([result] if not c.ep.rest and c.between.strides != result.strides else [])]


class PartsConv(HopperConv):
    """Ungrouped convolutions of fp32 over one or two spatial axes."""

    name = "conv_parts_sm90"
    parts = True

    def defer(self, b: Builder, op: Op) -> str | None:
        return slower_than_scalar(b, op, self, TiledConv(), b.result(op.value))


class PartsVolume(VolumeConv):
    """Ungrouped convolutions of fp32 over three axes."""

    name = "conv3d_parts_sm90"
    parts = True
    flat = PartsConv()

    def defer(self, b: Builder, op: Op) -> str | None:
        return super().defer(b, op) or slower_than_scalar(b, op, self, TiledConv(), b.result(op.value))


class PartsBands(BandedConv):
    """Convolutions of fp32 with several groups. Neighboring narrow groups form a band with zeros between them."""

    name = "conv_bands_parts_sm90"
    parts = True

    def together(self, op: Op, weight: Array) -> int:
        """The divisor of the groups with which a pixel takes the least time: K steps of all bands, times the channels of a tile."""
        groups: int = op.attrs.group
        inside, channels = weight.shape[1], len(weight) // groups

        def cost(n: int) -> tuple[int, int]:
            return groups // n * -(-n * inside // STEP) * max(n * channels, LEAST_CHANNELS), n

        whole = (n for n in range(1, groups) if groups % n == n * channels % 8 == n * inside % 4 == 0)
        return min((*whole, groups), key=cost)

    def defer(self, b: Builder, op: Op) -> str | None:
        result, direct = b.result(op.value), DirectConv()
        if TiledConv().refuse(b, op) is None or direct.refuse(b, op) is not None:
            return slower_than_scalar(b, op, self, TiledConv(), result)
        if b.row_invariant:
            return None
        copies = sum(map(copy_seconds, _copied(b, op, self, result)))
        return costlier(b, op, self, direct, more=copies - LATENCY)  # the other kernel is a launch, too


class PartsGemm(HopperGemm):
    """MatMul and Gemm of fp32 whose second operand is a constant matrix."""

    name = "gemm_parts_sm90"
    parts = True

    def defer(self, b: Builder, op: Op) -> str | None:
        return slower_than_scalar(b, op, self, TiledGemm(), b.result(op.value, self._strides(b, op)))
