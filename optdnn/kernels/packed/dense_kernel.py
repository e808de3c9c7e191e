"""Plans of the kernel that unpacks weights (``packed_dense.cu``), for products of many rows: to 16-bit floats, or to int8."""

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
    """Elements between rows of 16-bit floats."""
    return up(problem.depth, K_STEP)


def recipe(problem: Problem, arch: str, *, eight_bits: bool = False) -> Recipe:
    """What to compile."""
    text = render.constants({"WARPS": WARPS, "DEPTH": DEPTH, "EIGHT_BITS": int(eight_bits), **defines(problem)})
    return Recipe("packed_dense.cu", arch, {"generated.cuh": f"{text}\n"}, template_options(problem.dtype))


def launch(problem: Problem, gpu: GpuFacts, eight_bits: int = 0) -> Launch:
    """The launch. Operands: those of :func:`put_weights`, ``output`` ``[columns, pitch]``. ``eight_bits``: the pitch of int8 numbers,
    for which there is the operand ``inverse``, fp32 for columns in sixteens; 0: 16-bit floats."""
    item = 1 if eight_bits else 2
    parameters = put_weights(Parameters(), problem).pointer("output")
    parameters.i32(problem.columns, eight_bits or 2 * pitch(problem)).pointer("inverse" if eight_bits else None)
    blocks = -(-problem.tiles * problem.chunks // (WARPS * DEPTH))
    shared = WARPS * 16 * (problem.chunk * item + 16)
    made = recipe(problem, gpu.arch, eight_bits=bool(eight_bits))
    return parameters.launch(made, "packed_dense", blocks, WARPS * 32, shared=shared)


def estimate(problem: Problem, item: int = 2) -> float:
    """Predicted seconds: loads come from memory, stores (of ``item`` bytes a number) mostly stay in L2."""
    return 1.5e-6 + problem.nbytes / BANDWIDTH + problem.columns * problem.depth * item / (1.5 * BANDWIDTH)
