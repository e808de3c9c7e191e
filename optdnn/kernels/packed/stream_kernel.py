"""Plans of the product of a few rows with packed weights on Hopper (``kernels/packed_stream.cu``): each multiprocessor reads its share of
the weights as one stream of bulk copies, which begins before the kernel ahead has ended."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.errors import InternalError
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.packed import tiles
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines, put_weights
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MAX_ROWS = 16
"""Two times the columns of mma.sync."""
TILE_SLOTS = 4
"""Tiles whose sums are under way in a block."""
SHARED, SHARED_TOGETHER = 232448, 233472
"""Bytes of shared memory of a block, and of a multiprocessor, on Hopper."""
REGISTERS = 65536
LEAST_REGISTERS = {1: 64, 2: 96}
"""Chunks that are multiplied side by side -> registers that a thread needs."""
RESERVED = 1024
"""Bytes of shared memory that the system takes for each block."""


@dataclass(frozen=True, order=True)
class Config:
    """``warps`` warps take pieces of ``piece`` chunks in turn. Each has ``slots`` pieces in flight, and multiplies ``together`` chunks side by
    side. ``split`` blocks share K."""

    warps: int
    piece: int
    slots: int
    together: int = 1
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block: the warps, and the one that stores."""
        return self.warps * 32 + 32

    def __str__(self) -> str:
        split = f"k{self.split}" if self.split > 1 else ""
        return f"stream{self.warps}p{self.piece}s{self.slots}t{self.together}{split}"


SHAPES = (
    (15, 4, 1, 2), (15, 2, 2, 2), (15, 2, 2, 1), (15, 1, 4, 1), (11, 2, 3, 2), (11, 4, 2, 2), (7, 2, 3, 2), (7, 4, 3, 2), (3, 2, 2, 2)
)  # fmt: skip
"""Warps, chunks of a piece, slots, chunks side by side: the fastest of the 60 that were timed."""
CONFIGS = tuple(Config(*shape, split) for shape in SHAPES for split in (1, 2, 3, 4, 6, 7, 8))


