"""Plans of the product of a few rows with packed weights (``packed_gemv.cu``): bound by one read of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.launch import Launch, template_options
from optdnn.kernels.packed import tiles
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines, product_parameters
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted

MAX_ROWS = 8
"""Most rows: the columns of mma.sync."""
SHARED = 49152
"""Most bytes of shared memory of a block: every GPU from sm_80 on has room for two such blocks."""
REGISTERS = 65536
MANY_WARPS, MANY_TILES = 8, 4
"""Configurations with fewer than MANY_WARPS warps, or with MANY_TILES tiles or more, were hardly ever the fastest."""


@dataclass(frozen=True, order=True)
class Config:
    """A block has ``tiles`` tiles of 16 columns; its ``warps`` warps share K. ``ahead``: chunks of each tile that a warp has in flight."""

    tiles: int
    warps: int
    ahead: int

    def __str__(self) -> str:
        return f"packed{self.tiles * tiles.CHANNELS}w{self.warps}a{self.ahead}"


CONFIGS = tuple(Config(t, w, a) for t in (1, 2, 4) for w in (2, 4, 8, 16) for a in (1, 2, 4, 8) if t * a <= 8)


def pitch(problem: Problem, part: int) -> int:
    """Bytes of shared memory of a row of ``part`` chunks and the sums of its groups."""
    return tiles.row_bytes(part, problem.bits, problem.block)


def part_of(problem: Problem, config: Config) -> int:
    """Number of chunks for which rows are in shared memory at a time: whole turns of the ring; 0 if not even one turn fits."""
    turn = config.warps * config.ahead
    turns = -(-problem.chunks // turn)
    while turns and problem.rows * pitch(problem, turns * turn) > SHARED:
        turns -= 1
    return turns * turn


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if not 1 <= problem.rows <= MAX_ROWS:
        return f"it is for up to {MAX_ROWS} rows, not {problem.rows}"
    if config not in CONFIGS:
        return "not a tile of this kernel"
    part = part_of(problem, config)
    if part == 0:
        return f"a turn of the ring, of {config.warps * config.ahead} chunks, does not fit shared memory"
    if registers(problem, config) * config.warps * 32 > REGISTERS:
        return "its chunks in flight do not fit the registers"
    sums = config.warps * config.tiles * tiles.CHANNELS * 4
    return "its accumulators do not fit the memory of its rows" if sums > pitch(problem, part) else None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe."""
    found = {
        "ROWS": problem.rows, "TILES": config.tiles, "WARPS": config.warps, "DEPTH": config.ahead,
        "PART": part_of(problem, config), "HAS_RESIDUAL": int(problem.residual), **defines(problem),
    }  # fmt: skip
    text = "\n".join([render.constants(found), render.mma(problem.dtype), render.epilogue(problem.epilogue), ""])
    return Recipe("packed_gemv.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int) -> Launch:
    """The launch. Operands: the operands of :func:`product_parameters`."""
    parameters = product_parameters(problem)
    parameters.i32(problem.columns, problem.depth, x_pitch, out_pitch)
    blocks = -(-problem.tiles // config.tiles)
    shared = problem.rows * pitch(problem, part_of(problem, config))
    return parameters.launch(recipe(problem, config, gpu.arch), "packed_gemv", blocks, config.warps * 32, shared=shared)


def registers(problem: Problem, config: Config) -> int:
    """Approximate registers of a thread: chunks in flight, accumulators and operands."""
    groups = tiles.groups_of(problem.bits, problem.block)
    scales = -(-groups * problem.scale_bytes // 4)
    zeros = -(-groups * problem.zero_bytes // 4)
    chunk = 8 + 2 * (scales + zeros)
    return 40 + config.tiles * (16 + 8 * (groups > 1) + config.ahead * chunk)


def resident(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Resident blocks per multiprocessor."""
    shared = problem.rows * pitch(problem, part_of(problem, config)) + 1024
    threads = config.warps * 32
    of_registers = REGISTERS // (registers(problem, config) * threads)
    return max(1, min(2048 // threads, of_registers, gpu.shared_per_multiprocessor // shared))


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, fitted to 82 timings of an H200 (16 % off on average): the longer of reading the weights
    at the bandwidth that the loads in flight allow and their products on the resident warps; then rows and blocks."""
    gpu = fitted(gpu)
    blocks, many = -(-problem.tiles // config.tiles), gpu.multiprocessors
    together, rounds = resident(problem, config, gpu), -(-blocks // many)
    beside, turns = min(together, rounds), -(-problem.chunks // config.warps)
    uneven = rounds * many / blocks if rounds <= 4 else 1.0
    steps = problem.chunk / 16
    latency = (145 + 50 * steps) / (config.warps * beside * math.pow(config.tiles, 0.4))
    products = problem.tiles * problem.chunks / many * uneven * max(5 + 7.5 * steps, latency) / gpu.clock
    in_flight = (
        min(blocks, many * together) * config.warps * config.tiles * min(config.ahead, turns) * tiles.CHUNK_BYTES
    )
    memory = problem.nbytes / min(BANDWIDTH, in_flight / 1.04e-6)
    idle = turns * config.warps / problem.chunks
    rows = blocks / many * problem.rows * problem.depth * 2 / 16e9
    # A measured factor that the other terms do not explain.
    small = 1.0 if config.warps >= MANY_WARPS and config.tiles < MANY_TILES else 1.15
    return (1.1e-6 + max(memory, products) * (0.25 + 0.75 * idle) + rows + 0.25e-6 * rounds / beside) * small


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 12) -> list[Config]:
    """The configurations to time, best predicted first."""
    found = ((estimate(problem, c, gpu), c) for c in CONFIGS if refuse(problem, c) is None)
    return varied(found, lambda c: (c.tiles, c.warps), limit)
