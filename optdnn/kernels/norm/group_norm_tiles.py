"""Plans of GroupNorm and InstanceNorm of images of any size (``group_norm_tiles.cu``): NHWC, fp32 statistics.

Two launches read the input. The first stores the mean and the sum of squared deviations of each tile of an image. The second merges
these moments and normalizes. Images that fit the shared memory of a cluster may be read once: :mod:`.group_norm_kernel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.launch import BLOCK_SHARED, Launch, Parameters
from optdnn.kernels.norm import group_sums
from optdnn.kernels.norm.group_norm_kernel import Problem, add_operands, after_norm, refuse_slabs, vectors
from optdnn.kernels.norm.templates import norm_recipe
from optdnn.kernels.norm.tiles import AHEAD, MOST_TILES, TwoReads, tile_counts
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

BETWEEN_S = 0.4e-6
"""Additional seconds of the second launch in a network, compared to the timed chains of norms."""
BOTH_S, THREAD_S, CROWD_S = 2.6e-6, 6.2e-9, 0.7e-6
"""Seconds of both launches, of each thread of a block (large blocks do not start while the blocks of the launch before run), and of
each block of a multiprocessor after the first."""
L2_RATE = 5e12
"""Bytes per second of reads and writes that hit L2."""
ONE_RATE = 60e9
"""Bytes per second that one multiprocessor reads."""
LATENCY_S, REGISTERS = 0.6e-6, 84
"""Latency of a load in seconds; registers of a thread."""
HELD_IN_L2, BEYOND = 0.4, 1.6
"""Share of L2 with contents that the next launch still finds, and accesses to memory for each byte beyond it."""
WHOLE_PIECE = 128
"""Bytes of neighboring channels that are read at full speed."""


@dataclass(frozen=True, order=True)
class Tiles:
    """A block of ``threads`` threads takes ``slab`` channels of one of the ``tiles`` tiles of an image, in accesses of ``lanes`` channels."""

    slab: int
    tiles: int
    threads: int
    lanes: int

    @property
    def lines(self) -> int:
        """Pixels that a block reads at once."""
        return self.threads // (self.slab // self.lanes)

    def blocks(self, problem: Problem) -> int:
        """Blocks of a launch."""
        return problem.channels // self.slab * self.tiles * problem.batch

    def table_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory of the sums of all threads and of the pivots."""
        return group_sums.table_bytes(self.slab, problem.group, self.lanes, self.lines)

    def recipe(self, template: str, problem: Problem, arch: str) -> Recipe:
        """The recipe of a kernel on these tiles. The sizes are parameters."""
        defines = {"LANES": self.lanes, "THREADS": self.threads, "WIDE": int(problem.itemsize == 4)}
        defines |= {"ADDED": int(problem.added_pitch is not None), **after_norm(problem)}
        defines |= group_sums.defines(self.slab, problem.group, self.lanes, self.threads)
        return norm_recipe(template, arch, defines, problem.dtype, problem.epilogue)

    def pieces(self, problem: Problem) -> float:
        """Factor by which narrow slabs take longer to read and write."""
        return 0.5 + 0.5 * WHOLE_PIECE / min(WHOLE_PIECE, self.slab * problem.itemsize)


class Config(Tiles):
    """Tiles of the two launches."""

    def __str__(self) -> str:
        return f"gt{self.slab}n{self.tiles}t{self.threads}l{self.lanes}"


