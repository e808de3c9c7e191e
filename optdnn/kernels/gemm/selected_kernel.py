"""Plans of the tiled product of rows with matrices that they select from a stack (``selected_tiles.cu``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from optdnn.kernels.gemm.tiles import LINE, MatrixTile, Tile, Way
from optdnn.kernels.launch import Launch, Parameters
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import FP32, DType

MEMORY = 0.85
"""Fraction of the memory's bandwidth at which matrices are read."""
START, SCAN, TILE_S = 5e-6, 0.35e-6, 2.5e-6
"""Seconds of a launch, of a block's pass over its CHUNK next indices, and of the beginning and the end of a tile."""
CHUNK = 1024
STEP_S, STEP_SUM_S = 0.11e-6, 3.2e-11
"""Seconds of a step of 64 bytes along K on a multiprocessor, and more for each sum of a tile (mma.sync, 1.755 GHz)."""
CLOCK = 1.755e9
SCALAR_RATE = 0.75
"""Fraction of the scalar units' speed that tiles in true fp32 reach."""
UNEVEN = 2.0
"""The matrix that most rows select has so many times the rows of others."""
PARTS = (1, 2, 4, 8)
"""Numbers of blocks that may share the tiles of a matrix."""
INDICES = 8
"""Indices that a thread reads at a time."""


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


C = TypeVar("C", bound=Config)


def tile_of(problem: Problem, config: Config) -> Tile | MatrixTile:
    """The tile of a configuration."""
    if problem.dtype == "float32":
        return Tile(config.rows, config.columns, problem.columns % 4 == 0)
    piece = next(b for b in (16, 8, 4, 0) if b == 0 or problem.depth * problem.item % b == 0)
    return MatrixTile(config.rows, config.columns, problem.dtype, Way(True, piece), Way(True, piece))


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first."""
    tiles = ((64, 64), (64, 128), (128, 128)) if problem.dtype == "float32" else itertools.product((64, 128), (64, 128))
    return ranked(
        problem, (Config(*tile, parts) for tile in tiles for parts in PARTS), partial(estimate, problem, gpu=gpu)
    )[:limit]


def ranked(problem: Problem, configs: Iterable[C], seconds_of: Callable[[C], float]) -> list[C]:
    """Those of the configurations whose blocks have tiles, best predicted first; among equal ones, more blocks first."""
    found = [c for c in configs if shares_tiles(problem, c.rows, c.parts)]
    return sorted(found, key=lambda c: (round(seconds_of(c), 7), -c.parts, c))


def shares_tiles(problem: Problem, rows: int, parts: int) -> bool:
    """Whether the matrix that most rows select is expected to have a tile for each of its blocks."""
    return parts == 1 or busiest(problem) > rows * (parts - 1)


def busiest(problem: Problem) -> float:
    """The expected number of rows that select the same matrix, at most."""
    return min(problem.rows, UNEVEN * problem.rows / problem.many)


def tiles_of(problem: Problem, rows: int) -> tuple[float, float]:
    """The expected number of matrices that rows select evenly and at random, and of their tiles of ``rows`` rows."""
    touched = problem.many * (1 - (1 - 1 / problem.many) ** problem.rows)
    return touched, max(touched, problem.rows / rows + touched / 2)


def seconds(problem: Problem, gpu: GpuFacts, config: Config, slots: int, tile_s: Callable[[float], float]) -> float:
    """Predicted seconds: of reading the matrices, of all tiles, or of one block's tiles of the matrix that most rows select. ``slots``:
    blocks that run at once; ``tile_s``: the seconds of a tile where so many blocks run."""
    rows, columns, parts = config.rows, config.columns, config.parts
    touched, tiles = tiles_of(problem, rows)
    across = -(-problem.columns // columns)
    blocks = across * min(tiles, touched * parts)
    waves = blocks / slots if blocks > 4 * slots else math.ceil(blocks / slots)
    each = tile_s(blocks) + TILE_S
    longest = math.ceil(math.ceil(busiest(problem) / rows) / parts)
    read = touched * problem.columns * problem.depth * problem.item / (MEMORY * gpu.bandwidth)
    own = max(waves * tiles * across / blocks, longest) * each
    scans = -(-problem.rows // CHUNK) * SCAN * max(1.0, problem.many * parts * across / slots / 4)
    return START + scans + max(read, own)


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds."""
    sums = config.rows * config.columns
    if problem.dtype == "float32":
        tile_s = 2 * sums * problem.depth / (SCALAR_RATE * 2 * gpu.lanes * gpu.clock)
    else:
        tile_s = problem.depth * problem.item / LINE * (STEP_S + STEP_SUM_S * sums) * CLOCK / gpu.clock
    return seconds(problem, gpu, config, gpu.multiprocessors, lambda blocks: tile_s)


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
