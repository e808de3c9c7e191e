"""Products of long rows with few results: blocks share the terms of a row, and a second launch adds their sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.gemm.tiles import MatrixTile, Tile
from optdnn.kernels.pointwise.pointwise import emit_pointwise
from optdnn.ops.base import Stage
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.types import FP32, is_float

TILE, DEPTH = 64, 16
"""Rows and columns of a block's tile, and its step along K; 256 threads compute 4 x 4 elements each."""
STEP_S = 0.85e-6
"""Seconds of a step along K of a block of the plain kernel, alone on a multiprocessor or with others (14 timings on an H200)."""
PLAIN_TERMS, FP32_TERMS, MATRIX_TERMS = 28, 48, 128
"""Least terms of a part: of the plain kernel, whose blocks wait for every load, of tiles in true fp32, and on tensor cores."""
LEAST_PARTS, MOST_PARTS = 4, 16
"""Fewest parts that repay a second launch, and the most that it adds."""
EVEN = 0.5
"""A divisor of the terms is preferred if it is at least this fraction of the most parts."""
WAVES = 4
"""Most blocks per multiprocessor."""


def parts_of(k: int, blocks: int, tile: Tile | MatrixTile | None, gpu: GpuFacts) -> int:
    """Parts into which the ``k`` terms of a product of so many ``blocks`` should be cut; 1 if blocks should not share them. A divisor of k
    is preferred, unless it is much less than other numbers."""
    least = PLAIN_TERMS if tile is None else MATRIX_TERMS if isinstance(tile, MatrixTile) else FP32_TERMS
    most = min(MOST_PARTS, k // least, WAVES * fitted(gpu).multiprocessors // blocks)
    if most < LEAST_PARTS:
        return 1
    even = max((n for n in range(LEAST_PARTS, most + 1) if k % n == 0), default=1)
    return even if even >= EVEN * most else most


def can_share(
    left: TensorView, right: TensorView, out: TensorView, extra: Mapping[int, TensorView], factors: Sequence[float]
) -> bool:
    """Whether the sums of parts are fp32, like the result, and the stages read no other floats. ``factors``: of the product and of the
    stages' operands."""
    wide = out.dtype == FP32 and all(x.dtype == FP32 or not is_float(x.dtype) for x in extra.values())
    return wide and min(len(left.shape), len(right.shape)) > 1 and all(f == 1.0 for f in factors)


Pair = tuple[TensorView, TensorView]
"""The factors of a product."""


def cut(left: TensorView, right: TensorView, parts: int) -> tuple[Pair, Pair | None]:
    """The factors as stacks of ``parts`` equal products, whose new axis comes before those of a matrix; and the factors of the terms that
    are left over, if any."""
    m, n, k = left.shape[-2], right.shape[-1], left.shape[-1]
    each, over = divmod(k, parts)
    one = left.view(
        (*left.shape[:-2], parts, m, each), (*left.strides[:-2], left.strides[-1] * each, *left.strides[-2:])
    )
    two = right.view(
        (*right.shape[:-2], parts, each, n), (*right.strides[:-2], right.strides[-2] * each, *right.strides[-2:])
    )
    if not over:
        return (one, two), None
    down, along = left.strides[-1], right.strides[-2]
    rest = (
        left.view((*left.shape[:-1], over), left.strides, (k - over) * down),
        right.view((*right.shape[:-2], over, n), right.strides, (k - over) * along),
    )
    return (one, two), rest


def space_of_sums(b: Builder, op: Op, out: TensorView, parts: int) -> TensorView:
    """Space for the sums of each part: (..., parts, rows, columns)."""
    shape = (*out.shape[:-2], parts, *out.shape[-2:])
    return b.new(f"{op.outputs[0].name}.parts", FP32, shape)


def each_of(sums: TensorView) -> list[TensorView]:
    """The sums of each part."""
    *stack, parts, rows, columns = sums.shape
    *steps, step, down, along = sums.strides
    one = sums.view((*stack, rows, columns), (*steps, down, along))
    return [one.view(one.shape, one.strides, part * step) for part in range(parts)]


def emit_sum(
    b: Builder, op: Op, sums: TensorView, stages: Sequence[Stage], extra: Mapping[int, TensorView], out: TensorView
) -> None:
    """Add the launch of ``out = stages(sum of the parts)``. Operand 0 of the stages is the sum."""
    each = each_of(sums)
    parts = len(each)
    added = [Stage("Add", (~part, part + 1)) for part in range(parts - 1)]
    slot = {a: parts + place for place, a in enumerate(sorted(extra))}
    moved = [
        Stage(s.kind, tuple(a if a is None else slot[a] if a > 0 else a - len(added) for a in s.args), s.attrs)
        for s in stages
    ]
    emit_pointwise(b, op, [*added, *moved], [*each, *(extra[a] for a in sorted(extra))], out)


def blocks_of(m: int, n: int, count: int, tile: tuple[int, int]) -> int:
    """Blocks of ``count`` products with these rows and columns of a tile."""
    return math.prod((-(-m // tile[0]), -(-n // tile[1]), count))


def plain_seconds(m: int, n: int, k: int, matrices: int, gpu: GpuFacts) -> float:
    """Predicted seconds of the plain kernel in fp32, without those of a launch: its blocks take the steps along K one after another."""
    tiles = blocks_of(m, n, matrices, (TILE, TILE))
    parts = parts_of(k, tiles, None, gpu)
    return STEP_S * -(-k // (DEPTH * parts)) * max(1.0, tiles * parts / fitted(gpu).multiprocessors)
