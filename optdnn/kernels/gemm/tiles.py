"""Tiles of matrix products with operands of any strides: on tensor cores (``matmul_mma.cuh``), and in true fp32
(``matmul_fp32.cuh``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optdnn.kernels.builder import TensorView
from optdnn.kernels.conv.fp32_kernel import LARGEST
from optdnn.kernels.launch import GENERAL
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.types import BF16, FP16, FP32

LEAST = 1 << 22
"""Least number of multiply-adds. Below it the plain kernel is as fast, since it starts sooner."""
LEAST_TILE = 32
"""Least rows and columns of a product in true fp32; the plain kernel takes others."""
DEPTH, STAGES = 16, 3
ENOUGH, FEWEST = 256, 192
"""Threads that occupy a multiprocessor well: with fewer, tiles are smaller. With fewer than FEWEST of the smallest tiles, the plain
kernel is faster, which has four times as many (H200: 24 us against 20 at 248 threads, 10 to 13 against 17 to 24 at 31 to 124)."""


MATRIX_STAGES = 4
"""Stages of the ring of a tensor-core tile, each one K step."""
STAGED_PAD = 8
"""Floats between the rows of a tile's sums in shared memory: the lanes of a fragment write to different banks."""
LINE = 64
"""Bytes of a line along K in one K step of a tensor-core tile."""


@dataclass(frozen=True)
class Tile:
    """A block's rows and columns in true fp32; a thread computes 8 x 8 elements."""

    rows: int
    columns: int
    together: bool
    """Whether neighboring columns of the right operand are contiguous in memory, and four of them are one access."""
    rows_together: bool = False
    """The same of neighboring rows of the left operand."""

    template = "matmul_fp32.cu"
    options = GENERAL

    @property
    def threads(self) -> int:
        return self.rows * self.columns // 64

    @property
    def shared_bytes(self) -> int:
        ring = 4 * STAGES * DEPTH * (self.rows + 4 + self.columns + (0 if self.together else 4))
        return max(ring, _staged_bytes(self))

    def macros(self) -> str:
        """The definitions that ``matmul_fp32.cuh`` needs."""
        values = {
            "BM": self.rows, "BN": self.columns, "TM": 8, "TN": 8, "BK": DEPTH, "STAGES": STAGES, "EARLY": 1,
            "B_PAD": 0 if self.together else 4, "COLUMNS_TOGETHER": int(self.together), "ROWS_TOGETHER": int(self.rows_together),
        }  # fmt: skip
        return render.constants(values)

    def defines(self) -> str:
        """The first lines of the kernel's source."""
        return f'{self.macros()}\n#include "matmul_fp32.cuh"'


@dataclass(frozen=True)
class Way:
    """How an operand is copied to shared memory. ``along``: its lines (rows of the left operand, columns of the right
    one) run along K in shared memory, as they do in memory; else neighboring lines are neighbors there. ``piece``:
    bytes per copy (16, 8 or 4; 0: single elements through registers)."""

    along: bool
    piece: int

    def bytes(self, lines: int, item: int) -> int:
        """Bytes of a K step of this many lines, with elements of ``item`` bytes."""
        return lines * LINE if self.along else LINE // item * (lines * item + (32 if item == 4 else 16))


