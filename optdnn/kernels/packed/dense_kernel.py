"""Plans of the kernel that unpacks weights to 16-bit floats (``packed_dense.cu``), for products of many rows."""

from __future__ import annotations

from optdnn.kernels.builder import up
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines, put_weights
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

WARPS, DEPTH = 4, 2
"""Warps of a block, and chunks of a warp, which are in flight together."""
K_STEP = 32
"""Rows are filled up to whole K steps of the general kernel."""


def pitch(problem: Problem) -> int:
    """Elements between rows."""
    return up(problem.depth, K_STEP)


def recipe(problem: Problem, arch: str) -> Recipe:
    """What to compile."""
    text = render.constants({"WARPS": WARPS, "DEPTH": DEPTH, **defines(problem)})
    return Recipe("packed_dense.cu", arch, {"generated.cuh": f"{text}\n"}, template_options(problem.dtype))


def launch(problem: Problem, gpu: GpuFacts) -> Launch:
    """The launch. Operands: those of :func:`put_weights`, ``output`` ``[columns, pitch]``."""
    parameters = put_weights(Parameters(), problem).pointer("output").i32(problem.columns, pitch(problem))
    blocks = -(-problem.tiles * problem.chunks // (WARPS * DEPTH))
    shared = WARPS * 16 * (problem.chunk * 2 + 16)
    return parameters.launch(recipe(problem, gpu.arch), "packed_dense", blocks, WARPS * 32, shared=shared)


def estimate(problem: Problem) -> float:
    """Predicted seconds: loads come from memory, stores mostly stay in L2."""
    return 1.5e-6 + problem.nbytes / BANDWIDTH + problem.columns * problem.depth * 2 / (1.5 * BANDWIDTH)
