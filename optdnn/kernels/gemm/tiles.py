"""Matrix products of fp32 operands, neither of them constant, in the tiles of ``matmul_fp32.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.kernels.builder import TensorView
from optdnn.kernels.conv.fp32_kernel import LARGEST
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.types import FP32

LEAST = 1 << 22
"""Products below which the plain kernel is as good: it starts sooner."""
DEPTH, STAGES = 16, 3
ENOUGH = 256
"""Threads that occupy a multiprocessor well: smaller tiles where there are fewer."""


@dataclass(frozen=True)
class Tile:
    """A block's rows and columns; a thread has eight rows of eight columns."""

    rows: int
    columns: int
    together: bool
    """Whether neighbouring columns of the right operand are neighbours in memory, four of them one access."""

    @property
    def threads(self) -> int:
        return self.rows * self.columns // 64

    @property
    def shared_bytes(self) -> int:
        return 4 * STAGES * DEPTH * (self.rows + 4 + self.columns + (0 if self.together else 4))

    def defines(self) -> str:
        """What the kernel's headers need."""
        values = {
            "BM": self.rows, "BN": self.columns, "TM": 8, "TN": 8, "BK": DEPTH, "STAGES": STAGES, "EARLY": 1,
            "B_PAD": 0 if self.together else 4, "COLUMNS_TOGETHER": int(self.together),
        }  # fmt: skip
        return render.constants(values)


def tile_of(
    left: TensorView, right: TensorView, m: int, n: int, k: int, batches: Sequence[int], count: int, gpu: GpuFacts
) -> Tile | None:
    """The tile for ``count`` products of m x k with k x n matrices (the last two axes of the operands), or None where the plain
    kernel does them. ``batches``: the strides of the right operand's other axes."""
    if left.dtype != FP32 or right.dtype != FP32 or m * n * k * count < LEAST or min(m, n) < 32:
        return None
    spans = [(s - 1) * abs(d) for p in (left, right) for s, d in zip(p.shape[-2:], p.strides[-2:], strict=True)]
    if max(spans) >= LARGEST or min(*left.strides[-2:], *right.strides[-2:]) < 0:
        return None
    aligned = all(s % 4 == 0 for s in (n, right.offset, right.strides[-2], *batches))
    together = right.strides[-1] == 1 and aligned
    for rows, columns in ((128, 128), (64, 128)):
        if -(-m // rows) * -(-n // columns) * count * rows * columns // 64 >= ENOUGH * fitted(gpu).multiprocessors:
            return Tile(rows, columns, together)
    return Tile(64, 64, together)


def tiled(finish: str) -> str:
    """C++ of a block's tile, in a kernel of :mod:`optdnn.kernels.gemm.matmul`; ``finish`` stores ``acc[i][j]`` of ``row`` and
    ``column``."""
    return f"""extern __shared__ __align__(128) float shared[];
    const int top = blockIdx.x * BM, first = blockIdx.y * BN;
    float acc[TM][TN];
    const Matrix left = {{p.l + bl, int(p.ml[0]), int(p.ml[1])}}, right = {{p.r + br, int(p.mr[0]), int(p.mr[1])}};
    product_tile(acc, shared, left, right, top, first, p.m, p.n, p.k);
    #pragma unroll
    for (int i = 0; i < TM; i++)
        #pragma unroll
        for (int j = 0; j < TN; j++) {{
            const int row = top + own_row() + row_of(i), column = first + own_column() + j / 4 * 32 + j % 4;
            if (row >= p.m || column >= p.n) continue;
            {finish}
        }}"""
