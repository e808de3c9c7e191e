"""Plans of the general convolution kernel (``kernels/conv_sm80.cu``): mma.sync from sm_80 on, groups, any stride and dilation.

A :class:`Problem`'s bands are its groups. Its channels are filled up to 16 bytes; those of the result are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.errors import InternalError
from optdnn.runtime.cuda import conv, render
from optdnn.runtime.cuda.conv_params import Requantize, put_requantize
from optdnn.runtime.cuda.conv_problem import Problem
from optdnn.runtime.cuda.describe import Description, ParameterBlock
from optdnn.runtime.cuda.nvrtc import Recipe
from optdnn.types import Array

ROW = 64
"""Bytes of a K step."""


@dataclass(frozen=True, order=True)
class GeneralConfig:
    """A tile: ``bm`` pixels x ``bn`` channels (64 or 128 each) of 128 threads, ``stages`` K steps in flight."""

    bm: int
    bn: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128

    def __str__(self) -> str:
        return f"mma{self.bm}x{self.bn}s{self.stages}"


CONFIGS = tuple(GeneralConfig(bm, bn, stages) for bm in (64, 128) for bn in (64, 128) for stages in (3, 4))


def shared_bytes(config: GeneralConfig) -> int:
    """Dynamic shared memory of a block."""
    return config.stages * (config.bm + config.bn) * ROW


def refuse(problem: Problem, config: GeneralConfig, *, shared: int = 101376) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: what a block can have (99 KB on sm_86)."""
    if len(problem.sources) != 1 or problem.stack or problem.prologue or problem.scatter or problem.pooled:
        return "it reads one source as it is, and stores results where they belong"
    if config.bm not in (64, 128) or config.bn not in (64, 128) or config.stages < 2:
        return "not a tile of this kernel"
    if (needed := shared_bytes(config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    return None


def estimate(problem: Problem, config: GeneralConfig, multiprocessors: int = 108) -> float:
    """Predicted seconds of one launch on a GPU of the sm_80 family (an A100 has 108 multiprocessors): ranks tiles, no more.

    A multiprocessor multiplies 1024 pairs of 16-bit numbers a cycle and shares the copies of its blocks; what a tile has beyond the
    problem is computed for nothing."""
    tiles = -(-problem.pixels // config.bm) * -(-problem.band_channels // config.bn) * problem.bands
    source = problem.sources[0]
    steps = source.kernel[0] * source.kernel[1] * -(-source.channels * problem.item // ROW)
    multiply = config.bm * config.bn * ROW / 2048
    copy = (config.bm + config.bn) * ROW / 40
    resident = max(1, min(tiles // multiprocessors, 101376 // shared_bytes(config), 4))
    waves = -(-tiles // (multiprocessors * resident))
    return (waves * (steps * max(resident * max(multiply, copy), 350.0 / config.stages) + 1500)) / 1.4e9


def recipe(problem: Problem, config: GeneralConfig, arch: str) -> Recipe:
    """What to compile; all shapes are parameters."""
    tile = {"BM": config.bm, "BN": config.bn, "STAGES": config.stages}
    text = conv.generated(problem, tile, render.mma(problem.dtype))
    return Recipe("conv_sm80.cu", arch, {"generated.cuh": text}, conv.options(problem, checked=False))


def pack_weights(weight: Array) -> Array:
    """OIHW (I: input channels of one group) -> ``[O, taps, I filled up to whole K steps]``. Keeps the dtype."""
    out, channels, taps_h, taps_w = weight.shape
    block = ROW // weight.dtype.itemsize
    packed = np.zeros((out, taps_h * taps_w, -(-channels // block) * block), weight.dtype)
    packed[..., :channels] = weight.transpose(0, 2, 3, 1).reshape(out, taps_h * taps_w, channels)
    return packed


def describe(
    problem: Problem,
    config: GeneralConfig,
    *,
    channels: int = 0,
    inside: int = 0,
    pitch: int = 0,
    row: int = 0,
    requantize: Requantize | None = None,
) -> Description:
    """The launch. Operands: ``pixels``, ``weights`` (:func:`pack_weights`), ``channel`` (fp32 biases, of 8-bit operands pairs of
    scale and bias), ``output``, and ``residual`` where there is one. Raises InternalError.

    ``channels``: of the result, and ``inside``: of a group's source, where the problem's are filled up; ``pitch``: elements between
    the result's (and residual's) pixels; ``row``: between the source's rows."""
    if reason := refuse(problem, config):
        raise InternalError(f"conv_sm80: {reason}")
    source = problem.sources[0]
    channels, inside = channels or problem.channels, inside or source.channels
    if problem.bands > 1 and inside * problem.item % 16:
        raise InternalError(f"conv_sm80: groups of {inside} channels do not begin at multiples of 16 bytes")
    block = ParameterBlock()
    block.pointer("pixels").pointer("weights").pointer("residual" if problem.residual else None)
    block.pointer("channel").pointer("output")
    read = source.pitch or source.channels * problem.bands
    block.i32(pitch or channels, read, row or source.width * read, channels // problem.bands, inside)
    block.i32(source.height, source.width, *problem.out_size, problem.pixels)
    block.i32(*source.kernel, *source.stride, *source.padding[:2], *source.dilation)
    put_requantize(block, problem.epilogue, requantize)
    grid = (-(-problem.pixels // config.bm), -(-(channels // problem.bands) // config.bn), problem.bands)
    return block.describe("conv_sm80", grid, config.threads, shared=shared_bytes(config))
