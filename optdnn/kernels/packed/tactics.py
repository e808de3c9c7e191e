"""Products of rows with packed weights in one launch: the products of a language model, for each token and for its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.packed import digits_kernel, gemv_kernel, mma_kernel, resident_kernel, wgmma_kernel
from optdnn.kernels.packed.gemm import PackedGemm
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.product import PackedProduct, row_count
from optdnn.kernels.tactic import Offer, costlier
from optdnn.runtime.cuda.gpu_facts import GpuFacts

FIRST_ROWS = 32
"""Up to this number of rows, untuned builds prefer ``packed_mma`` to unpacked weights."""
LEAST_ROWS = 9
"""Fewest rows of wgmma: up to eight rows fit the columns of one mma.sync."""


@lru_cache(maxsize=4096)
def _with_ordered(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    found = wgmma_kernel.candidates(problem, gpu)
    if not any(c.ordered for c in found):
        found += wgmma_kernel.candidates(problem, gpu, 1, ordered=True)
    return tuple(Offer(c, wgmma_kernel.estimate(problem, c, gpu), c.ordered) for c in found)


class PackedDigits(PackedProduct):
    """PackedMatMul of one to eight rows of 16-bit floats, in integer arithmetic."""

    name = "packed_digits"
    kernel: ClassVar[ModuleType] = digits_kernel
    row_invariant: ClassVar[bool] = False
    """Another tactic takes more rows and sums in another order. Each configuration sums a column in its own order."""


class PackedGemv(PackedProduct):
    """PackedMatMul of one to eight rows of 16-bit floats. A configuration sums a column in one order for any number of rows."""

    name = "packed_gemv"
    kernel: ClassVar[ModuleType] = gemv_kernel
    row_invariant: ClassVar[bool] = False
    """Another tactic takes more rows and sums in another order."""


class PackedMma(PackedProduct):
    """PackedMatMul of up to 256 rows of 16-bit floats. The weights are unpacked to 16-bit floats in registers."""

    name = "packed_mma"
    kernel: ClassVar[ModuleType] = mma_kernel

    def defer(self, b: Builder, op: Op) -> str | None:
        """Kernels for more rows may be predicted to be faster. Hopper's kernel was faster in every measured case."""
        if b.gpu.hopper:
            return None if PackedWgmma().refuse(b, op) else "packed_sm90 takes less time on Hopper"
        return None if row_count(op) <= FIRST_ROWS else costlier(b, op, self, PackedGemm())

    def one_order(self, config: Any) -> bool:
        """No: the order depends on how K is shared, and the best configuration for other rows may share K otherwise."""
        return False


class PackedResident(PackedProduct):
    """PackedMatMul of 9 to 16 rows of 16-bit floats. The rows stay in shared memory. Each configuration sums a column in its own
    order."""

    name = "packed_resident"
    kernel: ClassVar[ModuleType] = resident_kernel
    row_invariant: ClassVar[bool] = False
    """Other tactics take other numbers of rows and sum in another order."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.gpu.hopper:
            return f"it needs Hopper's bulk copies (sm_90a), not {b.arch}"
        least, rows = resident_kernel.LEAST_ROWS, row_count(op)
        return super().refuse(b, op) or (f"it is for {least} rows and more, not {rows}" if rows < least else None)

    def workspace(self, problem: Problem, config: Any, gpu: GpuFacts) -> tuple[int, int]:
        return resident_kernel.workspace(problem, config, gpu)

    def defer(self, b: Builder, op: Op) -> str | None:
        """Without timings, the cost model decides."""
        return costlier(b, op, self, PackedWgmma())


class PackedWgmma(PackedProduct):
    """PackedMatMul of nine and more rows of 16-bit floats. The weights are unpacked to 16-bit floats in wgmma's registers. On an H200, it
    took less time than unpacked weights up to 2,048 rows."""

    name = "packed_sm90"
    kernel: ClassVar[ModuleType] = wgmma_kernel

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.gpu.hopper:
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        if (why := super().refuse(b, op)) is not None:
            return why
        few = row_count(op) < LEAST_ROWS and not b.row_invariant  # one kernel for every batch size
        return f"it is for {LEAST_ROWS} rows and more, not {row_count(op)}" if few else None

    def one_order(self, config: Any) -> bool:
        """Whether neither blocks nor teams share K."""
        return bool(config.ordered)

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        """All candidates, and one of a single order if none of them is."""
        return _with_ordered(problem, gpu)
