"""Products of 9 to 16 rows with packed weights, whose K is split over warps and over the blocks of a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.launch import Launch
from optdnn.kernels.packed import split_kernel as split
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.product import PackedProduct, described, refusal
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts


@lru_cache(maxsize=1024)
def _offers(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The configurations to time. A column's sum has another order in each."""
    return tuple(Offer(c, split.estimate(problem, c, gpu)) for c in split.candidates(problem, gpu))


class PackedSplit(PackedProduct):
    """PackedMatMul of 9 to 16 rows of 16-bit floats."""

    name = "packed_split"
    row_invariant: ClassVar[bool] = False
    """Other numbers of rows are another tactic's, which adds in another order."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.gpu.hopper:
            return f"it needs Hopper's clusters (sm_90a), not {b.arch}"
        if (why := refusal(b, op)) is not None:
            return why
        rows = math.prod(op.outputs[0].type.static_shape[:-1])
        if not split.LEAST_ROWS <= rows <= split.MAX_ROWS:
            return f"it is for {split.LEAST_ROWS} to {split.MAX_ROWS} rows, not {rows}"
        return split.unfit(described(b, op), b.gpu)

    def defer(self, b: Builder, op: Op) -> str | None:
        """Its configurations are not fitted to timings yet: tuned builds time them."""
        return "it is taken where it is measured to be faster"

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def planned(self, b: Builder, problem: Problem, config: Any, x_pitch: int, out_pitch: int) -> Launch:
        return split.launch(problem, config, b.gpu, x_pitch, out_pitch)
