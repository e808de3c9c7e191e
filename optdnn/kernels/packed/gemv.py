"""Products of a few rows with packed weights: what a language model does for each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.launch import Launch
from optdnn.kernels.packed import gemv_kernel as gemv
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.product import PackedProduct, refusal
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted


@lru_cache(maxsize=1024)
def _offers(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """A column's sum has one order in each of them, whatever the number of rows."""
    gpu = fitted(gpu)
    return tuple(Offer(c, gemv.estimate(problem, c, gpu)) for c in gemv.candidates(problem, gpu))


class PackedGemv(PackedProduct):
    """PackedMatMul of one to eight rows of 16-bit floats."""

    name = "packed_gemv"
    row_invariant: ClassVar[bool] = False
    """More rows are another tactic's, which adds in another order."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        rows = math.prod(op.outputs[0].type.static_shape[:-1])
        return f"it is for up to {gemv.MAX_ROWS} rows, not {rows}" if rows > gemv.MAX_ROWS else None

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def planned(self, b: Builder, problem: Problem, config: Any, x_pitch: int, out_pitch: int) -> Launch:
        return gemv.launch(problem, config, b.gpu, x_pitch, out_pitch)