@dataclass(frozen=True)
class MatrixTile:
    """A block's rows and columns on tensor cores, with 128 threads. ``dtype``: type of the factors (tfloat32: of fp32 operands)."""

    rows: int
    columns: int
    dtype: str
    left: Way
    right: Way
    template = "matmul_mma.cu"
    threads = 128

    @property
    def options(self) -> tuple[str, ...]:
        return (*GENERAL, "-DDTYPE_BF16") if self.dtype == "bfloat16" else GENERAL

    @property
    def item(self) -> int:
        """Bytes of an operand's element."""
        return 4 if self.dtype == "tfloat32" else 2

    @property
    def shared_bytes(self) -> int:
        ring = MATRIX_STAGES * (self.left.bytes(self.rows, self.item) + self.right.bytes(self.columns, self.item))
        return max(ring, _staged_bytes(self))

    def macros(self) -> str:
        """The definitions that ``matmul_mma.cuh`` needs."""
        ways = {
            f"{side}_{name}": int(value)
            for side, way in (("LEFT", self.left), ("RIGHT", self.right))
            for name, value in (("ALONG", way.along), ("PIECE", way.piece))
        }
        values = {"BM": self.rows, "BN": self.columns, "STAGES": MATRIX_STAGES, "ITEM": self.item, **ways}
        return f"{render.constants(values)}\n{render.mma(self.dtype)}"

    def defines(self) -> str:
        """The first lines of the kernel's source."""
        return f'{self.macros()}\n#include "matmul_mma.cuh"'


def _staged_bytes(tile: Tile | MatrixTile) -> int:
    """Bytes of a tile's sums in shared memory."""
    return 4 * tile.rows * (tile.columns + STAGED_PAD)


