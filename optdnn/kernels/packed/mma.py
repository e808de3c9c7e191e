"""Products of some rows with packed weights, which become 16-bit floats in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.launch import Launch
from optdnn.kernels.packed import mma_kernel as mma
from optdnn.kernels.packed.gemm import PackedGemm
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.product import PackedProduct, costlier, refusal
from optdnn.kernels.packed.wgmma import PackedWgmma
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted

FIRST_ROWS = 32
"""For up to so many, untuned builds prefer it to unpacked weights."""


@lru_cache(maxsize=1024)
def _offers(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """A row's sums have an order that depends on how K is shared, which the best configuration for other rows may do otherwise."""
    gpu = fitted(gpu)
    return tuple(Offer(c, mma.estimate(problem, c, gpu), row_invariant=False) for c in mma.candidates(problem, gpu))


class PackedMma(PackedProduct):
    """PackedMatMul of up to 256 rows of 16-bit floats."""

    name = "packed_mma"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        rows = math.prod(op.outputs[0].type.static_shape[:-1])
        return f"it is for up to {mma.MAX_ROWS} rows, not {rows}" if rows > mma.MAX_ROWS else None

    def defer(self, b: Builder, op: Op) -> str | None:
        """Kernels for more rows may be predicted to be faster; Hopper's was in each case that was measured."""
        if b.gpu.hopper:
            return None if PackedWgmma().refuse(b, op) else "packed_sm90 takes less time on Hopper"
        if math.prod(op.outputs[0].type.static_shape[:-1]) <= FIRST_ROWS:
            return None
        return costlier(b, op, self, PackedGemm())

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def workspace(self, problem: Problem, config: Any) -> tuple[int, int]:
        return mma.workspace(problem, config)

    def planned(self, b: Builder, problem: Problem, config: Any, x_pitch: int, out_pitch: int) -> Launch:
        return mma.launch(problem, config, b.gpu, x_pitch, out_pitch)
