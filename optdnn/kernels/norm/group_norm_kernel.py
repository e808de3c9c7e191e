"""Plans of GroupNorm and InstanceNorm (``group_norm.cu``): NHWC, fp32 statistics, one read of the input.

A cluster keeps a slab of whole groups of one image in its registers or its shared memory: a slab may have up to 16 x 200 KB. Before
Hopper there are no clusters: one block keeps the slab (99 to 163 KB).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.launch import BLOCK_SHARED, Launch, Parameters
from optdnn.kernels.norm import group_sums
from optdnn.kernels.norm.templates import FloatElements, norm_recipe
from optdnn.kernels.problem import WithEpilogue
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

HELD = (1, 2, 4, 8)
"""Possible numbers of vectors that a thread keeps in registers."""
LAUNCH_S, CLUSTER_S, SIXTEEN_S, WAVE_S = 2.4e-6, 0.5e-6, 0.15e-6, 2.0e-6
"""Seconds of a launch after a convolution; additional seconds with clusters, with clusters of 16 blocks, and of each further wave."""
START_S = 0.4e-6
"""Delay in seconds of blocks of 512 threads, while blocks of the previous launch run. It scales with the square of the threads."""
VECTOR_S = 0.048e-6
"""Seconds in which a multiprocessor reduces and normalizes one vector per thread, for each 128 threads."""
AHEAD, SHARED_S, BATCH_S = 4, 1.4e-6, 0.24e-6
"""Loads of a thread in flight if shared memory holds its pixels; additional seconds then, once and for each batch of loads."""
L2_RATE = 6.4e12
"""Bytes per second that all multiprocessors read and write."""
REGISTERS = 100
"""Registers of a thread."""
WHOLE_PIECE = 64
"""Bytes of neighboring channels that are read at full speed."""


@dataclass(frozen=True, order=True)
class Modulated:
    """A factor and a shift for each image and channel, after the norm's own scale and bias: ``y * (factor + plus) + shift``.

    The pitches are the elements from an image's vector to the next one (0: one vector for all images). ``shift_pitch`` None: no
    shift."""

    factor_pitch: int
    shift_pitch: int | None
    plus: float


@dataclass(frozen=True)
class Problem(FloatElements, WithEpilogue):
    """``batch`` images of ``pixels`` positions x ``channels``, normalized over ``groups`` groups of channels (``groups`` = ``channels``:
    InstanceNorm), times scale plus bias, perhaps ``modulated``, then pointwise stages. The stages may add an image, and one may have
    per-channel operands.

    Images may be parts of wider ones: ``input_pitch``, ``output_pitch`` and ``residual_pitch`` (the image that the stages add) are the
    elements from a pixel to the next (0: ``channels``). ``added_pitch``: a vector of channels is added to all pixels of an image, and
    this is the number of elements from the vector of an image to the next one (0: one vector for all images; None: no addend)."""

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
    residual_pitch: int = 0
    modulated: Modulated | None = None

    @property
    def pitches(self) -> tuple[int, int]:
        """Elements from a pixel to the next, of the input and of the output."""
        return self.input_pitch or self.channels, self.output_pitch or self.channels

    @property
    def group(self) -> int:
        """Channels per group."""
        return self.channels // self.groups

    @property
    def numbers(self) -> str | None:
        """The launches' operand with the per-channel operands of a stage (fp32 [2, channels]), or None."""
        return "numbers" if render.reads_channels(self.epilogue) else None

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        images = 3 if self.residual else 2
        return images * self.itemsize * self.batch * self.pixels * self.channels + 8 * self.channels


@dataclass(frozen=True, order=True)
class Config:
    """A cluster of ``cluster`` blocks of ``threads`` threads takes ``slab`` channels, in accesses of ``lanes`` channels."""

    slab: int
    cluster: int
    threads: int
    lanes: int

    def __str__(self) -> str:
        return f"gn{self.slab}c{self.cluster}t{self.threads}l{self.lanes}"


def _lines(config: Config) -> int:
    """Pixels that a block reads at once."""
    return config.threads // (config.slab // config.lanes)


def held(problem: Problem, config: Config) -> int:
    """Vectors that a thread keeps in registers; 0: the block keeps its pixels in shared memory."""
    pixels = math.ceil(problem.pixels / config.cluster)
    return next((n for n in HELD if n * _lines(config) >= pixels), 0)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block: sums of threads, totals, moments, a barrier, pivots, and pixels that are not in registers."""
    groups = config.slab // problem.group
    head = group_sums.table_bytes(config.slab, problem.group, config.lanes, _lines(config)) + 8 * (
        (config.cluster + 1) * groups + 1
    )
    kept = 0 if held(problem, config) else -(-problem.pixels // config.cluster) * config.slab * problem.itemsize
    return -(-head // 16) * 16 + kept


def refuse_slabs(
    problem: Problem, slab: int, lanes: int, threads: int, most_threads: int, *, residual: bool = False
) -> str | None:
    """Why blocks of ``threads`` cannot take slabs of ``slab`` channels in vectors of ``lanes``, or None. ``residual``: whether the
    kernel's epilogue can read an image."""
    if problem.groups < 1 or problem.channels % problem.groups:
        return f"{problem.channels} channels do not form {problem.groups} equal groups"
    if (problem.residual and not residual) or ("bias",) in problem.epilogue:
        return "the stages after a group norm have no operands"
    if lanes not in (1, 2, 4, 8) or slab % lanes or problem.channels % lanes:
        return f"channels are not whole vectors of {lanes}"
    if lanes * problem.itemsize > 16:
        return f"{lanes} channels exceed an access of 16 bytes"
    if slab % problem.group or problem.channels % slab:
        return f"a slab of {slab} channels does not consist of whole groups"
    if not 32 <= threads <= most_threads or threads % 32 or slab // lanes > threads:
        return f"{threads} threads are too few for {slab} channels, or not a valid block"
    return None


