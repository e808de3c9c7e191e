"""Attention of one query over all keys in one launch: the step of a decoder whose caches grow or have a mask, the attention of such a
decoder over an encoder's result, and the pooling of tokens by one query.

The fused kernels of many queries give a head to one block. Here blocks share the keys of a head.
"""

from __future__ import annotations

from typing import Any, ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.attention import one_query_kernel
from optdnn.kernels.attention.cached import workspace_of
from optdnn.kernels.attention.cached_kernel import Config
from optdnn.kernels.attention.general import GeneralAttention
from optdnn.kernels.attention.hopper import HopperAttention, Workspace
from optdnn.kernels.attention.problem import Problem
from optdnn.kernels.builder import Builder
from optdnn.kernels.tactic import costlier
from optdnn.runtime.cuda.gpu_facts import no_kernels


class OneQueryAttention(HopperAttention):
    """Attention of one query of 16-bit floats: mma.sync, online softmax in fp32; the queries that share a key head are one tile."""

    name = "attention_query"
    plans: ClassVar[Any] = one_query_kernel

    def refuse(self, b: Builder, op: Op) -> str | None:
        return no_kernels(b.arch) or self._unsuitable(b, op, Config(4, 1))

    def defer(self, b: Builder, op: Op) -> str | None:
        """The kernels of many queries are faster if they have enough blocks, or few keys."""
        if b.row_invariant:  # the faster one depends on the batch size, and they sum in different orders
            return None
        others = (t for t in (HopperAttention(), GeneralAttention()) if t.refuse(b, op) is None)
        return next((why for other in others if (why := costlier(b, op, self, other)) is not None), None)

    def _workspace(self, b: Builder, op: Op, problem: Problem, config: Config) -> tuple[Workspace, Workspace]:
        return workspace_of(b, op, one_query_kernel.cached_problem(problem), config)

    @staticmethod
    def _quantizer(b: Builder, op: Op) -> None:
        """The kernel stores no quantized result."""
