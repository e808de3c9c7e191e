"""Plans of GroupNorm and InstanceNorm (``kernels/group_norm.cu``): NHWC, 16-bit, fp32 statistics, one read of the input.

A cluster keeps a slab of whole groups of one image in its shared memory, so an image may have up to 16 x 200 KB per slab. Before
Hopper, which brought clusters, a block does (99 to 163 KB).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MEMORY = 4.2e12
CLOCK = 1.75e9


@dataclass(frozen=True)
class Problem:
    """``batch`` images of ``pixels`` positions x ``channels``, normalized over ``groups`` groups of channels (as many as channels:
    InstanceNorm), times scale plus bias, then pointwise stages without operands.

    Images may be parts of wider ones: ``input_pitch`` and ``output_pitch`` are the elements from a pixel to the next (0: ``channels``).
    ``added_pitch``: elements between the vectors of channels that are added to the pixels of each image (0: one serves all images; None:
    nothing is added)."""

    batch: int
    pixels: int
    channels: int
    groups: int
    epilogue: tuple[render.Stage, ...] = ()
    dtype: str = "float16"
    epsilon: float = 1e-5
    input_pitch: int = 0
    output_pitch: int = 0
    added_pitch: int | None = None

    @property
    def pitches(self) -> tuple[int, int]:
        """Elements from a pixel to the next, of the input and of the output."""
        return self.input_pitch or self.channels, self.output_pitch or self.channels

    @property
    def group(self) -> int:
        """Channels per group."""
        return self.channels // self.groups

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        return 2 * self.itemsize * self.batch * self.pixels * self.channels + 8 * self.channels


@dataclass(frozen=True, order=True)
class Config:
    """``slab`` channels per cluster of ``cluster`` blocks of ``threads``; accesses of ``lanes`` channels."""

    slab: int
    cluster: int
    threads: int
    lanes: int

    def __str__(self) -> str:
        return f"gn{self.slab}c{self.cluster}t{self.threads}l{self.lanes}"


def _head(config: Config, group: int) -> int:
    """Bytes in front of the data: partial sums, totals, moments."""
    lines, groups = config.threads // (config.slab // config.lanes), config.slab // group
    return -(-(lines * config.slab + (2 * config.cluster + 2) * groups) * 4 // 16) * 16


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    return _head(config, problem.group) + -(-problem.pixels // config.cluster) * config.slab * 2


def refuse(
    problem: Problem, config: Config, *, shared: int = 232448, capability: tuple[int, int] = (9, 0)
) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if problem.groups < 1 or problem.channels % problem.groups:
        return f"{problem.channels} channels are not {problem.groups} equal groups"
    if render.uses_residual(problem.epilogue) or ("bias",) in problem.epilogue:
        return "the stages after a group norm have no operands"
    if problem.itemsize != 2:
        return "it is for 16-bit floats"
    if config.lanes not in (1, 2, 4, 8) or config.slab % config.lanes or problem.channels % config.lanes:
        return f"channels do not come in vectors of {config.lanes}"
    if config.slab % problem.group or problem.channels % config.slab:
        return f"a slab of {config.slab} channels is not made of whole groups"
    if not 1 <= config.cluster <= min(16, problem.pixels):
        return f"{problem.pixels} pixels for {config.cluster} blocks"
    if config.cluster > 1 and capability < (9, 0):
        return f"GPUs of capability {capability[0]}.{capability[1]} have no clusters"
    if not 32 <= config.threads <= 1024 or config.threads % 32 or config.slab // config.lanes > config.threads:
        return f"{config.threads} threads are too few for {config.slab} channels, or no block"
    if (needed := shared_bytes(problem, config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    if problem.batch > 65535:
        return "the grid is too large"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. The sizes are parameters."""
    defines = {"LANES": config.lanes, "THREADS": config.threads, "CLUSTER": config.cluster}
    text = "\n".join([render.constants(defines), render.epilogue(problem.epilogue), ""])
    return Recipe("group_norm.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``input``, ``output``, ``scale`` and ``bias`` (fp32 [channels]), and ``added`` where the problem has it."""
    added = None if problem.added_pitch is None else "added"
    parameters = Parameters().pointer("input", "output", "scale", "bias", added)
    parameters.i32(problem.pixels, config.slab, problem.group, *problem.pitches, problem.added_pitch or 0)
    parameters.f32(1.0 / (problem.pixels * problem.group), problem.epsilon)
    grid = (problem.channels // config.slab * config.cluster, problem.batch, 1)
    return parameters.launch(
        recipe(problem, config, gpu.arch), "group_norm", grid, config.threads, shared=shared_bytes(problem, config),
        cluster=config.cluster,
    )  # fmt: skip


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    blocks = problem.channels // config.slab * config.cluster * problem.batch
    shared = shared_bytes(problem, config) + 1024
    resident = max(1, min(device.shared_per_multiprocessor // shared, 2048 // config.threads))
    waves = max(1.0, blocks / (device.multiprocessors * resident))
    lines = config.threads // (config.slab // config.lanes)
    rounds = math.ceil(problem.pixels / config.cluster / lines)
    work = rounds * config.lanes * 12 * config.threads / 128 * min(resident, -(-blocks // device.multiprocessors))
    sectors = min(1.0, config.slab * 2 / 64)
    busy = min(1.0, blocks / device.multiprocessors)
    memory = problem.bytes / (MEMORY * (0.5 + 0.5 * sectors) * busy)
    cluster = 1.0e-6 if config.cluster > 1 else 0.0
    return 2.5e-6 + cluster + 2.5 * max(memory, math.ceil(waves) * work / CLOCK)  # 2.5: as measured


def candidates(problem: Problem, device: GpuFacts, limit: int = 4) -> list[Config]:
    """The configurations to time, best predicted first. Empty when an image does not fit a cluster."""
    found: list[tuple[float, Config]] = []
    lanes = next(n for n in (8, 4, 2, 1) if problem.channels % n == 0)
    least = math.lcm(problem.group, lanes)
    for slab in range(least, problem.channels + 1, least):
        for cluster in (1, 2, 4, 8, 16):
            for threads in (128, 256, 512):
                config = Config(slab, cluster, threads, lanes)
                why = refuse(problem, config, shared=device.shared_per_block, capability=device.capability)
                if why is None:
                    found.append((estimate(problem, config, device), config))
    found.sort(key=lambda item: (item[0], item[1]))
    return [config for _, config in found[:limit]]
