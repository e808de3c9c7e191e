"""Plans of the product of up to 256 rows with packed weights on mma.sync (``packed_mma.cu``): up to 64 rows in a block."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from optdnn.kernels.launch import Launch, template_options
from optdnn.kernels.packed import tiles
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines, product_parameters
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted

MAX_ROWS = 256
BLOCK_ROWS = 64
"""Most rows of a block."""
SHARED = 101376
"""Bytes of shared memory that a block can have on every GPU from sm_80 on."""
REGISTERS = 65536


@dataclass(frozen=True, order=True)
class Config:
    """A block has ``along`` groups of ``across`` warps; the groups take chunks of K in turn, and each warp has ``tiles`` tiles of 16
    columns. ``ahead`` chunks of each tile are in flight. Rows have a ring of ``stages``. ``split`` blocks share K."""

    tiles: int
    across: int
    along: int
    ahead: int
    stages: int
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.across * self.along * 32

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.across * self.tiles * tiles.CHANNELS

    def __str__(self) -> str:
        split = f"k{self.split}" if self.split > 1 else ""
        return f"packed{self.columns}t{self.tiles}g{self.along}a{self.ahead}s{self.stages}{split}"


CONFIGS = tuple(
    Config(t, n, k, ahead, stages, split)
    for t, n, k, ahead, stages, split in itertools.product(
        (1, 2), (2, 4, 8), (1, 2, 4), (2, 4), (3, 4), (1, 2, 3, 4, 6, 8)
    )
    if 4 <= n * k <= 8
)


def row_tiles(problem: Problem) -> int:
    """Tiles of eight rows in a block."""
    return -(-min(problem.rows, BLOCK_ROWS) // 8)


def row_blocks(problem: Problem) -> int:
    """Blocks along the rows."""
    return -(-problem.rows // (row_tiles(problem) * 8))


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block: the ring, or the accumulators in its place."""
    rows = row_tiles(problem) * 8
    ring = config.stages * rows * (config.along * problem.chunk * 2 + 16)
    return max(ring, rows * (config.columns + 4) * 4)


def registers(problem: Problem, config: Config) -> int:
    """Approximate registers of a thread: accumulators, operands, and chunks in flight."""
    groups = tiles.groups_of(problem.bits, problem.block)
    scales = -(-groups * problem.scale_bytes // 4)
    zeros = -(-groups * problem.zero_bytes // 4)
    chunk = 8 + 2 * (scales + zeros)
    return 44 + config.tiles * (4 * row_tiles(problem) + 8 + config.ahead * chunk)


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if not 1 <= problem.rows <= MAX_ROWS:
        return f"it is for up to {MAX_ROWS} rows, not {problem.rows}"
    if config not in CONFIGS:
        return "not a tile of this kernel"
    if (needed := shared_bytes(problem, config)) > SHARED:
        return f"{needed} bytes of shared memory exceed {SHARED}"
    if registers(problem, config) > min(248, REGISTERS // config.threads):
        return "its accumulators and chunks in flight do not fit the registers"
    if config.split > 1 and problem.chunks < config.split * config.along:
        return f"{problem.chunks} chunks are too few for {config.split} blocks"
    return None


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """The grid: blocks of columns, parts of K, blocks of rows."""
    return -(-problem.columns // config.columns), config.split, row_blocks(problem)


def workspace(problem: Problem, config: Config) -> tuple[int, int]:
    """Bytes of the partial sums, and of their counters (zeros at first). Both are 0 if K is not shared."""
    if config.split == 1:
        return 0, 0
    columns, split, rows = grid(problem, config)
    return columns * split * rows * row_tiles(problem) * 8 * config.columns * 4, columns * rows * 4


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe."""
    found = {
        "ROW_TILES": row_tiles(problem), "TILES": config.tiles, "WN": config.across, "WK": config.along, "DEPTH": config.ahead,
        "STAGES": config.stages, "SPLIT": config.split, "HAS_RESIDUAL": int(problem.residual), **defines(problem),
    }  # fmt: skip
    text = "\n".join([render.constants(found), render.mma(problem.dtype), render.epilogue(problem.epilogue), ""])
    return Recipe("packed_mma.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int) -> Launch:
    """The launch. Operands: the operands of :func:`product_parameters`, and if K is shared ``partial`` and ``arrived``
    (:func:`workspace`)."""
    parameters = product_parameters(problem)
    parameters.pointer(*(("partial", "arrived") if config.split > 1 else (None, None)))
    parameters.i32(problem.rows, problem.columns, problem.depth, x_pitch, out_pitch)
    return parameters.launch(
        recipe(problem, config, gpu.arch), "packed_mma", grid(problem, config), config.threads,
        shared=shared_bytes(problem, config),
    )  # fmt: skip


def resident(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Resident blocks per multiprocessor."""
    room = gpu.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(2048 // config.threads, REGISTERS // (registers(problem, config) * config.threads), room))


LEVEL_2 = 5.5e12
"""Bytes per second from L2 to the multiprocessors."""


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch. Memory, L2 and tensor cores overlap; latency and the sum of split-K parts are added."""
    gpu = fitted(gpu)
    columns, split, rows = grid(problem, config)
    blocks, many, together = columns * split * rows, gpu.multiprocessors, resident(problem, config, gpu)
    rounds = -(-blocks // many)
    uneven = rounds * many / blocks if rounds <= 4 else 1.0
    part = -(-problem.chunks // split)
    turns = -(-part // config.along)
    idle = turns * config.along * split / problem.chunks
    in_flight = min(blocks, many * together) * config.along * config.columns / 16 * min(config.ahead, turns)
    rate = min(BANDWIDTH, in_flight * tiles.CHUNK_BYTES / 1.0e-6)
    memory = problem.nbytes / rate
    level_2 = (problem.nbytes * rows + columns * problem.rows * problem.depth * 2) / LEVEL_2
    products = problem.tiles * 16 * problem.depth * rows * row_tiles(problem) * 8
    multiply = products / (gpu.multiprocessors * gpu.matrix_ops / 2 * 0.5 * gpu.clock)
    unpack = problem.columns * problem.depth * rows * 1.6 / (gpu.multiprocessors * 128 * gpu.clock)
    sums = 0.0 if split == 1 else 1.2e-6 + 2 * split * problem.rows * problem.columns * 4 / LEVEL_2
    return 2.0e-6 + max(memory, level_2, multiply + 0.5 * unpack) * uneven * (0.5 + 0.5 * idle) + sums


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 16) -> list[Config]:
    """The configurations to time, best predicted first."""
    fitting = [c for c in CONFIGS if refuse(problem, c) is None]
    found = ((estimate(problem, c, gpu), c) for c in fitting)
    return varied(found, lambda c: (c.tiles, c.across, c.along, c.split), limit)
