"""Plans of the general convolution kernel (``conv_sm80.cu``): mma.sync from sm_80 on, groups, any stride and dilation.

The bands of a :class:`Problem` are its groups. Its channels are padded to 16 bytes; :func:`launch` gets the result's
channels separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv.header import generated, options
from optdnn.kernels.conv.padding import put_edges
from optdnn.kernels.conv.parameters import DYNAMIC, put_requantize
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.launch import Launch, Parameters
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

ROW = 64
"""Bytes of a K step."""
ROUNDING = 2.5
"""Slowdown by the rounding of factors to tf32 (23.6 us where 9.7 were predicted: 14 groups of 24 channels, 8 x 28 x 28 pixels)."""
LONE = 2.3
"""Time of a step of a block that has its multiprocessor to itself, compared with its share where many blocks overlap."""
SHARED = 101376
"""Bytes of shared memory that a block can have on every GPU from sm_80 on (99 KB on sm_86). More shared memory per
multiprocessor would not help, since registers limit the resident blocks."""


@dataclass(frozen=True, order=True)
class GeneralConfig:
    """A tile of ``bm`` pixels x ``bn`` channels (64 or 128 each) with 128 threads and ``stages`` K steps in flight;
    ``split`` blocks share K."""

    bm: int
    bn: int
    stages: int
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128

    def __str__(self) -> str:
        return f"mma{self.bm}x{self.bn}s{self.stages}{f'k{self.split}' if self.split > 1 else ''}"


_TILES = tuple((bm, bn) for bm in (64, 128) for bn in (64, 128))
CONFIGS = (
    *(GeneralConfig(*tile, stages) for tile in _TILES for stages in (3, 4)),
    *(GeneralConfig(*tile, 4, split) for tile in _TILES[:3] for split in (2, 4, 8)),
)
LEAST_STEPS = 4
"""Least K steps per block if blocks share K."""


def shared_bytes(config: GeneralConfig) -> int:
    """Dynamic shared memory of a block."""
    return config.stages * (config.bm + config.bn) * ROW


def refuse(problem: Problem, config: GeneralConfig, *, shared: int = SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: bytes that a block can have."""
    if len(problem.sources) != 1 or problem.stack or problem.prologue or problem.scatter or problem.pooled:
        return "it reads one source without a prologue, and neither scatters nor pools results"
    if config.bm not in (64, 128) or config.bn not in (64, 128) or config.stages < 2:
        return "not a tile of this kernel"
    if (needed := shared_bytes(config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    if config.split > 1 and (steps := k_steps(problem)) < LEAST_STEPS * config.split:
        return f"{steps} K steps are too few for {config.split} blocks"
    return None


def k_steps(problem: Problem) -> int:
    """K steps of a tile."""
    source = problem.sources[0]
    return source.kernel[0] * source.kernel[1] * -(-source.channels * problem.item // ROW)


def grid(problem: Problem, config: GeneralConfig, channels: int = 0) -> tuple[int, int, int]:
    """Blocks: (tiles of pixels, tiles of a group's channels, groups x parts of K). ``channels``: as of :func:`launch`."""
    of_group = (channels or problem.channels) // problem.bands
    return -(-problem.pixels // config.bm), -(-of_group // config.bn), problem.bands * config.split


def workspace(problem: Problem, config: GeneralConfig, channels: int = 0) -> tuple[int, int]:
    """Bytes of the partial sums, and of their counters, which start at zero. Both are 0 if K is not shared."""
    if config.split == 1:
        return 0, 0
    blocks = math.prod(grid(problem, config, channels))
    return blocks * config.bm * config.bn * 4, blocks // config.split * 4


def estimate(problem: Problem, config: GeneralConfig, gpu: GpuFacts) -> float:
    """Predicted seconds of one launch on a GPU of the sm_80 family. The model only ranks tiles.

    A multiprocessor multiplies 1024 pairs of 16-bit values per cycle. Its blocks share the bandwidth of copies. Padding
    of a tile costs as much as the rest of it. A block that is alone waits in each step (timings of 33 problems on an H200)."""
    blocks = math.prod(grid(problem, config))
    steps = -(-k_steps(problem) // config.split)
    multiply = config.bm * config.bn * ROW / 2048 * (ROUNDING if problem.dtype == "tfloat32" else 1.0)
    copy = (config.bm + config.bn) * ROW / 40
    resident = max(1, min(-(-blocks // gpu.multiprocessors), SHARED // shared_bytes(config), 4))
    waves = -(-blocks // (gpu.multiprocessors * resident))
    shared = 2000 + config.split * config.bm * config.bn * 4 / 40 if config.split > 1 else 0
    return (
        waves * (steps * max(max(resident, LONE) * max(multiply, copy), 350.0 / config.stages) + 1500) + shared
    ) / 1.4e9


def recipe(problem: Problem, config: GeneralConfig, arch: str) -> Recipe:
    """What to compile. All shapes are parameters."""
    tile = {"BM": config.bm, "BN": config.bn, "STAGES": config.stages, "SPLIT": config.split}
    text = generated(problem, tile, render.mma(problem.dtype))
    return Recipe("conv_sm80.cu", arch, {"generated.cuh": text}, options(problem))


def pack_weights(weight: Array) -> Array:
    """OIHW (I: input channels of one group) -> ``[O, taps, I padded to whole K steps]``. Keeps the dtype."""
    out, channels, taps_h, taps_w = weight.shape
    block = ROW // weight.dtype.itemsize
    packed = np.zeros((out, taps_h * taps_w, -(-channels // block) * block), weight.dtype)
    packed[..., :channels] = weight.transpose(0, 2, 3, 1).reshape(out, taps_h * taps_w, channels)
    return packed


def launch(
    problem: Problem,
    config: GeneralConfig,
    gpu: GpuFacts,
    *,
    channels: int = 0,
    inside: int = 0,
    pitch: int = 0,
    row: int = 0,
    requantize: Requantize | None = None,
) -> Launch:
    """The launch. Operands: ``pixels``, ``weights`` (:func:`pack_weights`), ``channel`` (fp32 biases; for 8-bit
    operands pairs of scale and bias), ``output``; ``residual`` if the epilogue reads one; ``partial`` and ``arrived``
    (:func:`workspace`) if blocks share K; those of :data:`.parameters.DYNAMIC` if scale and zero point are
    computed, and of :data:`.padding.EDGES` if a zero point pads the pixels. Raises InternalError if the configuration
    cannot run the problem.

    ``channels``: the result's channels, and ``inside``: a group's input channels, if the problem's are padded;
    ``pitch``: elements from a pixel to the next of the result (and residual); ``row``: elements from a row to the next
    of the source."""
    if reason := refuse(problem, config):
        raise InternalError(f"conv_sm80: {reason}")
    source = problem.sources[0]
    channels, inside = channels or problem.channels, inside or source.channels
    if problem.bands > 1 and inside * problem.item % 16:
        raise InternalError(f"conv_sm80: groups of {inside} channels do not begin at multiples of 16 bytes")
    parameters = Parameters().pointer(
        "pixels", "weights", "residual" if problem.residual else None, "channel", "output"
    )
    parameters.pointer(*(("partial", "arrived") if config.split > 1 else (None, None)))
    read = source.pitch or source.channels * problem.bands
    parameters.i32(pitch or channels, read, row or source.width * read, channels // problem.bands, inside)
    parameters.i32(source.height, source.width, *problem.out_size, problem.pixels)
    parameters.i32(*source.kernel, *source.stride, *source.padding[:2], *source.dilation)
    put_requantize(parameters, problem.epilogue, requantize)
    if problem.dynamic:
        parameters.pointer(*DYNAMIC)
    put_edges(parameters, problem)
    blocks = grid(problem, config, channels)
    return parameters.launch(
        recipe(problem, config, gpu.arch), "conv_sm80", blocks, config.threads, shared=shared_bytes(config)
    )
