"""Plans of the tiled product of rows with matrices that they select from a stack, on Hopper (``selected_sm90.cu``)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

from optdnn.kernels.gemm import selected_kernel
from optdnn.kernels.gemm.selected_kernel import PARTS, Problem, grid, ranked, seconds
from optdnn.kernels.launch import Launch, Parameters, template_options, tensor_map
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import FP32

SPAN = 128
"""Bytes of a row in a stage."""
BARRIER_BYTES, INDICES = 1024, 4
ROOM = {1: 220 << 10, 2: 107 << 10}
"""Bytes of shared memory that a block may have, by the number of blocks on a multiprocessor."""
MOST_STAGES = 6
LOADED = {1: 42e9, 2: 52e9}
"""Bytes per second that a multiprocessor loads, by its blocks (H200, 70 timings: within 15 %)."""
MULTIPLIED = 5.3e12
"""Operations per second of a multiprocessor's tensor cores."""
LATENCY = 1.1e-6
"""Seconds from a load to its arrival."""


@dataclass(frozen=True, order=True)
class Config(selected_kernel.Config):
    """Tiles of 64 or 128 rows, and 64, 128 or 256 columns."""

    @property
    def threads(self) -> int:
        """A warpgroup for each 64 rows, and two warps that load."""
        return 2 * self.rows + 64

    @property
    def resident(self) -> int:
        """Blocks on a multiprocessor."""
        return 1 if self.columns == 256 else 2

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return min(
            MOST_STAGES, (ROOM[self.resident] - BARRIER_BYTES - self.numbers) // ((self.rows + self.columns) * SPAN)
        )

    @property
    def numbers(self) -> int:
        """Bytes of the list of rows."""
        return 4 * (self.rows + INDICES * self.threads + self.threads // 32)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return BARRIER_BYTES + self.stages * (self.rows + self.columns) * SPAN + self.numbers


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first."""
    every = itertools.product((64, 128), (64, 128, 256), PARTS)
    return ranked(problem, (Config(*each) for each in every), partial(estimate, problem, gpu=gpu))[:limit]


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds."""
    loaded = (config.rows + config.columns) * SPAN / LOADED[config.resident]
    step = max(loaded, config.rows * config.columns * SPAN / MULTIPLIED)
    steps, slots = -(-problem.depth * 2 // SPAN), gpu.multiprocessors * config.resident

    def tile_s(blocks: float) -> float:
        shared = config.resident if blocks > gpu.multiprocessors else 1
        return steps * max(step * shared, LATENCY / (config.stages - 1))

    return seconds(problem, gpu, config, slots, tile_s)


def launch(problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int) -> Launch:
    """The launch. Operands: ``x`` (rows / times, K), ``weights`` (matrices, N, K), ``index`` (int64, rows), ``output`` (rows, N). Pitches
    count elements."""
    defines = {
        "BM": config.rows, "BN": config.columns, "STAGES": config.stages, "RESIDENT": config.resident,
        "RESULT_FLOAT": int(problem.result == FP32), "VECTORS": int(problem.vectors),
    }  # fmt: skip
    text = "\n".join([render.constants(defines), render.wgmma(config.columns, problem.dtype), ""])
    recipe = Recipe("selected_sm90.cu", gpu.arch, {"generated.cuh": text}, template_options(problem.dtype))
    shape, pitch = (problem.depth, problem.many * problem.columns), problem.depth * 2
    weights = tensor_map("weights", problem.dtype, shape, (pitch,), (SPAN // 2, config.columns), SPAN)
    parameters = Parameters().tensor_map(weights).pointer("output", "x", "index")
    parameters.i32(problem.rows, problem.columns, problem.depth, problem.times, x_pitch).i64(problem.many, out_pitch)
    return parameters.launch(recipe, "selected_sm90", grid(problem, config), config.threads, shared=config.shared_bytes)
