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
MOST_TILES = 4
"""Tiles whose sums a thread keeps."""
EARLY = (9, 0)
"""The first GPUs with programmatic dependent launch."""
FIXED = 1.3e-6
"""Seconds from the last store of the kernel before to the last store of one whose weights are here by then."""


@dataclass(frozen=True, order=True)
class Config:
    """``tiles`` tiles of eight columns (of both matrices, where there are two) at a time, whose K ``warps`` warps share; each warp has ``ahead``
    spans of them in its ring, the first of them ``pace`` at a time (0: all). Two blocks fit a multiprocessor: the next kernel's begin beside this one's."""

    tiles: int
    warps: int
    ahead: int
    pace: int = 0
    trigger: int = 1

    def __str__(self) -> str:
        return f"staged{self.tiles}w{self.warps}a{self.ahead}{f'p{self.pace}' if self.pace else ''}"


def share(problem: Problem, gpu: GpuFacts) -> int:
    """Tiles of a block, of each matrix."""
    return -(-_tiles(problem) // gpu.multiprocessors)


def _tiles(problem: Problem) -> int:
    return -(-problem.columns // TILE)


def spans(problem: Problem, config: Config) -> int:
    """Spans of a warp."""
    return -(-problem.depth // (SPAN * config.warps))


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: rings, the sums of two groups of tiles, those of squares, and rows."""
    ring = config.warps * config.ahead * config.tiles * TILE * SPAN * 2
    sums = 2 * config.warps * config.tiles * TILE * problem.rows * 4 + config.warps * problem.rows * 4
    rows = problem.rows * spans(problem, config) * config.warps * SPAN * 2
    return ring + sums + rows


def refuse(problem: Problem, config: Config, gpu: GpuFacts) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if (why := gemv.unfit(problem)) is not None:
        return why
    if gpu.capability < EARLY:
        return f"launches of {gpu.arch} do not begin early: a ring is full only then before the rows are there"
    if (
        config.tiles % problem.matrices
        or config.tiles > MOST_TILES
        or config.tiles // problem.matrices * TILE * problem.rows > 32 * config.warps
        or config.warps not in (8, 16)
        or not 0 <= config.pace < config.ahead
        or not 1 <= config.ahead <= 16
    ):
        return "not a tile of this kernel"
    if 2 * ((needed := shared_bytes(problem, config)) + 1024) > gpu.shared_per_multiprocessor:
        return f"two blocks of {needed} bytes of shared memory exceed {gpu.shared_per_multiprocessor}"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile; sizes but for the rows are parameters."""
    defines = {
        "TILES": config.tiles, "WARPS": config.warps, "DEPTH": config.ahead, "PACE": config.pace, "TRIGGER": config.trigger,
        "EXACT": int(problem.depth % (SPAN * config.warps) == 0), **gemv.defines(problem),
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
    parameters, each = gemv.operands(problem), share(problem, gpu)
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
    tiles = even(problem, gpu)
    sizes = ((w, max(1, a // tiles), p) for w, a in ((8, 12), (16, 6), (8, 8), (16, 4)) for p in (0, 1))
    found = [Config(tiles, w, a, p) for w, a, p in sizes]
    return [c for c in found if refuse(problem, c, gpu) is None][:limit]


def even(problem: Problem, gpu: GpuFacts) -> int:
    """The tiles that are taken at a time, if every time takes as many."""
    each, most = share(problem, gpu), MOST_TILES // problem.matrices
    return -(-each // -(-each // most)) * problem.matrices