def row_tiles(problem: Problem) -> int:
    """Tiles of eight rows."""
    return -(-problem.rows // 8)


def slot_bytes(problem: Problem, config: Config) -> int:
    """Bytes of a piece: its chunks, and at most a set of scales and zero points for each."""
    groups = tiles.groups_of(problem.bits, problem.block)
    scales = tiles.CHANNELS * groups * (problem.scale_bytes + problem.zero_bytes)
    return config.piece * (tiles.CHUNK_BYTES + scales)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: barriers, ring, sums of warps, rows."""
    barriers = -(-(config.warps * config.slots + 2 * TILE_SLOTS) * 8 // 128) * 128
    ring = config.warps * config.slots * slot_bytes(problem, config)
    sums = TILE_SLOTS * config.warps * problem.rows * tiles.CHANNELS * 4
    part = -(-problem.chunks // config.split)
    return barriers + ring + sums + problem.rows * tiles.row_bytes(part, problem.bits, problem.block)


def resident(problem: Problem, config: Config) -> int:
    """Blocks that a multiprocessor has room for: those of the next kernel begin beside this one's."""
    room = SHARED_TOGETHER // (shared_bytes(problem, config) + RESERVED)
    for blocks in range(min(4, room), 1, -1):
        # A quarter of the multiprocessor has registers of its own.
        warps = -(-(config.warps + 1) * blocks // 4)
        if LEAST_REGISTERS[config.together] * 32 * warps <= REGISTERS // 4:
            return blocks
    return 1


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if not 1 <= problem.rows <= MAX_ROWS:
        return f"it is for up to {MAX_ROWS} rows, not {problem.rows}"
    if config not in CONFIGS:
        return "not a tile of this kernel"
    if problem.chunks < config.split:
        return f"{problem.chunks} chunks are not shared {config.split} ways"
    if (needed := shared_bytes(problem, config)) > SHARED:
        return f"{needed} bytes of shared memory exceed {SHARED}"
    return None


def grid(problem: Problem, config: Config, gpu: GpuFacts) -> tuple[int, int, int]:
    """Blocks: groups of tiles, parts of K."""
    return min(problem.tiles, max(1, gpu.multiprocessors // config.split)), config.split, 1


def workspace(problem: Problem, config: Config) -> tuple[int, int]:
    """Bytes of the partial sums, and of their counts, which are zero at first. Both 0 where K is not shared."""
    if config.split == 1:
        return 0, 0
    return problem.tiles * config.split * problem.rows * tiles.CHANNELS * 4, problem.tiles * 4


def recipe(problem: Problem, config: Config, arch: str = "sm_90a", *, checked: bool = False) -> Recipe:
    """What to compile. ``checked``: waits that never end trap."""
    found = {
        "ROWS": problem.rows, "ROW_TILES": row_tiles(problem), "WARPS": config.warps, "PIECE": config.piece, "SLOTS": config.slots,
        "TOGETHER": config.together, "SPLIT": config.split, "RESIDENT": resident(problem, config), "HAS_RESIDUAL": int(problem.residual), **defines(problem),
    }  # fmt: skip
    text = "\n".join([render.constants(found), render.mma(problem.dtype), render.epilogue(problem.epilogue), ""])
    return Recipe("packed_stream.cu", arch, {"generated.cuh": text}, template_options(problem.dtype, checked=checked))


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int, *, checked: bool = False
) -> Launch:
    """The launch. Operands: ``x``, those of :func:`put_weights`, ``bias`` (fp32, columns in fours), ``residual``, ``output``, and where K is
    shared ``partial`` and ``arrived`` (:func:`workspace`). Raises InternalError."""
    if reason := refuse(problem, config):
        raise InternalError(f"packed_stream: {reason}")
    parameters = put_weights(Parameters().pointer("x"), problem)
    parameters.pointer("bias", "residual" if problem.residual else None, "output")
    parameters.pointer(*(("partial", "arrived") if config.split > 1 else (None, None)))
    parameters.i32(problem.columns, problem.depth, x_pitch, out_pitch)
    return parameters.launch(
        recipe(problem, config, gpu.arch, checked=checked), "packed_stream", grid(problem, config, gpu), config.threads,
        shared=shared_bytes(problem, config),
    )  # fmt: skip


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, fitted to 411 timings of an H200 (12 % off on average): the weights at memory's rate or
    their products by the warps that are there, whichever takes longer; rows; what the ring does not hide of the launch."""
    groups, split, _ = grid(problem, config, gpu)
    most, part = -(-problem.tiles // groups), -(-problem.chunks // split)
    products = row_tiles(problem) * problem.chunk / 16
    latency = (219 + 43 * products) / config.warps / (1.07 if config.together > 1 else 1.0)
    multiply = most * part * max(7.6 + 6.3 * products + 14 / config.piece, latency) / gpu.clock
    ring = config.warps * config.slots * config.piece * tiles.CHUNK_BYTES
    uneven = 1 + 0.87 * (most * groups / problem.tiles - 1)
    memory = max(problem.nbytes / BANDWIDTH * uneven, problem.nbytes / (ring * groups * split / 0.46e-6))
    rows = problem.rows * part * problem.chunk * 2 / 13e9
    hidden = 0.13 * ring / 33e9 if resident(problem, config) > 1 else 0.0
    sums = 0.0 if split == 1 else 3.0e-6 + 2 * split * problem.rows * problem.columns * 4 / 1.2e12
    return max(memory, multiply) + 0.13 * min(memory, multiply) + rows + sums + max(0.0, 2.4e-6 - hidden)


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 12) -> list[Config]:
    """The configurations to time, best predicted first."""
    found = ((estimate(problem, c, gpu), c) for c in CONFIGS if refuse(problem, c) is None)
    return varied(found, lambda c: (c.warps, c.piece, c.split), limit)
