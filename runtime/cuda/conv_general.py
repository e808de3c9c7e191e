"""Plans of the general convolution kernel (``kernels/conv_sm80.cu``): mma.sync from sm_80 on, groups, any stride and dilation."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from optdnn.errors import InternalError
from optdnn.runtime.cuda import render
from optdnn.runtime.cuda.conv_params import Pointers
from optdnn.runtime.cuda.conv_problem import Problem
from optdnn.runtime.cuda.device import Device, Function, Launch
from optdnn.runtime.cuda.nvrtc import KernelCache, Recipe
from optdnn.types import Array

BLOCK = 32
"""Channels per K step."""


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
    return config.stages * (config.bm + config.bn) * BLOCK * 2


def refuse(problem: Problem, config: GeneralConfig, groups: int = 1, *, shared: int = 101376) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: what a block can have (99 KB on sm_86)."""
    source = problem.sources[0]
    if len(problem.sources) != 1:
        return "it reads one source"
    if config.bm not in (64, 128) or config.bn not in (64, 128) or config.stages < 2:
        return "not a tile of this kernel"
    if problem.channels % groups or source.channels % groups:
        return f"{groups} groups do not divide the channels"
    if source.channels // groups % 8 or problem.channels // groups % 2:
        return (
            "16-byte copies need multiples of 8 input channels a group, paired stores an even number of output channels"
        )
    if (needed := shared_bytes(config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    return None


def estimate(problem: Problem, config: GeneralConfig, groups: int = 1, multiprocessors: int = 108) -> float:
    """Predicted seconds of one launch on a GPU of the sm_80 family (an A100 has 108 multiprocessors): ranks tiles, no more.

    A multiprocessor multiplies 1024 pairs a cycle and shares the copies of its blocks; what a tile has beyond the problem is
    computed for nothing."""
    channels = problem.channels // groups
    tiles = -(-problem.pixels // config.bm) * -(-channels // config.bn) * groups
    depth = problem.sources[0].channels // groups
    steps = problem.sources[0].kernel[0] * problem.sources[0].kernel[1] * -(-depth // BLOCK)
    multiply = config.bm * config.bn * BLOCK / 1024
    copy = (config.bm + config.bn) * BLOCK * 2 / 40
    resident = max(1, min(tiles // multiprocessors, 101376 // shared_bytes(config), 4))
    waves = -(-tiles // (multiprocessors * resident))
    return (waves * (steps * max(resident * max(multiply, copy), 350.0 / config.stages) + 1500)) / 1.4e9


def recipe(problem: Problem, config: GeneralConfig, arch: str) -> Recipe:
    """What to compile; all shapes are parameters."""
    defines = {"BM": config.bm, "BN": config.bn, "STAGES": config.stages, "HAS_RESIDUAL": int(problem.residual)}
    text = "\n".join([render.constants(defines), render.epilogue(problem.epilogue), ""])
    options = ("--std=c++17", "--use_fast_math", *(("-DDTYPE_BF16",) if problem.dtype == "bfloat16" else ()))
    return Recipe("conv_sm80.cu", arch, {"generated.cuh": text}, options)


def pack_weights(weight: Array) -> Array:
    """OIHW (I: input channels of one group) -> ``[O, taps, I filled up to a multiple of 32]``. Keeps the dtype."""
    out, channels, taps_h, taps_w = weight.shape
    packed = np.zeros((out, taps_h * taps_w, -(-channels // BLOCK) * BLOCK), weight.dtype)
    packed[..., :channels] = weight.transpose(0, 2, 3, 1).reshape(out, taps_h * taps_w, channels)
    return packed


def bind(
    problem: Problem,
    config: GeneralConfig,
    device: Device,
    function: Function,
    pointers: Pointers,
    *,
    groups: int = 1,
    dependent: bool = True,
    label: str = "",
) -> Launch:
    """The launch of the problem on these buffers (weights from :func:`pack_weights`)."""
    if reason := refuse(problem, config, groups):
        raise InternalError(f"conv_sm80: {reason}")
    source, (out_h, out_w) = problem.sources[0], problem.out_size
    channels = problem.channels // groups
    params = struct.pack(
        "5Q17i", pointers.sources[0], pointers.weights, pointers.residual, pointers.bias, pointers.output,
        problem.channels, source.channels, channels, source.channels // groups,
        source.height, source.width, out_h, out_w, problem.pixels,
        *source.kernel, *source.stride, *source.padding[:2], *source.dilation,
    )  # fmt: skip
    grid = (-(-problem.pixels // config.bm), -(-channels // config.bn), groups)
    return Launch(
        function, grid, config.threads, [params.ljust(-(-len(params) // 8) * 8, b"\0")], shared=shared_bytes(config),
        dependent=dependent and device.capability >= (9, 0), label=label or str(config),
    )  # fmt: skip


def load(problem: Problem, config: GeneralConfig, cache: KernelCache, arch: str) -> Function:
    """The compiled kernel on the current device."""
    return Function(cache.get(recipe(problem, config, arch)), "conv_sm80", shared=shared_bytes(config))