def vectors(problem: Problem) -> tuple[int, int]:
    """Channels of the widest possible access, and of the smallest slab: whole groups in whole accesses."""
    lanes = problem.lanes(problem.channels)
    return lanes, math.lcm(problem.group, lanes)


def after_norm(problem: Problem) -> dict[str, int]:
    """Constants of ``after_norm.cuh``."""
    stages = {} if problem.numbers is None else {"CHANNEL_STAGES": 1}
    return {"MODULATED": int(problem.modulated is not None), **stages}


def add_operands(parameters: Parameters, problem: Problem) -> None:
    """Append the operands of stages (``numbers``) and the ``Modulation`` of ``after_norm.cuh``."""
    parameters.pointer(problem.numbers)
    if (by := problem.modulated) is not None:
        parameters.pointer("factor", None if by.shift_pitch is None else "shift")
        parameters.i32(by.factor_pitch, by.shift_pitch or 0).f32(by.plus)


def refuse(
    problem: Problem, config: Config, *, shared: int = BLOCK_SHARED, capability: tuple[int, int] = (9, 0)
) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if reason := refuse_slabs(problem, config.slab, config.lanes, config.threads, 1024, residual=True):
        return reason
    if not 1 <= config.cluster <= min(16, problem.pixels):
        return f"{problem.pixels} pixels for {config.cluster} blocks"
    if config.cluster > 1 and capability < (9, 0):
        return f"GPUs of capability {capability[0]}.{capability[1]} have no clusters"
    if (needed := shared_bytes(problem, config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    if problem.batch > 65535:
        return "the grid is too large"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe. Most sizes are parameters."""
    defines = {
        "LANES": config.lanes,
        "THREADS": config.threads,
        "CLUSTER": config.cluster,
        "HELD": held(problem, config),
    }
    defines |= {"WIDE": int(problem.itemsize == 4), "HAS_RESIDUAL": int(problem.residual)}
    defines |= after_norm(problem)
    defines |= group_sums.defines(config.slab, problem.group, config.lanes, config.threads)
    return norm_recipe("group_norm.cu", arch, defines, problem.dtype, problem.epilogue)


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``input``, ``output``, ``scale`` and ``bias`` (fp32 [channels]), and ``added``, ``residual``,
    ``numbers``, ``factor`` and ``shift`` if the problem has them."""
    added = None if problem.added_pitch is None else "added"
    parameters = Parameters().pointer("input", "output", "scale", "bias", added)
    parameters.i32(problem.pixels, config.slab, problem.group, *problem.pitches, problem.added_pitch or 0)
    parameters.pointer("residual" if problem.residual else None).i32(problem.residual_pitch or problem.channels)
    parameters.i32(problem.channels)
    parameters.f32(1.0 / (problem.pixels * problem.group), problem.epsilon)
    add_operands(parameters, problem)
    grid = (problem.channels // config.slab * config.cluster, problem.batch, 1)
    return parameters.launch(
        recipe(problem, config, gpu.arch), "group_norm", grid, config.threads, shared=shared_bytes(problem, config),
        cluster=config.cluster,
    )  # fmt: skip


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one launch after a convolution, fitted to 300 timings of 16 images on an H100.

    Two constants are not fitted: :data:`L2_RATE` comes from chains of norms, as the rates of the other kernels of group norms do, and
    :data:`WAVE_S` is larger than the fit (1.2 us), which has few images with several waves.
    """
    clusters = problem.channels // config.slab * problem.batch
    by_shared = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    resident = max(1, min(by_shared, 65536 // (REGISTERS * config.threads)))
    if config.cluster == 16:  # second blocks of such clusters gained nothing
        resident = 1
    room = device.clusters_at_once(config.cluster) if device.clusters else device.multiprocessors // config.cluster
    waves = math.ceil(clusters / (room * resident))
    beside = min(resident, -(-clusters // room))  # blocks of a multiprocessor
    vectors = math.ceil(math.ceil(problem.pixels / config.cluster) / _lines(config))  # of each thread
    pieces = WHOLE_PIECE / min(WHOLE_PIECE, config.slab * problem.itemsize)
    block = vectors * config.threads * beside / 128 * VECTOR_S * pieces
    if not held(problem, config):
        block += SHARED_S / waves + math.ceil(vectors / AHEAD) * BATCH_S
    launch = LAUNCH_S + START_S * (config.threads / 512) ** 2 + (waves - 1) * WAVE_S
    launch += CLUSTER_S * (config.cluster > 1) + SIXTEEN_S * (config.cluster == 16)
    return launch + waves * block + problem.bytes * max(1 / L2_RATE, 0.5 / device.bandwidth)


def candidates(problem: Problem, device: GpuFacts, limit: int = 4) -> list[Config]:
    """The configurations to time, best predicted first. Empty when an image does not fit a cluster."""
    found: list[tuple[float, Config]] = []
    lanes, least = vectors(problem)
    for slab in range(least, problem.channels + 1, least):
        for cluster in (1, 2, 4, 8, 16):
            for threads in (128, 256, 512):
                config = Config(slab, cluster, threads, lanes)
                why = refuse(problem, config, shared=device.shared_per_block, capability=device.capability)
                if why is None:
                    found.append((estimate(problem, config, device), config))
    found.sort(key=lambda item: (item[0], item[1]))
    return [config for _, config in found[:limit]]
