"""Reductions with few outputs of many terms each: several blocks share the terms of an output, and the last one merges their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.reduce.grid import Grid, space_of
from optdnn.kernels.reduce.reduce import Reduction, reduction_of
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MERGE_S = 2.0e-6
"""Seconds to merge the partial results of an output's blocks."""
WORTH_S = 1e-6
"""Least predicted gain of several parts, in seconds."""


@dataclass(frozen=True, order=True)
class Config:
    """The terms of an output have ``parts`` parts."""

    parts: int

    def __str__(self) -> str:
        return f"rd{self.parts}"


def estimate(grid: Grid, parts: int, gpu: GpuFacts) -> float:
    """Predicted seconds of a dependent launch with ``parts`` blocks per output (1: there is no merge)."""
    return grid.seconds(parts, gpu) + (MERGE_S if parts > 1 else 0.0)


def candidates(grid: Grid, gpu: GpuFacts) -> list[Config]:
    """The configurations to time, best predicted first. No part is empty."""
    asked = (waves * gpu.multiprocessors // grid.blocks for waves in (1, 2, 4))
    most = [min(parts, -(-grid.reads // grid.runs)) for parts in asked]
    found = {Config(-(-grid.reads // -(-grid.reads // parts))) for parts in most if parts > 1}
    return sorted(found, key=lambda c: (estimate(grid, c.parts, gpu), c))


def best_parts(grid: Grid, gpu: GpuFacts) -> int:
    """The number of parts that is predicted to be fastest: 1 unless more parts gain at least :data:`WORTH_S`."""
    found = candidates(grid, gpu) if grid.count else []
    if not found or estimate(grid, found[0].parts, gpu) > estimate(grid, 1, gpu) - WORTH_S:
        return 1
    return found[0].parts


class ReductionParts(Reduction):
    """Every ONNX reduction, and pools over all positions, with several blocks per output."""

    name = "reduce_parts"
    row_invariant: ClassVar[bool] = False

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := super().refuse(b, op)) is not None:
            return why
        if 0 in op.outputs[0].type.static_shape or reduction_of(b, op) is None:
            return "it reduces nothing"
        if best_parts(self._grid(b, op), b.gpu) == 1:
            return "one block per output is predicted to be as fast"
        return None

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        grid = self._grid(b, op)
        return [Offer(c, estimate(grid, c.parts, b.gpu), False) for c in candidates(grid, b.gpu)]

    @staticmethod
    def _grid(b: Builder, op: Op) -> Grid:
        made = reduction_of(b, op)
        assert made is not None
        return space_of([made.x], made.axes, b.result(op.value)).grid
