"""Plans of the product of many rows with packed weights on Hopper (``packed_sm90.cu``): weights are unpacked in wgmma's
registers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from optdnn.kernels.launch import BLOCK_SHARED, Launch, Parameters, template_options, tensor_map, whole_kib
from optdnn.kernels.packed import tiles
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import TensorMap

BOX_K, SPAN = 64, 128
"""Elements of K in a TMA box of rows, and their bytes."""
BARRIER_BYTES = 1024
MOST_BLOCKS = 65535
"""Most blocks along the grid's second axis."""
REGISTERS = 65536
"""Registers of a multiprocessor."""
OTHER_REGISTERS, MOST_OTHER_REGISTERS = 44, 60
"""Registers of a thread beside its accumulators, without a residual and at most."""


@dataclass(frozen=True, order=True)
class Config:
    """A block computes ``columns`` columns and ``rows`` rows, with ``stages`` chunks of K in its ring. A cluster of ``split`` blocks shares
    K. In a block, ``teams`` teams of warps take the chunks in turn."""

    rows: int
    stages: int
    split: int = 1
    columns: int = 128
    teams: int = 1

    @property
    def warps(self) -> int:
        """Multiplying warps of a team: one per tile of columns."""
        return self.columns // tiles.CHANNELS

    @property
    def threads(self) -> int:
        """Threads of a block: the teams, and a loading warp (a whole warpgroup if registers are reallocated)."""
        return self.teams * self.warps * 32 + (128 if self.rows > 128 and self.warps > 4 else 32)

    @property
    def ordered(self) -> bool:
        """Whether one team adds all products of a result, in the order of K."""
        return self.split == self.teams == 1

    def __str__(self) -> str:
        split, teams = (f"{letter}{n}" if n > 1 else "" for letter, n in (("k", self.split), ("t", self.teams)))
        return f"packed{self.columns}x{self.rows}s{self.stages}{split}{teams}"


ROWS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
SHAPES = ((128, 1), (64, 1), (64, 2))
"""Columns of a block, and its teams."""
CONFIGS = tuple(
    Config(rows, stages, split, columns, teams)
    for rows, stages, split, (columns, teams) in itertools.product(ROWS, (3, 4, 6, 8), (1, 2, 3, 4, 8), SHAPES)
    if stages % teams == 0 and stages > teams
)
_KNOWN = frozenset(CONFIGS)