def matrix_tile(
    left: TensorView, right: TensorView, m: int, n: int, count: int, gpu: GpuFacts, *, tf32: bool
) -> MatrixTile | None:
    """The tile on tensor cores for ``count`` products of m rows and n columns, or None if tensor cores do not take the
    operands' type or extent. Matrices are the operands' last two axes. ``tf32``: fp32 operands may be rounded."""
    kinds = {FP16: "float16", BF16: "bfloat16"} | ({FP32: "tfloat32"} if tf32 else {})
    dtype = kinds.get(left.dtype)
    if dtype is None or left.dtype != right.dtype:
        return None
    spans = [(s - 1) * abs(d) for p in (left, right) for s, d in zip(p.shape[-2:], p.strides[-2:], strict=True)]
    if max(spans) >= LARGEST:
        return None
    item = left.dtype.itemsize
    ways = (
        _way(left, left.strides[-2], left.strides[-1], item),
        _way(right, right.strides[-1], right.strides[-2], item),
    )

    def tiles(shape: tuple[int, int]) -> int:
        return -(-m // shape[0]) * -(-n // shape[1]) * count

    sizes = [(128, 128), *sorted([(64, 128), (128, 64)], reverse=m > n)]
    enough = [shape for shape in sizes if tiles(shape) >= fitted(gpu).multiprocessors]
    rows, columns = min(enough, key=lambda shape: tiles(shape) * math.prod(shape), default=(64, 64))
    return MatrixTile(rows, columns, dtype, *ways)


def _way(x: TensorView, line: int, place: int, item: int) -> Way:
    """How the operand is copied. ``line``, ``place``: elements from one line, and from one index of K, to the next."""
    along = place == 1 or line != 1
    if 1 not in (line, place):
        return Way(along, 4 if item == 4 else 0)
    steps = (x.offset, *x.strides[:-2], line if along else place)
    return Way(along, next((b for b in (16, 8, 4) if all(s * item % b == 0 for s in steps)), 0))


_TILES = ((128, 128), (64, 128), (64, 64))
"""Rows and columns of the tiles in true fp32."""


def occupied(m: int, n: int, count: int, rows: int, columns: int, gpu: GpuFacts) -> bool:
    """Whether the threads of a tile in true fp32 occupy the GPU."""
    threads = -(-m // rows) * -(-n // columns) * count * rows * columns // 64
    least = FEWEST if (rows, columns) == _TILES[-1] else ENOUGH
    return threads >= least * fitted(gpu).multiprocessors


def tiles_true_fp32(m: int, n: int, k: int, count: int, gpu: GpuFacts) -> bool:
    """Whether ``count`` products in true fp32 take a tile of 8 x 8 elements per thread, and not the plain kernel."""
    return m * n * k * count >= LEAST and min(m, n) >= LEAST_TILE and occupied(m, n, count, *_TILES[-1], gpu)


def tile_of(
    left: TensorView,
    right: TensorView,
    m: int,
    n: int,
    k: int,
    batches: tuple[Sequence[int], Sequence[int]],
    count: int,
    gpu: GpuFacts,
) -> Tile | None:
    """The tile for ``count`` products of m x k with k x n matrices (the operands' last two axes) in true fp32, or None
    for the plain kernel. ``batches``: the strides along the stack of the left and of the right operand."""
    if left.dtype != FP32 or right.dtype != FP32 or not tiles_true_fp32(m, n, k, count, gpu):
        return None
    spans = [(s - 1) * abs(d) for p in (left, right) for s, d in zip(p.shape[-2:], p.strides[-2:], strict=True)]
    if max(spans) >= LARGEST:
        return None
    together = right.strides[-1] == 1 and not any(s % 4 for s in (n, right.offset, right.strides[-2], *batches[1]))
    rows_together = left.strides[-2] == 1 and not any(s % 4 for s in (m, left.offset, left.strides[-1], *batches[0]))
    rows, columns = next(tile for tile in _TILES if occupied(m, n, count, *tile, gpu))
    return Tile(rows, columns, together, rows_together)


AT_ONCE = 8
"""A thread loads the operands of the stages for so many results before it stores the first of them. The compiler moves no load in front
of a store that may have the same address."""


def tiled(loads: Mapping[str, tuple[str, str]], finish: str, tile: Tile | MatrixTile, *, down: bool) -> str:
    """C++ of a block's tile, in a kernel of :mod:`optdnn.kernels.gemm.matmul`. ``loads``: name -> C++ type and value of what ``finish``
    reads; ``finish``: C++ that stores the sum ``sum`` of ``row`` and ``column``. ``down``: neighboring rows of the result are neighbors
    in memory.

    The sums go through shared memory, whose place the ring needs no more. So a loop of few instructions stores whole lines. The
    unrolled text for each sum of a thread was longer than the instruction cache, and took most of the time of short products."""
    pitch, (i, j) = tile.columns + STAGED_PAD, ("at % BM", "at / BM") if down else ("at / BN", "at % BN")
    place = [
        f"const int i = {i}, j = {j}, row = top + i, column = first + j;",
        "if (row >= p.m || column >= p.n) continue;",
    ]
    total = f"const float sum = shared[i * {pitch} + j];"
    count, step = tile.rows * tile.columns, tile.threads
    if loads:
        arrays = [f"{kind} {name}_of[{AT_ONCE}];" for name, (kind, _) in loads.items()]
        ahead = [f"{name}_of[u] = {value};" for name, (_, value) in loads.items()]
        taken = [f"const {kind} {name} = {name}_of[u];" for name, (kind, _) in loads.items()]
        each = [
            "#pragma unroll",
            f"for (int u = 0; u < {AT_ONCE}; u++) {{",
            f"const int at = start + u * {step};",
            *place,
        ]
        loop = f"for (int start = threadIdx.x; start < {count}; start += {step * AT_ONCE}) {{"
        body = [loop, *arrays, *each, *ahead, "}", *each, *taken, total, finish, "}", "}"]
    else:
        loop = f"for (int at = threadIdx.x; at < {count}; at += {step}) {{"
        body = ["#pragma unroll 4", loop, *place, total, finish, "}"]
    newline = "\n    "
    return f"""extern __shared__ __align__(128) float shared[];
    const int top = blockIdx.x * BM, first = blockIdx.y * BN;
    float acc[TM][TN];
    const Matrix left = {{p.l + bl, int(p.ml[0]), int(p.ml[1])}}, right = {{p.r + br, int(p.mr[0]), int(p.mr[1])}};
    product_tile(acc, shared, left, right, top, first, p.m, p.n, p.k);
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < TM; i++)
        #pragma unroll
        for (int j = 0; j < TN; j++) shared[(own_row() + row_of(i)) * {pitch} + own_column() + column_of(j)] = acc[i][j];
    __syncthreads();
    {newline.join(body)}"""
