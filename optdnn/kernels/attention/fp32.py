"""Fused attention of fp32: wgmma on parts of fp16, Hopper; mma.sync on the tf32 parts of each value, every GPU from sm_80 on."""

from __future__ import annotations

from typing import Any, ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.attention import fp32_kernel, parts_kernel
from optdnn.kernels.attention.general_kernel import Config
from optdnn.kernels.attention.hopper import HopperAttention
from optdnn.kernels.builder import Builder
from optdnn.kernels.quantized.quantizer import Quantizer
from optdnn.kernels.tactic import costlier
from optdnn.runtime.cuda.gpu_facts import no_kernels
from optdnn.types import FP32, DType


class Fp32Attention(HopperAttention):
    """Attention of fp32 in one launch with online softmax. A product is three tf32 products, nearly as exact as fp32; or one, if tf32 was
    requested."""

    name = "attention_fp32"
    plans: ClassVar[Any] = fp32_kernel
    dtypes: ClassVar[tuple[DType, ...]] = (FP32,)
    takes: ClassVar[str] = "fp32"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return no_kernels(b.arch) or self._unsuitable(b, op, Config(1, 1, 16, 2))

    @staticmethod
    def _quantizer(b: Builder, op: Op) -> Quantizer | None:
        return None


class PartsAttention(Fp32Attention):
    """Attention of fp32 in one launch on Hopper. A product is three products of fp16, nearly as exact as fp32; or one, if tf32 was
    requested."""

    name = "attention_parts_sm90"
    plans: ClassVar[Any] = parts_kernel

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's wgmma (sm_90a), not {b.arch}"
        return self._unsuitable(b, op, parts_kernel.Config(1, 16, 1, kept=False))

    def defer(self, b: Builder, op: Op) -> str | None:
        if b.row_invariant:  # the faster one depends on the batch size, and they sum in different orders
            return None
        other = Fp32Attention()
        return costlier(b, op, self, other) if other.refuse(b, op) is None else None
