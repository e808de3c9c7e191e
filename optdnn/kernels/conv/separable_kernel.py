"""Plans of the separable convolution (``separable_sm90.cu``): depthwise, then 1x1, in one launch. NHWC, 16-bit.

``out[n, y, x, o] = epilogue(sum over c of w[o, c] * round(between(sum over taps of in[n, y*sh - ph + r*dh, x*sw - pw + s*dw, c] *
f[c, r, s])))`` (Chollet, "Xception", 2017; the depthwise and projecting convolutions of MobileNetV2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv.problem import OneSource, Source
from optdnn.kernels.launch import (
    BLOCK_SHARED,
    Launch,
    Parameters,
    at_once,
    no_room,
    template_options,
    tensor_map,
    whole_kib,
)
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.compile.render import pixels_instruction
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

MAX_TAPS = 25
_HEAD_BYTES = 1024


@dataclass(frozen=True)
class Problem(OneSource):
    """``batch`` images of ``source``. A depthwise convolution filters the channels, and a 1x1 convolution maps them to
    ``channels`` (a multiple of 8).

    ``pitches``: elements from a pixel to the next of the source, the result and the residual (0: the number of channels).
    """

    batch: int
    source: Source
    channels: int
    between: tuple[render.Stage, ...] = (("bias",),)
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    pitches: tuple[int, int, int] = (0, 0, 0)
    relu: bool = False
    """Whether a ReLU is applied to the source before the filter."""

    @property
    def inner(self) -> int:
        """Channels between the two convolutions."""
        return self.source.channels

    @property
    def taps(self) -> int:
        """Taps of the depthwise filter."""
        return math.prod(self.source.kernel)

    @property
    def filter_row(self) -> int:
        """Elements of a channel's packed filter, a multiple of 16 bytes."""
        return -(-self.taps // 8) * 8

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        s = self.source
        pixels = self.batch * math.prod(self.out_size)
        moved = self.batch * s.height * s.width * self.inner + pixels * self.channels * (2 if self.residual else 1)
        return 2 * (moved + self.inner * (self.channels + self.taps))


@dataclass(frozen=True, order=True)
class Config:
    """``warpgroups`` of four warps. Each warp takes ``strips`` strips, one below the other, of 16 output pixels,
    ``strip_w`` wide; ``grid_x`` warps are side by side in a tile. A tile has ``parts`` x ``columns`` output channels:
    wgmma instructions and their columns. A stage has ``block`` channels of K. ``split``: blocks per cluster that share
    K; ``blocks``: blocks per multiprocessor that registers must allow."""

    warpgroups: int
    strips: int
    strip_w: int
    grid_x: int
    parts: int
    columns: int
    block: int
    stages: int
    split: int = 1
    blocks: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups and a loading warp."""
        return self.warpgroups * 128 + 32

    @property
    def width(self) -> int:
        """Output channels of a tile."""
        return self.parts * self.columns

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile's output pixels."""
        return (
            self.warpgroups * 4 // self.grid_x * self.strips * (16 // self.strip_w),
            self.grid_x * self.strip_w,
        )

    def __str__(self) -> str:
        return (
            f"sep{self.warpgroups}m{self.strips}w{self.strip_w}g{self.grid_x}n{self.parts}x{self.columns}"
            f"c{self.block}s{self.stages}k{self.split}b{self.blocks}"
        )


def patch(problem: Problem, config: Config) -> tuple[int, int]:
    """Rows and columns of a tile's input patch."""
    return problem.source.patch(config.tile)


def tiles(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Tiles of output channels, along columns and along rows."""
    (out_h, out_w), (tile_h, tile_w) = problem.out_size, config.tile
    return -(-problem.channels // config.width), -(-out_w // tile_w), -(-out_h // tile_h)


def steps(problem: Problem, config: Config) -> int:
    """Chunks of K."""
    return -(-problem.inner // config.block)


def stage_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a chunk: the patch, the weights, the filters and their biases."""
    span = config.block * 2
    constants = config.block * (problem.filter_row * 2 + 4)
    return whole_kib(whole_kib(math.prod(patch(problem, config)) * span) + whole_kib(config.width * span) + constants)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    blocks = config.width // 8
    if config.split > 1:
        slots = -(-blocks // config.split)
        after = config.warpgroups * config.strips * slots * config.split * 2048
    else:
        after = config.warpgroups * 4 * (config.strips if problem.residual else 1) * 16 * (blocks | 1) * 16
    return _HEAD_BYTES + config.stages * stage_bytes(problem, config) + after


def register_limit(config: Config) -> int:
    """Most registers per thread: a multiprocessor's four schedulers divide the warps of its blocks."""
    return min(255, 512 // -(-(config.threads // 32) * config.blocks // 4) // 8 * 8)


def batch(problem: Problem, config: Config) -> int:
    """Groups of 16 channels that a warp filters together, so that one chain of products hides the latency of another."""
    if config.block < 32 or config.strips > 2 or problem.taps > 9:
        return 1
    return 2 if registers(problem, config, 2) <= register_limit(config) else 1


def registers(problem: Problem, config: Config, together: int = 1) -> int:
    """Estimated registers of a thread: accumulators of both convolutions, operands, filters, addresses. ``together``:
    see :func:`batch`. Fitted to the spills that ptxas reports."""
    s = problem.source
    pairs, single = divmod(s.kernel[1], 2)
    rows = (config.strips - 1) * (16 // config.strip_w) * s.stride[0] + (s.kernel[0] - 1) * s.dilation[0] + 1
    rows = min(rows, config.strips * s.kernel[0])
    chains = pairs + single if config.strips == 1 else 1
    sums = config.strips * (config.width // 2 + together * (8 * chains + 4))
    slots = -(-config.width // 8 // config.split) * config.strips if config.split > 1 else 0
    more = 24 if config.parts > 1 and config.block > 16 and config.split == 1 else 0
    more += 2 * slots if problem.residual else 0
    row = together * (8 * pairs + 4 * single)
    more += {1: 24, 2: 42 - 2 * together, 4: 50 if problem.taps <= 9 else 66}.get(config.strips, 66)
    return sums + rows * (pairs + single) + 2 * together * -(-problem.taps // 2) + row + more


def refuse(problem: Problem, config: Config, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    s = problem.source
    if (why := no_kernel(problem)) is not None:
        return why
    if config.warpgroups not in (1, 2, 3) or config.strips not in (1, 2, 4) or config.strip_w not in (4, 8, 16):
        return "not a tile of this kernel"
    if config.warpgroups * 4 % config.grid_x:
        return "strips do not fill the tile"
    if config.columns % 8 or not 8 <= config.columns <= 256 or config.parts not in (1, 2):
        return f"wgmma has no tile of {config.columns} columns"
    if config.block not in (16, 32, 64) or not 1 <= config.stages <= 12:
        return "not a ring of this kernel"
    if config.split > 16 or config.split > steps(problem, config):
        return f"{steps(problem, config)} chunks of K cannot be split {config.split} ways"
    if max(patch(problem, config)) > 256:
        return "the patch exceeds a TMA box"
    if config.stages == 1 and steps(problem, config) > config.split:
        return "a stage is released while the next one is read: a ring of one stage holds one chunk"
    if (why := no_room(shared_bytes(problem, config), shared, config.blocks)) is not None:
        return why
    limit = register_limit(config)
    if (found := registers(problem, config)) > limit:
        return f"about {found} registers per thread exceed {limit}"
    if math.prod(tiles(problem, config)) * problem.batch * config.split >= 1 << 31:
        return "more tiles than the kernel can count"
    if s.padding[0] > 255 or s.padding[1] > 255:
        return "its padding exceeds 255"
    return None


def no_kernel(problem: Problem) -> str | None:
    """Why the kernel has no form for the problem, or None."""
    s = problem.source
    if problem.dtype not in ("float16", "bfloat16"):
        return f"it is for 16-bit floats, not {problem.dtype}"
    if problem.between[:1] != (("bias",),) or render.uses_residual(problem.between):
        return "the depthwise convolution's stages do not begin with a bias, or add a residual"
    if problem.taps > MAX_TAPS:
        return f"{problem.taps} taps exceed {MAX_TAPS}"
    if max(s.dilation) > 1 and max(s.stride) > 1:
        return "its filter has both a stride and a dilation"
    if problem.channels % 8 or min(problem.out_size) < 1:
        return "its result is empty, or its number of channels is not a multiple of 8"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes of tensors are parameters."""
    s = problem.source
    defines = {
        "WARPGROUPS": config.warpgroups, "STRIPS": config.strips, "STRIP_W": config.strip_w, "GRID_X": config.grid_x,
        "NT": config.parts, "NW": config.columns, "BK": config.block, "STAGES": config.stages, "SPLIT": config.split,
        "MIN_BLOCKS": config.blocks, "KERNEL_H": s.kernel[0], "KERNEL_W": s.kernel[1], "STRIDE_H": s.stride[0],
        "STRIDE_W": s.stride[1], "DILATION_H": s.dilation[0], "DILATION_W": s.dilation[1],
        "HAS_RESIDUAL": int(problem.residual), "BATCH": batch(problem, config), "RELU_BEFORE": int(problem.relu),
    }  # fmt: skip
    parts = [
        render.constants(defines),
        render.between(problem.between[1:], problem.dtype),
        render.epilogue(problem.epilogue),
    ]
    text = "\n".join([*parts, pixels_instruction(config.columns, problem.dtype), ""])
    return Recipe("separable_sm90.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


MOST_BLOCK = 64
"""The largest chunk of K. Packed filters are padded to a multiple of it."""


def pack_filters(weight: Array) -> Array:
    """``[inner, 1, taps_h, taps_w]`` -> ``[inner to a multiple of MOST_BLOCK, taps to a multiple of 8]``, zero-filled. Keeps the dtype."""
    if weight.shape[1] != 1:
        raise InternalError("a depthwise convolution has one input channel per output channel")
    taps = math.prod(weight.shape[2:])
    packed = np.zeros((-(-len(weight) // MOST_BLOCK) * MOST_BLOCK, -(-taps // 8) * 8), weight.dtype)
    packed[: len(weight), :taps] = weight.reshape(len(weight), -1)
    return packed


def pack_shifts(bias: Array) -> Array:
    """The depthwise bias in fp32, zero-filled like the filters."""
    packed = np.zeros(-(-len(bias) // MOST_BLOCK) * MOST_BLOCK, np.float32)
    packed[: len(bias)] = bias
    return packed


def pack_weights(weight: Array) -> Array:
    """``[channels, inner, 1, 1]`` -> ``[channels, inner to a multiple of 8]``, zero-filled: TMA addresses 16 bytes."""
    packed = np.zeros((len(weight), -(-weight.shape[1] // 8) * 8), weight.dtype)
    packed[:, : weight.shape[1]] = weight.reshape(len(weight), -1)
    return packed


def launch(problem: Problem, config: Config, gpu: GpuFacts, rows: int | None = None) -> Launch:
    """The launch: a grid that fills ``gpu``. Operands: ``input``, ``output``, ``residual`` (channels-last, of the
    problem's pitches), ``filters``, ``shifts`` and ``weights`` (packed), ``bias`` (fp32 [channels]). ``rows``: rows of the
    weights, if fewer than the result's channels."""
    s, (out_h, out_w) = problem.source, problem.out_size
    channel_tiles, tiles_x, tiles_y = tiles(problem, config)
    count = channel_tiles * tiles_x * tiles_y * problem.batch
    pitches = [
        p or c for p, c in zip(problem.pitches, (-(-problem.inner // 8) * 8, *[problem.channels] * 2), strict=True)
    ]
    item, depth = pitches[0] * 2, -(-problem.inner // 8) * 8
    box_h, box_w = patch(problem, config)
    span = config.block * 2
    image, strides = (
        (problem.inner, s.width, s.height, problem.batch),
        (item, s.width * item, s.height * s.width * item),
    )
    matrix = (depth, problem.channels if rows is None else rows)
    parameters = Parameters().tensor_map(
        tensor_map("input", problem.dtype, image, strides, (config.block, box_w, box_h, 1), span),
        tensor_map("weights", problem.dtype, matrix, (depth * 2,), (config.block, config.columns), span),
    )
    parameters.pointer("filters", "shifts", "bias", "output", "residual" if problem.residual else None)
    parameters.i32(out_h, out_w, s.padding[0], s.padding[1], problem.channels, pitches[1], pitches[2])
    parameters.i32(steps(problem, config), channel_tiles, tiles_x, tiles_x * tiles_y, count)
    blocks = (
        count * config.split
        if config.split > 1
        else min(count, gpu.multiprocessors * at_once(shared_bytes(problem, config), config.blocks))
    )
    return parameters.launch(
        recipe(problem, config, gpu.arch), "separable_sm90", blocks, config.threads, shared=shared_bytes(problem, config),
        cluster=config.split,
    )  # fmt: skip
