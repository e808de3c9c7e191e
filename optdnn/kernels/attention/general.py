"""Fused attention on the general tensor-core kernel (mma.sync fed by cp.async): every GPU from sm_80 on.

On Hopper it runs the problems that Hopper's own kernel refuses, for example heads of more than 256 features.
"""

from __future__ import annotations

from typing import Any, ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.attention import general_kernel as attention_general
from optdnn.kernels.attention.hopper import HopperAttention
from optdnn.kernels.builder import Builder
from optdnn.runtime.cuda.gpu_facts import no_kernels


class GeneralAttention(HopperAttention):
    """Attention of 16-bit floats in one launch: mma.sync and cp.async, online softmax in fp32."""

    name = "attention_sm80"
    plans: ClassVar[Any] = attention_general

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := no_kernels(b.arch)) is not None:
            return why
        if HopperAttention().refuse(b, op) is None:
            return "Hopper's own kernel runs it"
        q, v = (b.graph.type(x).static_shape[-1] for x in (op.inputs[0], op.inputs[2]) if x is not None)
        wide = max(q, v) > attention_general.ONE_WARP
        least = attention_general.Config(2, 1, 32, 2, split=2) if wide else attention_general.Config(1, 1, 16, 2)
        return self._unsuitable(b, op, least)
