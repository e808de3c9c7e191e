"""Plans of norms of rows of any length (``row_norm_tiles.cu``): LayerNorm, and GroupNorm and InstanceNorm of NCHW images.

Rows of one tile take one launch. Longer rows take two, as in :mod:`.group_norm_tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.kernels.launch import Launch, Parameters
from optdnn.kernels.norm.templates import FloatElements, norm_recipe
from optdnn.kernels.norm.tiles import AHEAD, LAUNCH_S, MOST_TILES, TwoReads, tile_counts
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

ONE_TILE = 1 << 17
"""Bytes of the longest row that one block reads twice."""
BLOCK_S, BLOCKS = 1.0e-6, 32
"""Seconds of a block with a row shorter than one load of all its threads, and the most blocks of a multiprocessor. On an H200, 32 rows
of 4 elements take 3.2 us, rows of 49 elements 3.4 us."""


@dataclass(frozen=True)
class Problem(FloatElements):
    """``rows`` rows of ``length`` elements, normalized, times scale plus bias, then pointwise stages without operands.

    ``run`` neighboring elements of a row share a scale and a bias. Scales and biases repeat after ``period`` rows.
    """

    rows: int
    length: int
    run: int = 1
    period: int = 1
    epilogue: tuple[render.Stage, ...] = ()
    dtype: str = "float16"
    epsilon: float = 1e-5

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        return 2 * self.rows * self.length * self.itemsize + 8 * self.period * self.length // self.run


@dataclass(frozen=True, order=True)
class Config:
    """A block of ``threads`` threads takes one of the ``tiles`` tiles of a row, in accesses of ``lanes`` elements."""

    tiles: int
    threads: int
    lanes: int

    def __str__(self) -> str:
        return f"rt{self.tiles}t{self.threads}l{self.lanes}"


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if render.uses_residual(problem.epilogue) or ("bias",) in problem.epilogue:
        return "the stages after a norm have no operands"
    if problem.run < 1 or problem.length % problem.run or problem.rows % problem.period:
        return "its rows are not whole runs and periods of scales"
    unit = problem.length if problem.run == 1 else problem.run
    if config.lanes not in (1, 2, 4, 8) or unit % config.lanes:
        return f"elements that share a scale are not whole vectors of {config.lanes}"
    if config.lanes * problem.itemsize > 16:
        return f"{config.lanes} elements exceed an access of 16 bytes"
    if not 32 <= config.threads <= 1024 or config.threads % 32:
        return f"{config.threads} threads are not a valid block"
    if not 1 <= config.tiles <= min(problem.length // config.lanes, MOST_TILES):
        return f"{problem.length} elements in {config.tiles} tiles"
    if problem.rows * config.tiles >= 1 << 31 or problem.length >= 1 << 31:
        return "the grid is too large"
    return None


def _work(problem: Problem, config: Config) -> TwoReads:
    tensor = problem.rows * problem.length * problem.itemsize
    blocks = problem.rows * config.tiles
    return TwoReads(blocks, config.threads, config.lanes * problem.itemsize, tensor, 128, 8 * config.tiles)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The recipe of all launches. The sizes are parameters."""
    defines = {
        "LANES": config.lanes, "THREADS": config.threads, "WIDE": int(problem.itemsize == 4), "EACH": int(problem.run == 1),
    }  # fmt: skip
    return norm_recipe("row_norm_tiles.cu", arch, defines, problem.dtype, problem.epilogue)


def launches(problem: Problem, config: Config, gpu: GpuFacts) -> tuple[Launch, ...]:
    """One launch, or two if a row has several tiles. Operands: ``input``, ``output``, ``scale`` and ``bias`` (fp32 [period * length /
    run]), and ``moments`` (fp32 [rows, tiles, 2], written by the first of two launches)."""
    made, blocks = recipe(problem, config, gpu.arch), problem.rows * config.tiles
    single = config.tiles == 1
    tiling = (problem.length // config.lanes, config.tiles, 0 if single else _work(problem, config).kept(gpu))
    run = max(1, problem.run // config.lanes)
    last = Parameters().pointer("input", "output", "scale", "bias", None if single else "moments").i32(*tiling)
    last.i32(run, problem.period).f32(problem.epsilon)
    if single:
        return (last.launch(made, "row_norm", blocks, config.threads),)
    first = Parameters().pointer("input", "moments").i32(*tiling)
    return (
        first.launch(made, "row_moments", blocks, config.threads),
        last.launch(made, "row_apply", blocks, config.threads),
    )


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of all launches, dependent on earlier ones."""
    two = _work(problem, config).seconds(gpu)
    if config.tiles > 1:
        return two
    vectors = problem.length / config.lanes
    turns = -(-vectors // (config.threads * AHEAD))
    used = vectors / (turns * config.threads * AHEAD)  # share of the loads that threads can have in flight
    once = 2.0 * problem.rows * problem.length * problem.itemsize / gpu.bandwidth
    slowed = (two - 2 * LAUNCH_S) / min(1.0, 2 * used)
    if vectors < config.threads:  # idle threads do not slow the others down: a wave takes the time of one block
        slowed = min(slowed, BLOCK_S * -(-problem.rows // (gpu.multiprocessors * min(BLOCKS, 2048 // config.threads))))
    return LAUNCH_S + max(1.2 * once, slowed) + turns * 0.3e-6


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 4) -> list[Config]:
    """The configurations to time, best predicted first."""
    lanes = problem.lanes(problem.length if problem.run == 1 else problem.run)
    counts = tile_counts(problem.rows, problem.length // lanes, gpu)
    if problem.length * problem.itemsize <= ONE_TILE:
        counts = sorted({1, *counts})
    found: set[Config] = set()
    for tiles in counts:
        if tiles == 1 and problem.length * problem.itemsize > ONE_TILE:
            tiles = 2
        for threads in (32, 64, 128, 256, 512):
            config = Config(tiles, threads, lanes)
            if refuse(problem, config) is None:
                found.add(config)
    return sorted(found, key=lambda c: (estimate(problem, c, gpu), c))[:limit]
