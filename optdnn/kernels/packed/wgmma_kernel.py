"""Plans of the product of many rows with packed weights on Hopper (``packed_sm90.cu``): weights are unpacked to wgmma's
registers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from optdnn.errors import InternalError
from optdnn.kernels.launch import Launch, Parameters, template_options, tensor_map
from optdnn.kernels.packed import tiles
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines, put_weights
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

COLUMNS = 128
"""Columns of a block: 16 of each of eight warps."""
STEP = 64
"""K of a stage."""
SPAN = 128
"""Bytes of a row of a stage: 64 elements of K."""
BARRIER_BYTES = 1024
LARGEST = 230 << 10
"""Bytes of the rows and sums of a block at most."""


@dataclass(frozen=True, order=True)
class Config:
    """``rows`` rows of a block, ``ahead`` chunks of weights and ``stages`` stages of rows in flight; K shared by ``split`` blocks.
    ``cluster``: they are one."""

    rows: int
    ahead: int
    stages: int
    split: int = 1
    cluster: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block: two warpgroups, and a warp that loads (of a warpgroup, where registers are moved)."""
        return 256 + (128 if self.rows > 128 else 32)

    def __str__(self) -> str:
        shared = f"{'c' if self.cluster else 'k'}{self.split}" if self.split > 1 else ""
        return f"packed128x{self.rows}a{self.ahead}s{self.stages}{shared}"


CONFIGS = (
    *(
        Config(rows, ahead, stages, split)
        for rows, ahead, stages, split in itertools.product(
            (16, 32, 64, 96, 128, 192, 256), (2, 4), (4, 6, 8, 12), (1, 2, 3, 4, 6, 8)
        )
        if rows * stages <= 1600
    ),
    *(
        Config(rows, ahead, stages, split, cluster=True)
        for rows, ahead, stages, split in itertools.product((32, 64, 96, 128, 192), (2, 4), (4, 6, 8), (2, 3, 4))
        if rows * stages * SPAN + (rows + 16) * COLUMNS * 4 <= LARGEST
    ),
)


