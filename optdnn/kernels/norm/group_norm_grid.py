"""Plans of GroupNorm and InstanceNorm of large images in one cooperative launch (``group_norm_grid.cu``): NHWC, fp32 statistics.

Each block occupies one multiprocessor. It keeps a part of its pixels in shared memory and in registers while all blocks sum the
statistics. Only the rest is read again. All blocks must run at once, also on a GPU that the engine was not planned for: the grid
has at most as many blocks as the smallest named GPU of the architecture has multiprocessors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.launch import Launch, Parameters
from optdnn.kernels.norm.group_norm_kernel import Problem, add_operands, refuse_slabs, vectors
from optdnn.kernels.norm.group_norm_tiles import L2_RATE, Tiles
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts, on_every_gpu
from optdnn.runtime.cuda.launches.plan import GRID

AHEAD = 6
"""Pixels of a thread that stay in registers (``AHEAD`` of the kernel)."""
THREADS = 512
"""Threads of a block: 256 took a quarter longer."""
LAUNCH_S, MEET_S = 4.0e-6, 3.0e-6
"""Seconds of a dependent cooperative launch, and of the grid barrier with the statistics around it."""
STREAM = 0.85
"""Share of a GPU's memory bandwidth that the kernel reaches."""
FROM_L2 = 0.4
"""Share of L2 that still holds the bytes that were read or written last."""


@dataclass(frozen=True, order=True)
class Config(Tiles):
    """``held`` pixels of each thread stay in shared memory."""

    held: int

    def __str__(self) -> str:
        return f"gg{self.slab}n{self.tiles}t{self.threads}l{self.lanes}h{self.held}"


def refuse(problem: Problem, config: Config, gpu: GpuFacts) -> str | None:
    """Why the configuration cannot run the problem on this GPU, or None."""
    if reason := refuse_slabs(problem, config.slab, config.lanes, config.threads, 512):
        return reason
    if not 1 <= config.tiles <= problem.pixels or config.blocks(problem) > (room := on_every_gpu(gpu)):
        return f"{config.blocks(problem)} blocks cannot run at once on {room} multiprocessors"
    if (needed := shared_bytes(problem, config)) > gpu.shared_per_block:
        return f"{needed} bytes of shared memory exceed {gpu.shared_per_block}"
    if problem.pixels * max(problem.pitches) >= 1 << 31:
        return "an image is too large"
    return None


def _head(problem: Problem, config: Config) -> int:
    """Bytes of shared memory for the sums of threads, pivots and moments."""
    return -(-(config.table_bytes(problem) + 8 * config.slab // problem.group) // 16) * 16


def _line_bytes(problem: Problem, config: Config) -> int:
    """Bytes of the pixels that a block reads at once."""
    return config.lines * config.slab * problem.itemsize


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    return _head(problem, config) + config.held * _line_bytes(problem, config)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe."""
    return config.recipe("group_norm_grid.cu", problem, arch)


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``input``, ``output``, ``scale`` and ``bias`` (fp32 [channels]), ``added``, ``numbers``, ``factor`` and ``shift`` if
    the problem has them, ``moments`` (fp32 [batch, groups, tiles, 2]) and ``rounds`` (two 32-bit words, zeros at first and kept from run to run)."""
    pitch, output_pitch = problem.pitches
    added = None if problem.added_pitch is None else "added"
    parameters = Parameters().pointer("input", added, "output", "scale", "bias", "moments", "rounds")
    parameters.i32(problem.pixels, problem.channels, config.slab, problem.group, config.tiles, 0)
    parameters.i32(pitch, problem.added_pitch or 0, output_pitch, config.held).f32(problem.epsilon)
    add_operands(parameters, problem)
    return parameters.launch(
        recipe(problem, config, gpu.arch), "group_norm_grid", config.blocks(problem), config.threads,
        shared=shared_bytes(problem, config), waits=GRID,
    )  # fmt: skip


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    tensor, count = problem.batch * problem.pixels * problem.channels * problem.itemsize, config.blocks(problem)
    kept = count * (config.held + AHEAD) * _line_bytes(problem, config)
    rate, near = gpu.bandwidth * STREAM * min(1.0, 1.1 * count / gpu.multiprocessors), FROM_L2 * gpu.l2_bytes
    rest = max(0, tensor - kept)
    rate /= config.pieces(problem)
    seconds = tensor / rate  # written
    for read in (tensor, rest):
        seconds += min(read, near) / L2_RATE + max(0.0, read - near) / rate
    live = config.lines * (config.slab // config.lanes) / config.threads
    return LAUNCH_S + MEET_S + seconds / live


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 4) -> list[Config]:
    """The configurations to time, best predicted first."""
    lanes, least = vectors(problem)
    found: set[Config] = set()
    for slab in range(least, problem.channels + 1, least):
        tiles = min(problem.pixels, on_every_gpu(gpu) // (max(1, problem.channels // slab) * problem.batch))
        empty = Config(slab, max(1, tiles), THREADS, lanes, 0)
        if empty.lines < 1 or refuse(problem, empty, gpu) is not None:
            continue
        of_thread = math.ceil(math.ceil(problem.pixels / empty.tiles) / empty.lines)
        room = (gpu.shared_per_block - _head(problem, empty)) // _line_bytes(problem, empty)
        found.add(Config(slab, empty.tiles, THREADS, lanes, max(0, min(room, of_thread - AHEAD))))
    return sorted(found, key=lambda c: (estimate(problem, c, gpu), -c.slab))[:limit]