def refuse(problem: Problem, config: Config, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: most bytes of shared memory of a block."""
    if reason := refuse_slabs(problem, config.slab, config.lanes, config.threads, 1024):
        return reason
    if not 1 <= config.tiles <= min(problem.pixels, MOST_TILES):
        return f"{problem.pixels} pixels in {config.tiles} tiles"
    if (needed := max(shared_bytes(problem, config))) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    if config.blocks(problem) >= 1 << 31 or problem.pixels * max(problem.pitches) >= 1 << 31:
        return "the grid, or an image, is too large"
    return None


def shared_bytes(problem: Problem, config: Config) -> tuple[int, int]:
    """Dynamic shared memory of a block of each launch."""
    return config.table_bytes(problem), 8 * config.slab // problem.group


def _work(problem: Problem, config: Config) -> TwoReads:
    size = problem.itemsize
    tensor = problem.batch * problem.pixels * problem.channels * size
    moments = 8 * config.tiles * config.slab // problem.group
    live = config.lines * (config.slab // config.lanes)  # threads that load
    blocks = config.blocks(problem)
    return TwoReads(
        blocks, config.threads, config.lanes * size * live // config.threads, tensor, config.slab * size, moments
    )


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The recipe of both launches."""
    return config.recipe("group_norm_tiles.cu", problem, arch)


def launches(problem: Problem, config: Config, gpu: GpuFacts) -> tuple[Launch, Launch]:
    """Both launches. Operands: ``input``, ``output``, ``scale`` and ``bias`` (fp32 [channels]), ``moments`` (fp32 [batch, groups,
    tiles, 2], written by the first launch), and ``added``, ``numbers``, ``factor`` and ``shift`` if the problem has them."""
    made, shared = recipe(problem, config, gpu.arch), shared_bytes(problem, config)
    kept = _work(problem, config).kept(gpu)
    pitch, output_pitch = problem.pitches
    sizes = (problem.pixels, problem.channels, config.slab, problem.group, config.tiles)
    tiling = (*sizes, kept, pitch, problem.added_pitch or 0)
    added = None if problem.added_pitch is None else "added"
    first = Parameters().pointer("input", added, "moments").i32(*tiling)
    second = (
        Parameters()
        .pointer("input", added, "output", "scale", "bias", "moments")
        .i32(*tiling, output_pitch)
        .f32(problem.epsilon)
    )
    add_operands(second, problem)
    blocks = config.blocks(problem)
    return (
        first.launch(made, "group_moments", blocks, config.threads, shared=shared[0]),
        second.launch(made, "group_apply", blocks, config.threads, shared=shared[1]),
    )


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of both launches, dependent on earlier ones; fitted to 143 timings on an H200."""
    blocks = config.blocks(problem)
    tensor = problem.batch * problem.pixels * problem.channels * problem.itemsize
    pieces = config.pieces(problem)
    moments = 8 * blocks * config.tiles * (config.slab // problem.group)
    crowd = math.ceil(blocks / gpu.multiprocessors) - 1
    launches = BOTH_S + BETWEEN_S + THREAD_S * config.threads + CROWD_S * crowd
    resident = min(crowd + 1, max(1, 65536 // (REGISTERS * config.threads)))
    running = min(blocks, gpu.multiprocessors * resident)
    in_flight = running * config.threads * config.lanes * problem.itemsize * AHEAD
    alone = 1 / (ONE_RATE * min(blocks, gpu.multiprocessors))
    read = 2 * tensor * pieces * max(1 / L2_RATE, LATENCY_S / in_flight, alone)
    beyond = max(0, tensor - HELD_IN_L2 * gpu.l2_bytes)
    return launches + read + (tensor * pieces + moments) / L2_RATE + BEYOND * beyond / gpu.bandwidth


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 4) -> list[Config]:
    """The configurations to time, best predicted first."""
    lanes, least = vectors(problem)
    found: set[Config] = set()
    for slab in range(least, problem.channels + 1, least):
        for tiles in tile_counts(max(1, problem.channels // slab) * problem.batch, problem.pixels, gpu):
            for threads in (128, 256, 512):
                config = Config(slab, tiles, threads, lanes)
                if refuse(problem, config, shared=gpu.shared_per_block) is None:
                    found.add(config)
    return sorted(found, key=lambda c: (estimate(problem, c, gpu), c))[:limit]
