"""Plans of the kernel that unpacks weights to 16-bit floats or int8 (``packed_dense.cu``), for products of many rows."""

from __future__ import annotations

from optdnn.kernels.builder import up
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.packed.problem import BANDWIDTH, Problem, defines, put_weights
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

WARPS, DEPTH = 4, 2
"""Warps of a block, and chunks that a warp has in flight together."""
K_STEP = 32
"""Rows are padded to whole K steps of the general kernel."""


def pitch(problem: Problem) -> int:
    """Elements between rows of 16-bit floats."""
    return up(problem.depth, K_STEP)


def recipe(problem: Problem, arch: str, *, eight_bits: bool = False) -> Recipe:
    """The kernel's recipe."""
    text = render.constants({"WARPS": WARPS, "DEPTH": DEPTH, "EIGHT_BITS": int(eight_bits), **defines(problem)})
    return Recipe("packed_dense.cu", arch, {"generated.cuh": f"{text}\n"}, template_options(problem.dtype))


def launch(problem: Problem, gpu: GpuFacts, eight_bits: int = 0) -> Launch:
    """The launch. Operands: the operands of :func:`put_weights`, and ``output`` ``[columns, pitch]``. ``eight_bits``: pitch of an int8
    output (0: 16-bit floats). An int8 output also needs the operand ``inverse``: fp32, padded to a multiple of 16 columns."""
    item = 1 if eight_bits else 2
    parameters = put_weights(Parameters(), problem).pointer("output")
    parameters.i32(problem.columns, eight_bits or 2 * pitch(problem)).pointer("inverse" if eight_bits else None)
    blocks = -(-problem.tiles * problem.chunks // (WARPS * DEPTH))
    shared = WARPS * 16 * (problem.chunk * item + 16)
    made = recipe(problem, gpu.arch, eight_bits=bool(eight_bits))
    return parameters.launch(made, "packed_dense", blocks, WARPS * 32, shared=shared)


def estimate(problem: Problem, item: int = 2) -> float:
    """Predicted seconds: loads come from memory; stores (``item`` bytes per element) mostly stay in L2."""
    return 1.5e-6 + problem.nbytes / BANDWIDTH + problem.columns * problem.depth * item / (1.5 * BANDWIDTH)
