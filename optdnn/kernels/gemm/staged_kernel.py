"""Plans of the product of a few rows with a matrix whose weights come through shared memory (``gemv_staged.cu``): batch 1 to 4."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.errors import InternalError
from optdnn.kernels.gemm import gemv_kernel as gemv
from optdnn.kernels.gemm.gemv_kernel import Problem
from optdnn.kernels.launch import Launch, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

TILE, SPAN = 8, 64
"""Columns of a tile, and elements of K that a warp multiplies at a time."""
MOST_TILES = {16: 4, 8: 8}
"""Tiles whose sums a thread keeps, by the warps of this kernel on a multiprocessor: the next kernel has half of the registers."""
EARLY = (9, 0)
"""The first GPUs with programmatic dependent launch."""
FIXED = 1.3e-6
"""Seconds from the last store of the kernel before to the last store of one whose weights are here by then."""


@dataclass(frozen=True, order=True)
class Config:
    """``tiles`` tiles of eight columns (of both matrices, where there are two) at a time, whose K ``warps`` warps share; each warp has ``ahead``
    turns of ``together`` tiles in flight. Two blocks fit a multiprocessor: the next kernel's begin beside this one's."""

    tiles: int
    together: int
    warps: int
    ahead: int
    blocks: int = 1
    trigger: int = 0

    def __str__(self) -> str:
        return f"staged{self.tiles}t{self.together}w{self.warps}a{self.ahead}{f'b{self.blocks}' if self.blocks > 1 else ''}"


def share(problem: Problem, blocks: int, gpu: GpuFacts) -> int:
    """Tiles of a block, of each matrix, if ``blocks`` of them share a multiprocessor."""
    return -(-_tiles(problem) // (gpu.multiprocessors * blocks))


def _tiles(problem: Problem) -> int:
    return -(-problem.columns // TILE)


def spans(problem: Problem, config: Config) -> int:
    """Spans of a warp."""
    return -(-problem.depth // (SPAN * config.warps))


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: rings, the sums of two groups of tiles, those of squares, and normalized rows."""
    ring = config.warps * config.ahead * config.together * TILE * SPAN * 2
    sums = 2 * config.warps * config.tiles * TILE * problem.rows * 4 + config.warps * problem.rows * 4
    rows = problem.rows * spans(problem, config) * config.warps * SPAN * 2 if problem.norm else 0
    return ring + sums + rows


def refuse(problem: Problem, config: Config, gpu: GpuFacts) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if (why := gemv.unfit(problem)) is not None:
        return why
    if gpu.capability < EARLY:
        return f"launches of {gpu.arch} do not begin early: a ring is full only then before the rows are there"
    if (
        config.tiles % problem.matrices
        or config.tiles > MOST_TILES.get(config.warps * config.blocks, 0)
        or config.tiles // problem.matrices * TILE * problem.rows > 32 * config.warps
        or config.together not in (1, 2)
        or config.together > config.tiles
        or not 1 <= config.ahead <= 16
    ):
        return "not a tile of this kernel"
    beside = 2 * config.blocks
    if beside * ((needed := shared_bytes(problem, config)) + 1024) > gpu.shared_per_multiprocessor:
        return f"{beside} blocks of {needed} bytes of shared memory exceed {gpu.shared_per_multiprocessor}"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile; sizes but for the rows are parameters."""
    defines = {
        "TILES": config.tiles, "TOGETHER": config.together, "WARPS": config.warps, "DEPTH": config.ahead, "RESIDENT": 2 * config.blocks, "TRIGGER": config.trigger,
        **gemv.defines(problem),
    }  # fmt: skip
    text = "\n".join([render.constants(defines), render.mma(problem.dtype), *gemv.epilogues(problem), ""])
    return Recipe("gemv_staged.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int, *, epsilon: float = 0.0, shrink: float = 1.0
) -> Launch:  # fmt: skip
    """The launch, with the operands of :func:`gemv_kernel.launch`. ``shrink``: a power of two that brings the norm's scale to at most one.
    Raises InternalError."""
    if reason := refuse(problem, config, gpu):
        raise InternalError(f"gemv_staged: {reason}")
    parameters, each = gemv.operands(problem), share(problem, config.blocks, gpu)
    parameters.i32(problem.columns, problem.depth, x_pitch, out_pitch, each, spans(problem, config)).f32(
        epsilon, shrink
    )
    blocks = -(-_tiles(problem) // each)
    return parameters.launch(
        recipe(problem, config, gpu.arch),
        "gemv_staged",
        blocks,
        config.warps * 32,
        shared=shared_bytes(problem, config),
    )


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch: the matrix at the bandwidth, but for what is here when the launch before ends."""
    size = problem.matrices * problem.columns * problem.depth * 2
    return FIXED + size / gemv.MEMORY


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first."""
    sizes = ((w, t, a // t, b) for w, b in ((16, 1), (8, 1), (8, 2)) for t in (1, 2) for a in (6, 4, 12, 8))
    found = [Config(even(problem, w, b, gpu), t, w, a, b) for w, t, a, b in sizes]
    return [c for c in found if refuse(problem, c, gpu) is None][:limit]


def even(problem: Problem, warps: int, blocks: int, gpu: GpuFacts) -> int:
    """The tiles that are taken at a time, if every time takes as many."""
    each, most = share(problem, blocks, gpu), MOST_TILES[warps * blocks] // problem.matrices
    return -(-each // -(-each // most)) * problem.matrices
