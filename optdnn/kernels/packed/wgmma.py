"""Products of many rows with packed weights on Hopper, which become 16-bit floats in wgmma's registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.launch import Launch
from optdnn.kernels.packed import wgmma_kernel as wgmma
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.product import PackedProduct, refusal
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts

LEAST_ROWS = 9
"""Fewer are the columns of one mma.sync."""


@lru_cache(maxsize=1024)
def _offers(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """Where K is not shared, a row's sums have one order."""
    found = wgmma.candidates(problem, gpu)
    return tuple(Offer(c, wgmma.estimate(problem, c, gpu), row_invariant=c.split == 1) for c in found)


class PackedWgmma(PackedProduct):
    """PackedMatMul of nine and more rows of 16-bit floats. On an H200 it took less time than unpacked weights up to 2,048 rows."""

    name = "packed_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.gpu.hopper:
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        if (why := refusal(b, op)) is not None:
            return why
        rows = math.prod(op.outputs[0].type.static_shape[:-1])
        return f"it is for {LEAST_ROWS} rows and more, not {rows}" if rows < LEAST_ROWS else None

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def workspace(self, problem: Problem, config: Any) -> tuple[int, int]:
        return wgmma.workspace(problem, config)

    def planned(self, b: Builder, problem: Problem, config: Any, x_pitch: int, out_pitch: int) -> Launch:
        return wgmma.launch(problem, config, b.gpu, x_pitch, out_pitch)
