"""Plans of the tiled product of rows with matrices that they select from a stack (``selected_tiles.cu``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.gemm.tiles import LINE, MatrixTile, Tile, Way
from optdnn.kernels.launch import Launch, Parameters
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import FP32, DType

BYTES_PER_S = 3.6e12
"""Rate at which the matrices are read from memory."""
PASS_S = 0.4e-6
"""Seconds in which a block reads 1,024 indices."""
STEP_S = 0.09e-6
"""Seconds of a block's step of 64 bytes along K, alone on its multiprocessor."""
RATE = 0.42
"""Fraction of the tensor cores' (or in fp32 of the scalar units') speed that full tiles reach."""
INDICES = 8
"""Indices that a thread reads at a time."""
CHUNK = 1024
"""Indices that a block reads at a time, about."""
MOST_PARTS = 8
"""Most blocks that share the tiles of a matrix."""


@dataclass(frozen=True)
class Problem:
    """``rows`` rows of ``depth`` elements, each times one of ``many`` matrices of ``columns`` columns. ``times`` neighboring rows read the
    same elements. ``dtype``: float16, bfloat16, tfloat32 (of fp32 rows) or float32; ``result``: what is stored. ``vectors``: whether the
    result takes stores of 8 elements."""

    rows: int
    times: int
    many: int
    columns: int
    depth: int
    dtype: str
    result: DType
    vectors: bool

    @property
    def item(self) -> int:
        """Bytes of an element of the rows."""
        return 4 if self.dtype in ("tfloat32", "float32") else 2


@dataclass(frozen=True, order=True)
class Config:
    """Tiles of ``rows`` rows and ``columns`` columns; ``parts`` blocks share the tiles of a matrix."""

    rows: int
    columns: int
    parts: int

    def __str__(self) -> str:
        return f"selected{self.rows}x{self.columns}p{self.parts}"


def tile_of(problem: Problem, config: Config) -> Tile | MatrixTile:
    """The tile of a configuration."""
    if problem.dtype == "float32":
        return Tile(config.rows, config.columns, problem.columns % 4 == 0)
    piece = next(b for b in (16, 8, 4, 0) if b == 0 or problem.depth * problem.item % b == 0)
    return MatrixTile(config.rows, config.columns, problem.dtype, Way(True, piece), Way(True, piece))


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first."""
    fp32 = problem.dtype == "float32"
    tiles = (
        ((64, 64), (64, 128), (128, 128)) if fp32 else ((32, 64), (32, 128), (64, 64), (64, 128), (128, 64), (128, 128))
    )
    found = [
        Config(*tile, parts)
        for tile in tiles
        for parts in (1, 2, 4, MOST_PARTS)
        if shares_tiles(problem, tile[0], parts)
    ]
    return sorted(found, key=lambda c: (estimate(problem, c, gpu), c))[:limit]


def shares_tiles(problem: Problem, rows: int, parts: int) -> bool:
    """Whether a matrix that as many rows select as others has a tile for each of its blocks."""
    return parts == 1 or problem.rows >= problem.many * rows * parts


def tiles_of(problem: Problem, rows: int) -> tuple[float, float]:
    """The expected number of matrices that rows select evenly and at random, and of their tiles of ``rows`` rows."""
    touched = problem.many * (1 - (1 - 1 / problem.many) ** problem.rows)
    return touched, max(touched, problem.rows / rows + touched / 2)


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds: of reading the matrices, of the products of whole tiles, and of the steps along K of one block after another."""
    touched, tiles = tiles_of(problem, config.rows)
    blocks = tiles * -(-problem.columns // config.columns)
    read = touched * problem.columns * problem.depth * problem.item / BYTES_PER_S
    speed = (
        gpu.clock
        * gpu.multiprocessors
        * (gpu.matrix_ops / (problem.item // 2) if problem.dtype != "float32" else 2 * gpu.lanes)
    )
    multiplied = 2 * blocks * config.rows * config.columns * problem.depth / (RATE * speed)
    at_once = gpu.multiprocessors * max(1, 65536 // (tile_of(problem, config).threads * 168))
    waves = math.ceil(blocks / at_once)
    steps = problem.depth * problem.item / LINE * waves * STEP_S
    scans = -(-problem.rows // CHUNK) * PASS_S
    return 1.6e-6 + scans + max(read, multiplied, steps)


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, steps: tuple[int, int, int], x_pitch: int, out_pitch: int
) -> Launch:
    """The launch. Operands: ``x`` (rows / times, K), ``weights`` (matrices, K, N) with these strides, ``index`` (int64, rows), ``output``
    (rows, N). Pitches count elements."""
    tile = tile_of(problem, config)
    defines = {
        "SUMS": tile.shared_bytes // 4,
        "SCALAR": int(problem.dtype == "float32"),
        "RESULT_FLOAT": int(problem.result == FP32),
        "VECTORS": int(problem.vectors),
    }
    text = f"{render.constants(defines)}\n{tile.macros()}\n"
    parameters = Parameters().pointer("output", "x", "weights", "index")
    parameters.i32(problem.rows, problem.columns, problem.depth).sizes(problem.times)
    parameters.i64(problem.many, *steps, x_pitch, out_pitch)
    numbers = 2 * config.rows + INDICES * tile.threads + tile.threads // 32
    return parameters.generated(
        gpu.arch, text, "selected_tiles", grid(problem, config), tile.threads, shared=tile.shared_bytes + 4 * numbers,
        options=tile.options, template="selected_tiles.cu",
    )  # fmt: skip


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Blocks: along columns, of each matrix, and of each part of its tiles."""
    return (-(-problem.columns // config.columns), problem.many, config.parts)
