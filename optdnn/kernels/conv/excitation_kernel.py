"""Plans of the two products of squeeze-and-excitation in one launch (``excitation_sm90.cu``): pure functions of the problem."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from optdnn.kernels.builder import up
from optdnn.kernels.conv.cost import CLOCK
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

WARPS, STEP = 8, 32
"""Warps of a block; elements of a step of K."""
BEGIN = 128
"""Bytes of shared memory for barriers."""
START, LOAD, EXCHANGE, END = 1.0e-6, 600, 1100, 300
"""Seconds of a launch; cycles from a load to its value, from a block's sums to all of the others', and of the last stores."""
MULTIPLY = 40
"""Cycles of a step of K."""
LOADED = 64
"""Bytes per cycle that a block loads."""


@dataclass(frozen=True)
class Problem:
    """``images`` rows of ``channels``, the ``hidden`` values of each, and its ``results``. ``between`` are the stages of the hidden values,
    ``epilogue`` those of the results; both begin with the bias."""

    images: int
    channels: int
    hidden: int
    results: int
    between: tuple[render.Stage, ...] = (("bias",),)
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"


@dataclass(frozen=True, order=True)
class Config:
    """A cluster of ``split`` blocks for ``images`` images."""

    images: int
    split: int

    def __str__(self) -> str:
        return f"excite{self.images}k{self.split}"

    def hidden_block(self, problem: Problem) -> int:
        """Hidden values of a block, in eights."""
        return up(-(-problem.hidden // self.split), 8)

    def out_block(self, problem: Problem) -> int:
        """Results of a block, in eights."""
        return up(-(-problem.results // self.split), 8)


def pitch(depth: int) -> int:
    """Elements of a row of ``depth`` in shared memory: an odd number of steps."""
    return (-(-depth // STEP) | 1) * STEP


def pitches(problem: Problem, config: Config) -> tuple[int, int]:
    """Elements of a row of the first and of the second matrix."""
    return pitch(problem.channels), pitch(config.split * config.hidden_block(problem))


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    hidden, out = config.hidden_block(problem), config.out_block(problem)
    first, second = pitches(problem, config)
    return BEGIN + 16 * second + WARPS * 8 * hidden * 4 + 2 * (hidden * first + out * second)


def no_kernel(problem: Problem) -> str | None:
    """Why the kernel has no form for the problem, or None."""
    if problem.dtype not in ("float16", "bfloat16"):
        return f"it is for 16-bit floats, not {problem.dtype}"
    if problem.channels % 8 or problem.results % 8:
        return "it loads and stores channels in eights"
    stages = (problem.between, problem.epilogue)
    if any(s[:1] != (("bias",),) or render.uses_residual(s) for s in stages):
        return "the bias comes first, and nothing is added"
    return None


def refuse(problem: Problem, config: Config, gpu: GpuFacts) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if (why := no_kernel(problem)) is not None:
        return why
    if not 1 <= config.images <= 8 or config.split not in (2, 4, 8, 16):
        return "not a cluster of this kernel"
    if config.hidden_block(problem) * (config.split - 1) >= problem.hidden + 8 * config.split:
        return f"{problem.hidden} hidden values are too few for {config.split} blocks"
    if (needed := shared_bytes(problem, config)) > gpu.shared_per_block:
        return f"{needed} bytes of shared memory exceed {gpu.shared_per_block}"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a", *, checked: bool = False) -> Recipe:
    """What to compile; sizes are parameters. ``checked``: a wait that never ends traps."""
    defines = {"IMAGES": config.images, "SPLIT": config.split, "WARPS": WARPS}
    stages = [render.epilogue(problem.between, "between_one"), render.epilogue(problem.epilogue)]
    text = "\n".join([render.constants(defines), *stages, ""])
    return Recipe("excitation_sm90.cu", arch, {"generated.cuh": text}, template_options(problem.dtype, checked=checked))


def pack(matrix: Array, rows: int, columns: int) -> Array:
    """A matrix with zeros behind its rows and columns. Keeps the dtype."""
    packed = np.zeros((rows, columns), matrix.dtype)
    packed[: matrix.shape[0], : matrix.shape[1]] = matrix
    return packed


def launch(problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int) -> Launch:
    """The launch. Operands: ``x`` and ``output`` (rows of these pitches), ``first`` and ``second`` (:func:`pack`), ``first_bias`` and
    ``bias`` (fp32, zero-filled as the rows of the matrices)."""
    parameters = Parameters().pointer("x", "first", "second", "first_bias", "bias", "output")
    parameters.i32(problem.images, problem.channels, problem.hidden, problem.results, x_pitch, out_pitch)
    parameters.i32(*pitches(problem, config), config.hidden_block(problem), config.out_block(problem))
    blocks = -(-problem.images // config.images) * config.split
    return parameters.launch(
        recipe(problem, config, gpu.arch), "excitation_sm90", blocks, WARPS * 32, shared=shared_bytes(problem, config),
        cluster=config.split,
    )  # fmt: skip


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    hidden, out = config.hidden_block(problem), config.out_block(problem)
    first, second = (-(-n // STEP) for n in (problem.channels, config.split * hidden))
    rows = min(config.images, problem.images)
    cycles = LOAD + rows * problem.channels * 2 / LOADED + -(-first // WARPS) * -(-hidden // 16) * MULTIPLY
    cycles += EXCHANGE + -(-rows * config.split * hidden // 8 // (WARPS * 32)) * 150
    cycles += -(-out // 8 // WARPS) * second * MULTIPLY + END
    clusters = -(-problem.images // config.images)
    return START + -(-clusters // max(1, gpu.clusters_at_once(config.split))) * cycles / CLOCK


def candidates(problem: Problem, gpu: GpuFacts) -> list[tuple[float, Config]]:
    """Predicted seconds and configurations, the best first."""
    found = [Config(images, split) for images, split in itertools.product((1, 2, 4, 8), (2, 4, 8, 16))]
    useful = [c for c in found if c.images < 2 * problem.images and refuse(problem, c, gpu) is None]
    return sorted((estimate(problem, c, gpu), c) for c in useful)
