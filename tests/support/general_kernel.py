"""The general convolution kernel in the form in which tests and benchmarks run Hopper's: a recipe, a function, a launch."""

from __future__ import annotations

from typing import Any

from optdnn.kernels import launch as describe
from optdnn.kernels.conv import general_kernel as conv_general
from optdnn.kernels.conv.general_kernel import GeneralConfig, pack_weights
from optdnn.kernels.conv.parameters import Pointers
from optdnn.kernels.conv.problem import Problem
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile.nvrtc import KernelCache, Recipe
from optdnn.runtime.cuda.device import Function, Launch

__all__ = ["bind", "load", "pack_weights", "recipe"]


def recipe(problem: Problem, config: GeneralConfig, arch: str = "sm_90a", *, checked: bool = False) -> Recipe:
    """Compiled for Hopper, where it is tried; it has no waits to check."""
    return conv_general.recipe(problem, config, arch)


def load(problem: Problem, config: GeneralConfig, cache: KernelCache, *, checked: bool = False) -> Function:
    """The compiled kernel on the current device."""
    return describe.load(recipe(problem, config), conv_general.describe(problem, config), cache)


def bind(
    problem: Problem, config: GeneralConfig, device: Any, function: Function, pointers: Pointers, *,
    requantize: Requantize | None = None, channels: int = 0, inside: int = 0, pitch: int = 0, row: int = 0,
) -> Launch:  # fmt: skip
    """The launch on these buffers (weights of :func:`pack_weights`)."""
    found = conv_general.describe(
        problem, config, channels=channels, inside=inside, pitch=pitch, row=row, requantize=requantize
    )
    addresses = {
        "pixels": pointers.sources[0], "weights": pointers.weights, "residual": pointers.residual, "channel": pointers.bias,
        "output": pointers.output, "partial": pointers.partial, "arrived": pointers.arrived,
    }  # fmt: skip
    return describe.bind(found, function, addresses)
