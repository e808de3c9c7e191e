"""Plans of the product of 9 to 16 rows with packed weights (``packed_resident.cu``): the rows stay in shared memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from optdnn.kernels.launch import Launch, template_options
from optdnn.kernels.packed import tiles
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines, product_parameters
from optdnn.kernels.ranking import first_reason, varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

LEAST_ROWS, MAX_ROWS = 9, 16
"""Up to eight rows fit the columns of one mma.sync; with more than 16 rows, ``packed_sm90.cu`` took less time."""
ROWS = 16
"""Rows that a block has room for."""
LEAST_WARPS, WARPS = 6, 24
"""Bounds of a block's warps: fewer do not hide the latency of products, more have too few registers."""
REGISTERS = 65536
CLUSTERS = (2, 4, 8)
"""Possible numbers of blocks in a cluster."""


@dataclass(frozen=True, order=True)
class Config:
    """A block has ``teams`` teams of ``sharers`` warps. The warps of a team share K. Teams take groups of ``tiles`` tiles of 16 columns (of
    both matrices, if there are two) in turn; each warp has ``ahead`` chunks of a group in flight. ``split`` blocks share K;
    ``cluster``: they form a cluster."""

    tiles: int
    teams: int
    sharers: int
    ahead: int
    split: int = 1
    cluster: bool = False

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.teams * self.sharers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * 32

    def __str__(self) -> str:
        shared = f"{'c' if self.cluster else 'k'}{self.split}" if self.split > 1 else ""
        return f"resident{self.tiles}t{self.teams}x{self.sharers}a{self.ahead}{shared}"


CONFIGS = tuple(
    Config(*c)
    for c in itertools.product(
        (1, 2, 3, 4), range(1, 17), range(1, 25), (1, 2, 3, 4), (1, 2, 3, 4, 6, 8), (False, True)
    )
    if LEAST_WARPS <= c[1] * c[2] <= WARPS and (not c[5] or c[4] in CLUSTERS)
)
KNOWN = frozenset(CONFIGS)


