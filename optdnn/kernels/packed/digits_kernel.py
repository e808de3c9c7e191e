"""Plans of the product of a few rows with packed weights in integer arithmetic (``packed_digits.cu``): bound by one read of the
weights."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.kernels.launch import Launch, template_options
from optdnn.kernels.packed import tiles
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines, product_parameters
from optdnn.kernels.ranking import first_reason, varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted

MAX_ROWS = 8
"""Most rows: four pairs. The columns of mma.sync hold the digits of two rows."""
MOST_TILES = 32
"""Most tiles of a block, of both matrices: their accumulators are in shared memory."""
PRODUCT = 32
"""Elements of K per mma.sync."""
DIGITS = 3
COUNT_BYTES = 8
"""Bytes of the digits' weight for a row and chunk, and of the digits' sums for a group."""
REGISTERS = 65536
ADDRESSES = 12
"""Additional registers per thread before Hopper."""
OWN_REGISTERS = 44
"""Approximate registers of a thread without its chunks in flight and without further rows."""


@dataclass(frozen=True, order=True)
class Config:
    """``warps`` warps of a block share K; each has ``ahead`` chunks in flight."""

    warps: int
    ahead: int

    def __str__(self) -> str:
        return f"digits{self.warps}a{self.ahead}"


CONFIGS = tuple(Config(w, a) for w in (2, 4, 8, 16) for a in (2, 4, 8))
MOST_WARPS, LEAST_AHEAD = 16, 2
NEXT = 32
"""Chunks of a block, in addition to the chunks in flight, that cost no time of their own (fitted)."""


def refuse(problem: Problem, config: Config, gpu: GpuFacts) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if not 1 <= problem.rows <= MAX_ROWS:
        return f"it is for up to {MAX_ROWS} rows, not {problem.rows}"
    if problem.code not in ("uint4", "uint8"):
        return f"its weights are {problem.code}, not integers of 4 or 8 bits"
    if problem.block < PRODUCT:
        return f"its blocks have {problem.block} weights (at least {PRODUCT} are needed)"
    if problem.norm and problem.depth % 8:
        return f"normalized rows need a multiple of 8 elements, not {problem.depth}"
    if config not in CONFIGS:
        return "not a tile of this kernel"
    if problem.chunks < config.warps:
        return f"{problem.chunks} chunks are too few for {config.warps} warps"
    more = 0 if gpu.hopper else ADDRESSES
    if (registers(problem, config) + more) * config.warps * 32 > REGISTERS:
        return "its chunks in flight do not fit the registers"
    if (needed := shared_bytes(problem, config, gpu)) > gpu.shared_per_block:
        return f"{needed} bytes of shared memory exceed {gpu.shared_per_block}"
    return None


def unfit(problem: Problem, gpu: GpuFacts) -> str | None:
    """Why no configuration can run the problem, or None."""
    return first_reason(refuse(problem, c, gpu) for c in CONFIGS)


def groups(problem: Problem, gpu: GpuFacts) -> int:
    """Blocks of the grid: the number of multiprocessors, or a multiple of it if accumulators would not fit."""
    many = gpu.multiprocessors
    turns = -(-problem.tiles * problem.matrices // (many * MOST_TILES))
    return min(problem.tiles, many * turns)


def tiles_of(problem: Problem, gpu: GpuFacts) -> int:
    """Most tiles of a block."""
    return -(-problem.tiles // groups(problem, gpu))


def shared_bytes(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Bytes of dynamic shared memory of a block: accumulators of warps, sums of squares, digits and sums of rows."""
    sums = tiles_of(problem, gpu) * problem.matrices * config.warps * problem.rows * tiles.CHANNELS * 4
    squares = -(-config.warps * problem.rows // 4) * 16 if problem.norm else 0
    groups = tiles.groups_of(problem.bits, problem.block)
    chunk = -(-(DIGITS * problem.chunk + COUNT_BYTES * (1 + groups)) // 16) * 16
    return sums + squares + problem.rows * problem.chunks * chunk


def registers(problem: Problem, config: Config) -> int:
    """Approximate registers of a thread."""
    each = tiles.groups_of(problem.bits, problem.block)
    words = -(-each * problem.scale_bytes // 4) + -(-each * problem.zero_bytes // 4)
    return OWN_REGISTERS + 8 * (problem.rows - 1) + 10 * problem.norm + config.ahead * (8 + 2 * words)


def resident(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Blocks per multiprocessor, at most two: with two, blocks of the next kernel start beside this kernel's."""
    beside = gpu.shared_per_multiprocessor // (shared_bytes(problem, config, gpu) + 1024)
    return max(1, min(2, beside, REGISTERS // (registers(problem, config) * config.warps * 32)))


def recipe(problem: Problem, config: Config, gpu: GpuFacts) -> Recipe:
    """The kernel's recipe."""
    found = {
        "ROWS": problem.rows, "BLOCKS": groups(problem, gpu), "WARPS": config.warps, "AHEAD": config.ahead, "SHARE": -(-problem.chunks // config.warps),
        "EVEN": int(problem.depth % (problem.chunk * config.warps) == 0), "SET_SHIFT": tiles.set_shift(problem.depth, problem.bits, problem.block), "TILES": tiles_of(problem, gpu),
        "RESIDENT": resident(problem, config, gpu), "HAS_RESIDUAL": int(problem.residual), "NORM": int(problem.norm),
        "PAIRED": problem.matrices - 1, **defines(problem),
    }  # fmt: skip
    stages = [render.epilogue(problem.epilogue)]
    stages += [] if problem.beside is None else [render.epilogue(problem.beside, "epilogue_beside")]
    text = "\n".join([render.constants(found), render.mma("uint8"), *stages, ""])
    return Recipe("packed_digits.cu", gpu.arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int, *, epsilon: float = 0.0
) -> Launch:
    """The launch. Operands: the operands of :func:`product_parameters`; with a norm, its ``scale`` (fp32 ``[depth]``)."""
    parameters = product_parameters(problem, pairs=True)
    parameters.pointer("scale" if problem.norm else None)
    parameters.i32(problem.columns, problem.depth, x_pitch, out_pitch).f32(epsilon)
    return parameters.launch(
        recipe(problem, config, gpu), "packed_digits", groups(problem, gpu), config.warps * 32, shared=shared_bytes(problem, config, gpu)
    )  # fmt: skip


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, fitted on an H200: the longer of reading the weights from memory and their products on
    the resident warps; the digits of the rows; the latency of the launch, and the loads that are not in flight then."""
    gpu = fitted(gpu)
    chunks = tiles_of(problem, gpu) * problem.matrices * problem.chunks
    blocks = groups(problem, gpu)
    beside = max(1, blocks // gpu.multiprocessors)
    memory = problem.nbytes * problem.matrices * tiles_of(problem, gpu) * blocks / problem.tiles / BANDWIDTH
    waiting = -(-problem.chunks // config.warps) * config.warps / problem.chunks
    latency = 290 + 40 * problem.chunk / 16 * -(-problem.rows // 2)
    products = chunks * beside * waiting * latency / min(config.warps * beside, MOST_WARPS) / gpu.clock
    digits = problem.rows * problem.depth * beside * 0.19 / gpu.clock
    ring = min(config.warps * config.ahead, chunks)
    idle = 0.1 * memory / beside * max(0.0, 1 - (ring + NEXT) / chunks)
    few = 1e-6 if config.ahead == LEAST_AHEAD else 0.0
    fewer_warps = 1e-9 * (MOST_WARPS - config.warps)
    return (
        1.7e-6 + ring * 2.5e-9 + idle + few + fewer_warps + digits + max(memory, products) + 0.1 * min(memory, products)
    )


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 12) -> list[Config]:
    """The configurations to time, best predicted first."""
    found = ((estimate(problem, c, gpu), c) for c in CONFIGS if refuse(problem, c, gpu) is None)
    return varied(found, lambda c: (c.warps, c.ahead), limit)