def row_blocks(problem: Problem, config: Config) -> int:
    """Blocks along the rows."""
    return -(-problem.rows // config.rows)


def stage_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory of a stage, a multiple of 1024: a chunk of rows, weights, scales and zero points."""
    groups = tiles.groups_of(problem.bits, problem.block)
    parameters = config.columns * groups * (problem.scale_bytes + problem.zero_bytes)
    return whole_kib(config.rows * problem.chunk * 2 + config.warps * tiles.CHUNK_BYTES + parameters)


def own_rows(config: Config) -> int:
    """Rows that a team of a block finishes if K is shared."""
    return -(-config.rows // config.teams // 8 // config.split) * 8


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block: the ring, and the partial sums that the blocks of its cluster send."""
    sums = own_rows(config) * config.split * config.teams * config.columns * 4 if config.split > 1 else 0
    return BARRIER_BYTES + config.stages * stage_bytes(problem, config) + sums


def _sum_bytes(config: Config) -> int:
    """Bytes of accumulators that take the place of the ring."""
    pitch = (config.columns + 4) * 4
    if config.teams > 1:  # those that the teams exchange, and the sums
        return config.rows * config.columns * 4 + config.teams * own_rows(config) * pitch
    if config.split > 1:
        return own_rows(config) * pitch
    return next((n for n in (64, 48) if config.rows % n == 0), config.rows) * pitch


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if config not in _KNOWN:
        return "not a tile of this kernel"
    if row_blocks(problem, config) > MOST_BLOCKS:
        return f"its {problem.rows} rows need more than {MOST_BLOCKS} blocks"
    if shared_bytes(problem, config) > BLOCK_SHARED:
        return "its ring and accumulators do not fit shared memory"
    if config.stages * stage_bytes(problem, config) < _sum_bytes(config):
        return "its accumulators do not fit the memory of its ring"
    if config.teams > 1 and (why := _refuse_teams(problem, config)) is not None:
        return why
    if config.split > 1 and (problem.chunks < 2 * config.split or config.rows < 8 * config.split * config.teams):
        return f"{problem.chunks} chunks and {config.rows} rows are too few for {config.split} blocks"
    return None


def _registers(config: Config, blocks: int) -> int:
    """Registers that a thread may have if a multiprocessor runs ``blocks`` blocks. Each of four schedulers has a quarter of the registers."""
    warps = -(-config.threads * blocks // 128) * 4
    return REGISTERS // (warps * 32) // 8 * 8


def _refuse_teams(problem: Problem, config: Config) -> str | None:
    """Why a block of this size has no work or no room for several teams, or None."""
    if problem.chunks // config.split < config.teams:
        return f"{problem.chunks} chunks are too few for {config.teams} teams in {config.split} blocks"
    if config.rows // 2 + MOST_OTHER_REGISTERS > _registers(config, 1):
        return "its accumulators do not fit registers"
    return None


def resident(problem: Problem, config: Config) -> int:
    """Blocks per multiprocessor that registers must allow. With room for two, blocks of the next kernel start beside this kernel's."""
    if config.teams > 1:
        others = MOST_OTHER_REGISTERS if problem.residual else OTHER_REGISTERS
        narrow = config.rows // 2 + others <= _registers(config, 2)
    else:
        narrow = config.warps <= 4 or config.rows <= (32 if problem.residual else 64)
    few = narrow and tiles.groups_of(problem.bits, problem.block) == 1
    return 2 if few and 2 * (shared_bytes(problem, config) + 1024) <= BLOCK_SHARED + 1024 else 1


def in_flight(config: Config) -> int:
    """Products in flight per team, and operands unpacked ahead of them."""
    return 1 if config.teams > 1 and config.rows <= 64 else 2


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """The grid: blocks of columns in whole clusters, blocks of rows."""
    return -(-problem.columns // config.columns) * config.split, row_blocks(problem, config), 1


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe."""
    found = {
        "WARPS": config.warps, "TEAMS": config.teams, "BN": config.rows, "STAGES": config.stages, "SPLIT": config.split,
        "RESIDENT": resident(problem, config), "IN_FLIGHT": in_flight(config), "HAS_RESIDUAL": int(problem.residual), **defines(problem),
    }  # fmt: skip
    instruction = render.pixels_instruction(config.rows, problem.dtype)
    text = "\n".join([render.constants(found), instruction, render.epilogue(problem.epilogue), ""])
    return Recipe("packed_sm90.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def _weight_maps(problem: Problem, config: Config) -> list[TensorMap[str]]:
    """The tensor maps of ``PackedWeights``, in 16-bit elements: a box is a chunk of a block's tiles, or its set of scales or zero points."""
    sets = tiles.sets_of(problem.depth, problem.bits, problem.block)
    channels = tiles.CHANNELS * tiles.groups_of(problem.bits, problem.block)
    half = tiles.CHUNK_BYTES // 4
    found = [("tiles", half, 2 * problem.chunks, 2), ("scales", channels * problem.scale_bytes // 2, sets, 1)]
    if problem.zeros:
        found.append(("zeros", channels * problem.zero_bytes // 2, sets, 1))
    count = -(-problem.columns // tiles.CHANNELS)
    return [
        tensor_map(
            name, "float16", (width, along, count, 1), (width * 2, width * 2 * along, width * 2 * along * count),
            (width, box, config.warps, 1), 0,
        )
        for name, width, along, box in found
    ]  # fmt: skip


def launch(problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int) -> Launch:
    """The launch. Operands: ``x``, ``tiles``, ``scales``, ``zeros`` (with zero points), ``bias`` (fp32, padded to a multiple of four
    columns), ``residual``, ``output``."""
    box = (BOX_K, config.rows)
    rows = tensor_map("x", problem.dtype, (problem.depth, problem.rows), (x_pitch * 2,), box, SPAN)
    parameters = Parameters().tensor_map(rows, *_weight_maps(problem, config))
    parameters.pointer("bias", "residual" if problem.residual else None, "output")
    shift = tiles.set_shift(problem.depth, problem.bits, problem.block)
    parameters.i32(problem.rows, problem.columns, out_pitch, problem.chunks, shift)
    return parameters.launch(
        recipe(problem, config, gpu.arch), "packed_sm90", grid(problem, config), config.threads,
        shared=shared_bytes(problem, config), cluster=config.split,
    )  # fmt: skip


START = 0.49e-6
"""Seconds until products begin."""
ROW = {(64, 1): 10.7e-9, (128, 1): 17.2e-9, (64, 2): 8.35e-9}
"""Prologue and epilogue in seconds per row of a block, by the block's columns and teams: the first rows arrive, the results leave."""
KILOBYTE = 5.25e-9
"""Seconds per KB of shared memory of a block: that memory keeps blocks of the next launch from starting."""
SUMS, RECEIVED = 0.523e-6, 26
"""Seconds until blocks that share K have exchanged partial sums, and bytes of them that a multiprocessor receives per cycle beyond that."""
CHUNK = 0.013e-6
"""Seconds of a chunk beside products and unpacking."""
UNPACK = {(4, 64): 226, (4, 128): 344, (8, 64): 268, (8, 128): 486}
"""Cycles in which a block unpacks 64 elements of K, by bits (2 counts as 4) and columns."""
GROUPED = 1.48
"""Slowdown of unpacking if a chunk has several scales for a channel."""
TWO_TEAMS = 0.845
"""Time of unpacking with two teams, of the time with one."""
BESIDE = {(64, 1): 0.243, (128, 1): 0.257, (64, 2): 0.358}
"""Share of the shorter of unpacking and products that the longer one does not hide."""
FETCH = 0.75e-6
"""Latency of a chunk's load in seconds."""
NORM = {1: 3.96, 2: 6.72}
"""Exponent of the norm that combines the times of a chunk's load and its products, by teams."""
CROWDED = 1.62
"""Slowdown of two blocks that share a multiprocessor while other multiprocessors are empty."""


def _chunk_seconds(problem: Problem, config: Config, gpu: GpuFacts, shared: float, weight_bytes: float) -> float:
    """Seconds of a chunk of K: products with unpacking, or its load. ``shared``: blocks that share a multiprocessor; ``weight_bytes``:
    bytes of weights that all running blocks read for a chunk."""
    multiply = config.columns * config.rows * problem.chunk / (gpu.matrix_ops / 2)
    unpack = UNPACK[max(problem.bits, 4), config.columns] * problem.chunk / 64
    unpack *= TWO_TEAMS if config.teams > 1 else 1
    unpack *= GROUPED if tiles.groups_of(problem.bits, problem.block) > 1 else 1
    most, least = max(multiply, unpack), min(multiply, unpack)
    step = shared * (most + BESIDE[config.columns, config.teams] * least) / gpu.clock + CHUNK
    fetch = FETCH / (config.stages - config.teams) + weight_bytes / BANDWIDTH
    norm = NORM[config.teams]
    return float((step**norm + fetch**norm) ** (1 / norm))


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, fitted to 5,300 timings of 76 products on an H200 (9 to 2,048 rows). Of 37 other products
    (24 to 384 rows, widths of 2,048 to 5,120), the first choices are 1.3 % behind the best on average. Blocks run in waves."""
    columns, rows, _ = grid(problem, config)
    blocks, many = columns * rows, gpu.clusters_at_once(config.split) * config.split
    room = min(resident(problem, config), gpu.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024))
    together = min(room, -(-blocks // many))
    shared = CROWDED if together < room and 2 * blocks > many else together
    weights = config.columns * problem.chunk * problem.bits / 8 * min(blocks, many * together) / rows
    each = _chunk_seconds(problem, config, gpu, shared, weights)
    ends = ROW[config.columns, config.teams] * config.rows + KILOBYTE * shared_bytes(problem, config) / 1024
    waves, chunks = -(-blocks // (many * room)), -(-problem.chunks // config.split)
    seconds = START + waves * (chunks * each + ends)
    if config.split > 1:
        received = config.rows * config.columns * 4 * (config.split - 1) // config.split
        seconds += SUMS + together * received / RECEIVED / gpu.clock
    return float(seconds)


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 16, *, ordered: bool = False) -> list[Config]:
    """The configurations to time, best predicted first; among equal ones, fewer stages first. ``ordered``: only such ones."""
    known = (c for c in CONFIGS if c.ordered or not ordered)
    fitting = ((estimate(problem, c, gpu), c) for c in known if refuse(problem, c) is None)
    return varied(fitting, lambda c: (c.rows, c.split, c.columns, c.teams), limit)