def row_blocks(problem: Problem, config: Config) -> int:
    """Blocks along the rows."""
    return -(-problem.rows // config.rows)


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: rows, and the sums that the blocks of a cluster send it."""
    own = -(-config.rows // 8 // config.split) * 8
    return BARRIER_BYTES + config.stages * config.rows * SPAN + (own * config.split * COLUMNS * 4 if config.cluster else 0)


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if config not in CONFIGS:
        return "not a tile of this kernel"
    if min(config.rows, 64) * (COLUMNS + 4) * 4 > config.stages * config.rows * SPAN:
        return "its sums do not fit the place of its rows"
    if config.ahead > 2 and (config.rows > 128 or tiles.groups_of(problem.bits, problem.block) > 2):
        return "its sums and chunks in flight do not fit the registers"
    if config.split > 1 and problem.chunks < config.split * config.ahead:
        return f"{problem.chunks} chunks are not shared {config.split} ways"
    return None


def resident(problem: Problem, config: Config) -> int:
    """Blocks that a multiprocessor is to have registers for: where they are few, those of the next kernel begin beside this one's."""
    few = config.rows <= (32 if problem.residual else 64) and config.ahead == 2
    return 2 if few and tiles.groups_of(problem.bits, problem.block) == 1 else 1


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Blocks: tiles of columns (of clusters times those of one), parts of K, blocks of rows."""
    columns, rows = -(-problem.columns // COLUMNS), row_blocks(problem, config)
    return (columns * config.split, 1, rows) if config.cluster else (columns, config.split, rows)


def workspace(problem: Problem, config: Config) -> tuple[int, int]:
    """Bytes of the partial sums, and of their counts, which are zero at first. Both 0 where K is not shared."""
    if config.split == 1 or config.cluster:
        return 0, 0
    columns, split, rows = grid(problem, config)
    return columns * split * rows * config.rows * COLUMNS * 4, columns * rows * 4


def recipe(problem: Problem, config: Config, arch: str = "sm_90a", *, checked: bool = False) -> Recipe:
    """What to compile. ``checked``: waits that never end trap."""
    found = {
        "BN": config.rows, "DEPTH": config.ahead, "STAGES": config.stages, "SPLIT": config.split,
        "CLUSTERED": int(config.cluster), "RESIDENT": resident(problem, config),
        "HAS_RESIDUAL": int(problem.residual), **defines(problem),
    }  # fmt: skip
    instruction = render.pixels_instruction(config.rows, problem.dtype)
    text = "\n".join([render.constants(found), instruction, render.epilogue(problem.epilogue), ""])
    return Recipe("packed_sm90.cu", arch, {"generated.cuh": text}, template_options(problem.dtype, checked=checked))


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int, *, checked: bool = False
) -> Launch:
    """The launch. Operands: ``x``, those of :func:`put_weights`, ``bias`` (fp32, columns in fours), ``residual``, ``output``, and where K is
    shared ``partial`` and ``arrived`` (:func:`workspace`). Raises InternalError."""
    if reason := refuse(problem, config):
        raise InternalError(f"packed_sm90: {reason}")
    box = (SPAN // 2, config.rows)
    rows = tensor_map("x", problem.dtype, (problem.depth, problem.rows), (x_pitch * 2,), box, SPAN)
    parameters = put_weights(Parameters().tensor_map(rows), problem)
    parameters.pointer("bias", "residual" if problem.residual else None, "output")
    parameters.pointer(*(("partial", "arrived") if workspace(problem, config)[0] else (None, None)))
    parameters.i32(problem.rows, problem.columns, out_pitch)
    return parameters.launch(
        recipe(problem, config, gpu.arch, checked=checked), "packed_sm90", grid(problem, config), config.threads,
        shared=shared_bytes(config), cluster=config.split if config.cluster else 1,
    )  # fmt: skip


CLUSTER = 2e-6
"""Seconds of adding the sums of the blocks of a cluster."""
CROWDED = 1.4
"""So many times as long takes a block of 64 rows and more beside another one on its multiprocessor."""
LEVEL_2 = 6.4e12
"""Bytes per second from L2 to the multiprocessors, when many read the same lines."""


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, fitted to 104 timings of an H200 from 16 rows to 2,048 (16 % off on average): a block's
    steps by what they multiply and unpack, its weights by the loads in flight, and rows from L2, in waves of blocks."""
    blocks, many, split = math.prod(grid(problem, config)), gpu.multiprocessors, config.split
    if config.cluster:
        many = gpu.clusters_at_once(split) * split
    beside = resident(problem, config)
    room = min(beside, gpu.shared_per_multiprocessor // (shared_bytes(config) + 1024))
    together = min(room, -(-blocks // many))
    waves = -(-blocks // many) if beside == 1 else max(1.0, blocks / many)
    if room > 1:
        waves = waves / together if blocks >= many * together else 1.0
    if together > 1 and config.rows >= 64:
        waves *= CROWDED
    chunks = -(-problem.chunks // split)
    multiply = COLUMNS * config.rows * STEP / (gpu.matrix_ops / 2) / 0.92
    unpack = 400 if problem.bits < 8 else 670
    step = max(multiply + 0.57 * unpack, unpack, 407 / together)
    steps = chunks * problem.chunk / STEP * step / gpu.clock
    weights = chunks * (1.38e-6 + config.ahead * 0.034e-6) / config.ahead
    level_2 = (
        (config.rows * 2 + COLUMNS * problem.bits / 8) * problem.chunk * chunks * min(blocks, many * together) / LEVEL_2
    )
    sums = (
        0.0
        if split == 1
        else CLUSTER
        if config.cluster
        else 3.5e-6 + 2 * split * problem.rows * problem.columns * 4 / 2.8e12
    )
    memory = problem.nbytes / BANDWIDTH
    return 2.0e-6 + max(waves * max(steps, weights, level_2), memory) + sums + 0.75e-6 * (beside == 1)


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 16) -> list[Config]:
    """The configurations to time, best predicted first; of equal ones, those with most chunks in flight, then stages."""
    fitting = sorted((c for c in CONFIGS if refuse(problem, c) is None), key=lambda c: -c.stages)
    order = sorted(fitting, key=lambda c: (estimate(problem, c, gpu), -c.ahead))
    return varied(((float(i), c) for i, c in enumerate(order)), lambda c: (c.rows, c.split), limit)
