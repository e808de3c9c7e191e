"""Plans of the convolution of an image in its given layout and the max pool after it, on Hopper's wgmma
(``conv_stem_pool_sm90.cu``): see :mod:`optdnn.kernels.conv.stem_kernel` and
:mod:`optdnn.kernels.conv.stem_pool_kernel`.

Windows of neighboring results are rows of wgmma's operand B, 16 bytes apart: eight columns of a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from optdnn.kernels.conv import stem_kernel as stem
from optdnn.kernels.conv import stem_pool_kernel as pooled
from optdnn.kernels.conv.stem_kernel import KINDS, Layout
from optdnn.kernels.conv.stem_pool_kernel import Problem
from optdnn.kernels.launch import BLOCK_SHARED, Launch, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

CHANNELS = 64
"""Output channels of a block: wgmma's M."""
THREADS = 128
COLUMNS = 8
"""Columns of a filter row, with the one that makes it begin at an even column."""
MOST_STEPS = 16
"""Most K steps: their weights take four registers each."""


class Windows(stem.Problem):
    """The convolution with this kernel's layout."""

    @property
    def layout(self) -> Layout:
        """Planes, with K along the channels of a filter row."""
        s = self.source
        return Layout(True, s.channels, s.kernel[0], COLUMNS, s.padding[1] % 2, True)


def of(problem: Problem) -> Problem:
    """The problem with this kernel's layout."""
    return replace(problem, conv=Windows(**{f.name: getattr(problem.conv, f.name) for f in fields(stem.Problem)}))


@dataclass(frozen=True, order=True)
class Config:
    """``band``: rows of the pooled image per block."""

    band: int

    def __str__(self) -> str:
        return f"stem_wgmma{self.band}"


def no_kernel(problem: Problem, arch: str) -> str | None:
    """Why no configuration can run the problem, or None."""
    s, layout = problem.conv.source, problem.conv.layout
    if arch != "sm_90a":
        return f"it needs Hopper's wgmma (sm_90a), not {arch}"
    if (why := pooled.no_kernel(problem)) is not None:
        return why
    if s.stride[1] != 2 or s.dilation[1] != 1 or s.kernel[1] + layout.lead > COLUMNS:
        return f"its windows are not two columns apart, are dilated, or have more than {COLUMNS} columns"
    if s.channels % 2 and (s.stride[0] % 2 or s.dilation[0] != 1):
        return "an image with an odd number of channels needs windows that begin at even rows, without dilation"
    if layout.steps > MOST_STEPS:
        return f"weights of {layout.steps} K steps do not stay in registers"
    return None


