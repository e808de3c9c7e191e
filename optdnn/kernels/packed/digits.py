"""Products of a few rows with packed weights in integers: what a language model does for each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.launch import Launch
from optdnn.kernels.packed import digits_kernel as digits
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.product import PackedProduct, described, refusal
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted


@lru_cache(maxsize=1024)
def offers(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The configurations to time. A column's sum has another order in each."""
    return tuple(Offer(c, digits.estimate(problem, c, fitted(gpu))) for c in digits.candidates(problem, gpu))


class PackedDigits(PackedProduct):
    """PackedMatMul of one to eight rows of 16-bit floats."""

    name = "packed_digits"
    row_invariant: ClassVar[bool] = False
    """More rows are another tactic's, which adds in another order."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        rows = math.prod(op.outputs[0].type.static_shape[:-1])
        if rows > digits.MAX_ROWS:
            return f"it is for up to {digits.MAX_ROWS} rows, not {rows}"
        return digits.unfit(described(b, op), b.gpu)

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return offers(problem, gpu)

    def planned(self, b: Builder, problem: Problem, config: Any, x_pitch: int, out_pitch: int) -> Launch:
        return digits.launch(problem, config, b.gpu, x_pitch, out_pitch)
