"""Plans of the product of many rows with packed weights on Hopper (``packed_sm90.cu``): weights are unpacked to wgmma's
registers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from optdnn.errors import InternalError
from optdnn.kernels.launch import Launch, Parameters, template_options, tensor_map
from optdnn.kernels.packed import tiles
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import TensorMap

BOX_K, SPAN = 64, 128
"""K of a box of rows, and the bytes of its rows."""
BARRIER_BYTES = 1024
SHARED = 232448
"""Bytes of shared memory that a block of any Hopper GPU may have."""


@dataclass(frozen=True, order=True)
class Config:
    """A block of ``columns`` columns and ``rows`` rows, with ``stages`` chunks of K in its ring. ``split`` blocks share K, ``group`` blocks load
    rows together; they are a cluster."""

    rows: int
    stages: int
    split: int = 1
    columns: int = 128
    group: int = 1

    @property
    def warps(self) -> int:
        """Warps that multiply: a tile of columns each."""
        return self.columns // tiles.CHANNELS

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.split * self.group

    @property
    def threads(self) -> int:
        """Threads of a block: one warpgroup or two, and a warp that loads (of a warpgroup, where registers are moved)."""
        return self.warps * 32 + (128 if self.rows > 128 and self.warps > 4 else 32)

    def __str__(self) -> str:
        shared = f"k{self.split}" * (self.split > 1) + f"c{self.group}" * (self.group > 1)
        return f"packed{self.columns}x{self.rows}s{self.stages}{shared}"


ROWS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
CLUSTER = 8
"""Blocks of a cluster at most."""
CONFIGS = tuple(
    config
    for sizes in itertools.product(ROWS, (3, 4, 6, 8), (1, 2, 3, 4, 8), (64, 128), (1, 2))
    if (config := Config(*sizes)).cluster <= CLUSTER
)


def row_blocks(problem: Problem, config: Config) -> int:
    """Blocks along the rows."""
    return -(-problem.rows // config.rows)


def stage_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a stage: a chunk of the rows, of the weights, of their scales and zero points, in multiples of 1024."""
    groups = tiles.groups_of(problem.bits, problem.block)
    parameters = config.columns * groups * (problem.scale_bytes + problem.zero_bytes)
    return -(-(config.rows * problem.chunk * 2 + config.warps * tiles.CHUNK_BYTES + parameters) // 1024) * 1024


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: its ring, and the sums that the blocks of a cluster send it."""
    own = -(-config.rows // 8 // config.split) * 8
    sums = own * config.split * config.columns * 4 if config.split > 1 else 0
    return BARRIER_BYTES + config.stages * stage_bytes(problem, config) + sums


def _pass(config: Config) -> int:
    """Rows of sums in shared memory at a time, where K is not shared."""
    return next((n for n in (64, 48) if config.rows % n == 0), config.rows)


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if config not in CONFIGS:
        return "not a tile of this kernel"
    if shared_bytes(problem, config) > SHARED:
        return "its ring and sums do not fit shared memory"
    if config.split == 1 and config.stages * stage_bytes(problem, config) < _pass(config) * (config.columns + 4) * 4:
        return "its sums do not fit the place of its ring"
    if config.split > 1 and (problem.chunks < 2 * config.split or config.rows < 8 * config.split):
        return f"{problem.chunks} chunks and {config.rows} rows are not shared {config.split} ways"
    return None


def resident(problem: Problem, config: Config) -> int:
    """Blocks that a multiprocessor is to have registers for: where they are few, those of the next kernel begin beside this one's."""
    narrow = config.warps <= 4 or config.rows <= (32 if problem.residual else 64)
    few = narrow and tiles.groups_of(problem.bits, problem.block) == 1
    return 2 if few and 2 * (shared_bytes(problem, config) + 1024) <= SHARED + 1024 else 1


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Blocks: tiles of columns in whole clusters, blocks of rows."""
    groups = -(-problem.columns // (config.columns * config.group))
    return groups * config.cluster, row_blocks(problem, config), 1


def recipe(problem: Problem, config: Config, arch: str = "sm_90a", *, checked: bool = False) -> Recipe:
    """What to compile. ``checked``: waits that never end trap."""
    found = {
        "WARPS": config.warps, "BN": config.rows, "STAGES": config.stages, "SPLIT": config.split, "GROUP": config.group,
        "RESIDENT": resident(problem, config), "HAS_RESIDUAL": int(problem.residual), **defines(problem),
    }  # fmt: skip
    instruction = render.pixels_instruction(config.rows, problem.dtype)
    text = "\n".join([render.constants(found), instruction, render.epilogue(problem.epilogue), ""])
    return Recipe("packed_sm90.cu", arch, {"generated.cuh": text}, template_options(problem.dtype, checked=checked))


def _weight_maps(problem: Problem, config: Config) -> list[TensorMap[str]]:
    """The maps of ``PackedWeights``, in numbers of 16 bits: a box is a chunk of a block's tiles, or its set of scales or zero points."""
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


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int, *, checked: bool = False
) -> Launch:
    """The launch. Operands: ``x``, ``tiles``, ``scales``, ``zeros`` (where there are any), ``bias`` (fp32, columns in fours), ``residual``,
    ``output``. Raises InternalError."""
    if reason := refuse(problem, config):
        raise InternalError(f"packed_sm90: {reason}")
    box = (BOX_K, config.rows // config.group)
    rows = tensor_map("x", problem.dtype, (problem.depth, problem.rows), (x_pitch * 2,), box, SPAN)
    parameters = Parameters().tensor_map(rows, *_weight_maps(problem, config))
    parameters.pointer("bias", "residual" if problem.residual else None, "output")
    shift = tiles.set_shift(problem.depth, problem.bits, problem.block)
    parameters.i32(problem.rows, problem.columns, out_pitch, problem.chunks, shift)
    return parameters.launch(
        recipe(problem, config, gpu.arch, checked=checked), "packed_sm90", grid(problem, config), config.threads,
        shared=shared_bytes(problem, config), cluster=config.cluster,
    )  # fmt: skip


START, ROW = 1.2e-6, 37e-9
"""Seconds until products begin, and for each row of a block: its first rows arrive, its results leave."""
UNPACK = {4: 355, 8: 426}
"""Cycles in which a block unpacks 64 of K, by bits (2 as 4)."""
BESIDE = 0.16
"""Share of the shorter of unpacking and products that the longer does not hide."""
FETCH = 0.76e-6
"""Seconds from the request for a chunk until it is there."""
CROWDED = 1.65
"""Two blocks that share a multiprocessor, while others are empty, take so many times as long."""
LEVEL_2 = 7.8e12
"""Bytes per second from L2 to the multiprocessors, when many read the same lines."""


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, fitted to 3,950 timings of 150 products on an H200 (9 to 2,048 rows; the first choices are
    1.5 % behind the best on average): for each chunk the longest of its products with its unpacking, its way from memory, and its way from
    L2; in waves of blocks."""
    columns, rows, _ = grid(problem, config)
    blocks, many = columns * rows, gpu.multiprocessors
    if config.cluster > 1:
        many = gpu.clusters_at_once(config.cluster) * config.cluster
    room = min(resident(problem, config), gpu.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024))
    together = min(room, -(-blocks // many))
    shared = CROWDED if together < room and 2 * blocks > many else together
    running = min(blocks, many * together)
    multiply = config.columns * config.rows * problem.chunk / (gpu.matrix_ops / 2)
    unpack = UNPACK[max(problem.bits, 4)] * problem.chunk / 64 * config.columns / 128
    step = shared * (max(multiply, unpack) + BESIDE * min(multiply, unpack)) / gpu.clock
    weights = config.columns * problem.chunk * problem.bits / 8
    fetch = FETCH / (config.stages - 1) + weights * running / rows / BANDWIDTH
    level_2 = (config.rows / config.group * problem.chunk * 2 + weights) * running / LEVEL_2
    waves, chunks = -(-blocks // (many * room)), -(-problem.chunks // config.split)
    return START + waves * (chunks * max(step, fetch, level_2) + ROW * config.rows)


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 16) -> list[Config]:
    """The configurations to time, best predicted first; of equal ones, those with fewest stages."""
    fitting = ((estimate(problem, c, gpu), c) for c in CONFIGS if refuse(problem, c) is None)
    return varied(sorted(fitting), lambda c: (c.rows, c.split, c.columns, c.group), limit)