def refuse(problem: Problem, config: Config, arch: str = "sm_90a", shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: bytes that a block can have."""
    if (why := no_kernel(problem, arch)) is not None:
        return why
    if not 1 <= config.band <= problem.size[0]:
        return "not a tile of this kernel"
    if registers(problem) > 255:
        return "its weights, accumulators and results do not fit the registers of a thread"
    if (needed := shared_bytes(problem)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    return None


def tile_w(problem: Problem) -> int:
    """Columns of the convolution, rounded up to two halves of a multiple of 8."""
    return -(-problem.conv.out_size[1] // 16) * 16


def lead(problem: Problem) -> int:
    """Pairs of rows whose pixels a pair of result rows reads, rounded up."""
    s = problem.conv.source
    return -(-(s.stride[0] + (s.kernel[0] - 1) * s.dilation[0] + 1) // (2 * s.stride[0]))


def columns(problem: Problem) -> int:
    """Columns of pixels that a tile reads, in whole vectors and whole words."""
    conv = problem.conv
    needed = (tile_w(problem) - 1) * 2 + conv.phase - conv.layout.lead + COLUMNS
    return -(-needed // max(conv.vector, 2)) * max(conv.vector, 2)


def shared_bytes(problem: Problem) -> int:
    """Dynamic shared memory of a block: the ring of rows of windows, and the planes from which they are made."""
    planes = 2 * problem.conv.source.stride[0] * problem.conv.source.channels
    return planes * ((lead(problem) + 1) * tile_w(problem) * 16 + columns(problem) * 2)


def rounds(problem: Problem) -> int:
    """Vectors of a pair's pixels that a thread loads."""
    s = problem.conv.source
    return -(-2 * s.stride[0] * s.channels * columns(problem) // problem.conv.vector // THREADS)


def registers(problem: Problem) -> int:
    """Estimated registers of a thread."""
    conv = problem.conv
    fetched = rounds(problem) * (-(-conv.vector * KINDS[conv.image][1] // 4) + 3)
    return 52 + 12 * conv.normalize + conv.layout.steps * 4 + tile_w(problem) * 3 // 4 + fetched


def resident(problem: Problem, device: GpuFacts) -> int:
    """Blocks per multiprocessor, limited by shared memory and registers."""
    shared = device.shared_per_multiprocessor // (shared_bytes(problem) + 1024)
    return max(1, min(shared, _by_registers(problem)))


def _by_registers(problem: Problem) -> int:
    return max(1, min(8, 65536 // (THREADS * (-(-registers(problem) // 8) * 8))))


def recipe(problem: Problem, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes of images and tensors are parameters."""
    conv, layout = problem.conv, problem.conv.layout
    s, (kind, item), wide = conv.source, KINDS[conv.image], columns(problem)
    defines = {
        "CHANNELS": s.channels, "STRIDE_H": s.stride[0], "STRIDE_W": s.stride[1], "TILE_H": 2, "TILE_W": tile_w(problem),
        "WARPS_M": 4, "WARPS_N": 1, "MIN_BLOCKS": _by_registers(problem), "PLANES": 1, "TOGETHER": 1,
        "HALO_H": 2 * s.stride[0], "ROW_CHUNKS": wide // conv.vector, "VEC": conv.vector, "PITCH": wide,
        "FIRST_WORD": (conv.phase - layout.lead) // 2, "DILATION_H": s.dilation[0], "K_STEPS": layout.steps,
        "LEAD": lead(problem), "IMAGE_KIND": kind, "IMAGE_ITEM": item, "NORMALIZE": int(conv.normalize),
        "FACTOR_KIND": KINDS[conv.dtype][0], "FACTOR_ITEM": 2, "FINAL_RELU": int(conv.epilogue[-1] == ("relu",)), "IN_BANDS": 1,
        "POOL": problem.window, "POOL_TOP": problem.top, "POOL_LEFT": problem.left,
    }  # fmt: skip
    # The kernel adds the bias, and the rounding of results applies a final ReLU.
    stages = conv.epilogue[1 : -1 if defines["FINAL_RELU"] else None]
    instruction = render.pixels_instruction(tile_w(problem) // 2, conv.dtype)
    text = "\n".join([render.constants(defines), instruction, render.paired_epilogue(stages), ""])
    return Recipe("conv_stem_pool_sm90.cu", arch, {"generated.cuh": text}, template_options(conv.dtype))


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Blocks: bands of images, and parts of the channels."""
    return problem.conv.batch * -(-problem.size[0] // config.band), -(-problem.conv.channels // CHANNELS), 1


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, pitch: int,
    normalization: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> Launch:  # fmt: skip
    """The launch. Arguments as of :func:`optdnn.kernels.conv.stem_pool_kernel.launch`, weights packed for ``problem.conv``."""
    conv = problem.conv
    # With windows of three rows, the first pair begins after the pool's padding, with the second row.
    skipped = (1 - problem.top) * conv.source.stride[0] if problem.window == 3 else 0
    made = stem.parameters(conv, (1, problem.size[0], conv.batch), (0, 1, 0), pitch, 0, normalization, skipped)
    made.i32(*problem.size, config.band, -(-problem.size[0] // config.band))
    return made.launch(
        recipe(problem, gpu.arch), "conv_stem_pool_sm90", grid(problem, config), THREADS, shared=shared_bytes(problem)
    )
