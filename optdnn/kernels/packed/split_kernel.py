"""Plans of the product of some rows with packed weights whose K is split over warps (``packed_split.cu``): 9 to 16 rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from optdnn.errors import InternalError
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.packed import tiles
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines, put_weights
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

LEAST_ROWS, MAX_ROWS = 9, 16
"""Fewer rows are the columns of one mma.sync; of more, ``packed_sm90.cu`` took less time."""
WARPS = 16
"""Of a multiprocessor, at most: threads have 128 registers, then."""


@dataclass(frozen=True, order=True)
class Config:
    """``tiles`` tiles of 16 columns of a block (of both matrices, where there are two), whose K ``warps`` warps share, and ``split`` blocks of a cluster; each warp has the
    weights of ``ahead`` turns of ``together`` tiles in flight."""

    tiles: int
    together: int
    warps: int
    ahead: int
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * 32

    def __str__(self) -> str:
        shared = f"k{self.split}" if self.split > 1 else ""
        return f"split{self.tiles}t{self.together}w{self.warps}a{self.ahead}{shared}"


CONFIGS = tuple(
    Config(*c) for c in itertools.product(range(1, 9), (1, 2), (4, 6, 8, 12, 16), (2, 3, 4), (1, 2)) if c[1] <= c[0]
)


def row_tiles(problem: Problem) -> int:
    """Tiles of eight rows: they come in pairs."""
    return -(-problem.rows // 16) * 2


def warp_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a warp: rings of rows and of weights, and in their place sums."""
    rows = row_tiles(problem) * 8
    stages = -(-config.ahead // -(-config.tiles // config.together)) + 1
    groups = tiles.groups_of(problem.bits, problem.block)
    tile = tiles.CHUNK_BYTES + tiles.CHANNELS * groups * (problem.scale_bytes + problem.zero_bytes)
    ring = stages * rows * (problem.chunk * 2 + 16) + config.ahead * config.together * tile
    return max(ring, rows * (config.tiles * tiles.CHANNELS + 4) * 4)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    return config.warps * warp_bytes(problem, config)


def resident(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Blocks of a multiprocessor: those of the next kernel begin beside this one's where there is room."""
    room = gpu.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(room, WARPS // config.warps))


def most_tiles(problem: Problem, config: Config) -> int:
    """Tiles whose sums ptxas was seen to keep in registers: of chunks with one scale, a chunk's own sums take as many besides."""
    if tiles.groups_of(problem.bits, problem.block) > 1:
        return 8 if config.together == 1 else 7
    if WARPS // config.warps * config.warps == WARPS:
        return 4
    return 8 if problem.matrices > 1 and config.together > 1 else 7


def refuse(problem: Problem, config: Config, gpu: GpuFacts) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if not 1 <= problem.rows <= MAX_ROWS:
        return f"it is for up to {MAX_ROWS} rows, not {problem.rows}"
    if config not in CONFIGS:
        return "not a tile of this kernel"
    if config.split > 1 and not gpu.hopper:
        return f"{gpu.arch} has no clusters"
    if (needed := shared_bytes(problem, config)) > gpu.shared_per_block:
        return f"{needed} bytes of shared memory exceed {gpu.shared_per_block}"
    if config.tiles > most_tiles(problem, config):
        return "its sums do not fit the registers"
    if config.tiles % problem.matrices:
        return "tiles of two matrices come in pairs"
    if -(-problem.tiles // parts(problem, config, gpu)) * problem.matrices < config.tiles:
        return f"its blocks have fewer than {config.tiles} tiles"
    if problem.chunks < config.split * config.warps:
        return f"{problem.chunks} chunks are not shared by {config.split * config.warps} warps"
    return None


def unfit(problem: Problem, gpu: GpuFacts) -> str | None:
    """Why no configuration runs the problem, or None."""
    reasons = [refuse(problem, c, gpu) for c in CONFIGS]
    return None if None in reasons else reasons[0]


def parts(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Parts of the columns, a cluster each: all multiprocessors have equally many blocks, where there are tiles enough."""
    beside, each = max(1, gpu.multiprocessors // config.split), max(1, config.tiles // problem.matrices)
    return min(problem.tiles, -(-problem.tiles // (each * beside)) * beside)


def recipe(problem: Problem, config: Config, gpu: GpuFacts) -> Recipe:
    """What to compile."""
    found = {
        "ROW_TILES": row_tiles(problem), "TILES": config.tiles, "TOGETHER": config.together, "WARPS": config.warps, "DEPTH": config.ahead, "SPLIT": config.split,
        "RESIDENT": WARPS // config.warps, "HAS_RESIDUAL": int(problem.residual), "PAIRED": problem.matrices - 1, **defines(problem),
    }  # fmt: skip
    stages = [render.epilogue(problem.epilogue)]
    stages += [] if problem.beside is None else [render.epilogue(problem.beside, "epilogue_beside")]
    text = "\n".join([render.constants(found), render.mma(problem.dtype), *stages, ""])
    return Recipe("packed_split.cu", gpu.arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int) -> Launch:
    """The launch. Operands: ``x``, those of :func:`put_weights`, ``bias`` (fp32, columns in fours), ``residual``, ``output``; of a second
    product its weights, behind ``beside_``, and ``beside_bias``. Raises InternalError."""
    if reason := refuse(problem, config, gpu):
        raise InternalError(f"packed_split: {reason}")
    parameters = put_weights(Parameters().pointer("x"), problem)
    parameters.pointer("bias", "residual" if problem.residual else None, "output")
    if problem.matrices > 1:
        put_weights(parameters, problem, "beside_").pointer("beside_bias")
    else:
        parameters.pointer(None, None, None).i32(0, 0, 0).pointer(None)
    parameters.i32(problem.rows, problem.columns, problem.depth, x_pitch, out_pitch)
    parameters.i32(parts(problem, config, gpu))
    return parameters.launch(
        recipe(problem, config, gpu), "packed_split", parts(problem, config, gpu) * config.split, config.threads,
        shared=shared_bytes(problem, config), cluster=config.split,
    )  # fmt: skip


LEVEL_2 = 5.6e12
"""Bytes per second from L2 to the multiprocessors."""
STEP = 0.2e-6, 0.15e-6
"""Seconds in which a warp takes a turn, and each tile of it, where it is alone."""
CYCLES = 18
"""In which a multiprocessor takes a chunk of a tile, where it has warps enough."""


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, fitted to 71 timings of an H200 at 16 rows (7 % off; weights of 4 and 8 bits): memory,
    L2, and the turns of warps, whichever takes longest, and a part of the others; latency, rounds of blocks, and the sums of warps."""
    many, count = gpu.multiprocessors, parts(problem, config, gpu) * config.split
    beside = resident(problem, config, gpu)
    together, rounds = min(beside, -(-count // many)), -(-count // (many * beside))
    held = -(-problem.tiles // parts(problem, config, gpu)) * problem.matrices
    tiles_at_once = min(config.together, held)
    warps = config.warps * together
    step = max(STEP[0] + STEP[1] * tiles_at_once, warps * tiles_at_once * CYCLES / gpu.clock)
    walk = rounds * -(-problem.chunks // (config.split * config.warps)) * -(-held // config.together) * step
    weights = problem.nbytes * problem.matrices
    rows = count / config.split * problem.rows * problem.depth * 2
    terms = weights / BANDWIDTH, (weights + rows) / LEVEL_2, walk
    most = max(terms)
    ahead = 1 + 0.037 * (config.ahead - 2) * tiles_at_once / 2
    clusters = 0.0 if config.split == 1 else 1.6e-6 if together > 1 else 0.1e-6
    ends = 2.7e-6 + 3.5e-6 * (rounds - 1) + 0.028e-6 * config.warps * held
    few_warps = 0.06e-6 * max(0, WARPS - warps)
    return float(ends + clusters + few_warps + (most + 0.12 * (sum(terms) - most)) * ahead)


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 16) -> list[Config]:
    """The configurations to time, best predicted first."""
    found = ((estimate(problem, c, gpu), c) for c in CONFIGS if refuse(problem, c, gpu) is None)
    return varied(found, lambda c: (c.tiles, c.warps, c.split), limit)