def parts(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Number of parts of the columns: each multiprocessor has one block."""
    if config.cluster:
        return min(problem.tiles, gpu.clusters_at_once(config.split))
    return min(problem.tiles, max(1, gpu.multiprocessors // config.split))


def groups_here(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Most groups of tiles of a block."""
    each = config.tiles // problem.matrices
    most = -(-problem.tiles // parts(problem, config, gpu))
    return -(-most // each)


def chunks_here(problem: Problem, config: Config) -> int:
    """Most chunks of K of a block."""
    return -(-problem.chunks // config.split)


def shared_bytes(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Bytes of dynamic shared memory of a block: barriers, rows, sums of each chunk's rows, a ring and accumulators per warp, and the
    partial sums that the blocks of a cluster send. The accumulators overwrite the ring if a team has one group only."""
    chunks, groups = chunks_here(problem, config), tiles.groups_of(problem.bits, problem.block)
    barriers = -(-(1 + config.warps * (2 + config.ahead)) // 16) * 128
    rows = -(-ROWS * (chunks * problem.chunk * 2 + 16 + chunks * 8) // 128) * 128
    tile = tiles.CHUNK_BYTES + tiles.CHANNELS * groups * (problem.scale_bytes + problem.zero_bytes)
    ring, sums = config.ahead * config.tiles * tile, ROWS * (config.tiles * tiles.CHANNELS + 4) * 4
    here = groups_here(problem, config, gpu)
    sent = here * config.sharers * config.tiles * 1024 if config.cluster else 0
    return barriers + rows + sent + config.warps * (max(ring, sums) if here <= config.teams else ring + sums)


def _refuse_rows(problem: Problem) -> str | None:
    if not 1 <= problem.rows <= MAX_ROWS:
        return f"it is for up to {MAX_ROWS} rows, not {problem.rows}"
    return None


def refuse(problem: Problem, config: Config, gpu: GpuFacts) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if (why := _refuse_rows(problem)) is not None:
        return why
    if config not in KNOWN:
        return "not a tile of this kernel"
    if config.tiles % problem.matrices:
        return "two matrices need an even number of tiles"
    if (needed := shared_bytes(problem, config, gpu)) > gpu.shared_per_block:
        return f"{needed} bytes of shared memory exceed {gpu.shared_per_block}"
    if registers(problem, config) > most_registers(config):
        return "its accumulators do not fit the registers"
    groups = groups_here(problem, config, gpu)
    if config.teams > groups:
        return f"its blocks have fewer than {config.teams} groups of tiles"
    if config.cluster and groups > config.teams:
        return "in a cluster, each team can have only one group"
    if problem.chunks // config.split < config.sharers:
        return f"{problem.chunks} chunks are too few for {config.split * config.sharers} warps"
    return None


def most_registers(config: Config) -> int:
    """Most registers of a thread. Warps count in multiples of four, since a multiprocessor has four partitions."""
    return int(REGISTERS // (-(-config.warps // 4) * 128))


def registers(problem: Problem, config: Config) -> int:
    """Approximate registers of a thread."""
    groups = tiles.groups_of(problem.bits, problem.block)
    chunk = 8 + 2 * (-(-groups * problem.scale_bytes // 4) + -(-groups * problem.zero_bytes // 4))
    return 26 + config.tiles * (8 + 8 * (groups == 1) + chunk)


def resident(problem: Problem, config: Config) -> int:
    """Blocks per multiprocessor, at most two: with two, blocks of the next kernel start beside this kernel's."""
    return max(1, min(2, most_registers(config) // registers(problem, config)))


def workspace(problem: Problem, config: Config, gpu: GpuFacts) -> tuple[int, int]:
    """Bytes of the partial sums, and of their counters (zeros at first). Both are 0 if blocks do not share K, or share it in a
    cluster."""
    if config.split == 1 or config.cluster:
        return 0, 0
    blocks, fours = parts(problem, config, gpu), groups_here(problem, config, gpu) * ROWS * config.tiles * 4
    return blocks * config.split * fours * 16, blocks * 4


def recipe(problem: Problem, config: Config, gpu: GpuFacts) -> Recipe:
    """The kernel's recipe."""
    found = {
        "TILES": config.tiles, "TEAMS": config.teams, "SHARERS": config.sharers, "DEPTH": config.ahead, "SPLIT": config.split, "CLUSTERED": int(config.cluster),
        "CHUNKS": chunks_here(problem, config), "GROUPS_HERE": groups_here(problem, config, gpu), "RESIDENT": resident(problem, config),
        "SET_SHIFT": tiles.set_shift(problem.depth, problem.bits, problem.block), "HAS_RESIDUAL": int(problem.residual), "PAIRED": problem.matrices - 1, **defines(problem),
    }  # fmt: skip
    stages = [render.epilogue(problem.epilogue)]
    stages += [] if problem.beside is None else [render.epilogue(problem.beside, "epilogue_beside")]
    text = "\n".join([render.constants(found), render.mma(problem.dtype), *stages, ""])
    return Recipe("packed_resident.cu", gpu.arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int) -> Launch:
    """The launch. Operands: the operands of :func:`product_parameters`, and those of :func:`workspace` (``partial`` and ``arrived``)."""
    parameters = product_parameters(problem, pairs=True)
    parameters.pointer(*(("partial", "arrived") if config.split > 1 and not config.cluster else (None, None)))
    blocks = parts(problem, config, gpu)
    parameters.i32(problem.rows, problem.columns, problem.depth, x_pitch, out_pitch, blocks)
    return parameters.launch(
        recipe(problem, config, gpu), "packed_resident", blocks * config.split, config.threads, shared=shared_bytes(problem, config, gpu), cluster=config.split if config.cluster else 1,
    )  # fmt: skip


LEVEL_2 = 7.2e12
"""Bytes per second from L2 to the multiprocessors."""
CYCLES = 98.0, 125.0
"""Cycles of a partition of a multiprocessor: per step of a warp, and per tile of the step (128 elements of K)."""
LATENCY = 437.0, 354.0
"""Latency in cycles of a single warp: per step, and per tile of the step."""
SEVERAL = 1.7
"""Factor of the cycles per tile if a chunk has several scales."""
START, ROW_BYTE = 1.8e-6, 14.9e-12
"""Seconds until products begin, and per byte of a block's rows."""
FLIGHT = 0.52e-6
"""Least seconds in which memory delivers a block's loads in flight."""
SUMS, CLUSTER, SHARER = 1.7e-6, 0.7e-6, 0.023e-6
"""Seconds to add the partial sums of blocks: through memory, and in a cluster; and of a team, per warp and tile."""
REST = 0.14
"""Share of the shorter terms that the longest term does not hide."""


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, fitted to 98 timings of an H200 at 16 rows (for nine shapes, the configuration predicted
    to be fastest was within 6 % of the fastest). The longest of memory, L2 and the steps of warps counts in full, the others in part; the
    load of the rows comes before them, the partial sums after them."""
    blocks, groups, chunks = (
        parts(problem, config, gpu),
        groups_here(problem, config, gpu),
        chunks_here(problem, config),
    )
    each, depth = config.tiles // problem.matrices, problem.chunk / 128
    depth *= SEVERAL if tiles.groups_of(problem.bits, problem.block) > 1 else 1.0
    busy, alone = (first + more * config.tiles * depth for first, more in (CYCLES, LATENCY))
    step = max(busy * -(-config.warps // 4), alone) / gpu.clock
    steps = -(-groups // config.teams) * -(-chunks // config.sharers)
    weights, rows = problem.nbytes * problem.matrices, chunks * problem.chunk * 2 * problem.rows
    memory = max(
        weights * max(1.0, groups * each * blocks / problem.tiles) / BANDWIDTH,
        groups * chunks / (config.warps * config.ahead) * FLIGHT,
    )
    terms = memory, (weights + rows * blocks * config.split) / LEVEL_2, steps * step
    sums = 2 * config.split * problem.columns * problem.matrices * ROWS * 4 / LEVEL_2
    ends = CLUSTER if config.cluster else SUMS + sums if config.split > 1 else 0.0
    most = max(terms)
    ends += SHARER * config.sharers * config.tiles
    return float(START + rows * ROW_BYTE + ends + most + REST * (sum(terms) - most))


@lru_cache(maxsize=256)
def unfit(problem: Problem, gpu: GpuFacts) -> str | None:
    """Why no configuration can run the problem, or None.

    The result is cached: layers of a network are often alike, and a problem that no configuration fits is checked against all.
    """
    return _refuse_rows(problem) or first_reason(refuse(problem, c, gpu) for c in CONFIGS)


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 16) -> list[Config]:
    """The configurations to time, best predicted first."""
    found = ((estimate(problem, c, gpu), c) for c in CONFIGS if refuse(problem, c, gpu) is None)
    return varied(found, lambda c: (c.tiles, c.teams, c.sharers, c.split, c.cluster), limit)
