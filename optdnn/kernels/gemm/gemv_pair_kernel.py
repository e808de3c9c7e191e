"""Plans of two successive products of one vector per image (``gemv_pair.cu``): 16-bit operands, on Hopper."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.launch import BLOCK_SHARED, Launch, Parameters, no_room, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

WARPS, POOLING_WARPS = 8, 16
"""Warps of a block that reads vectors, and of one that adds up the sums of tiles."""
CLUSTERS = (1, 2, 4, 8, 16)
"""Blocks that share an image."""
MOST_SHARE = 8
"""Most threads that share a sum of the second product; each takes eight elements at a time. A warp shares a sum of the
first product."""
LAUNCH_S, MEET_S, SIXTEEN_S = 1.9e-6, 0.2e-6, 0.3e-6
"""Seconds of a launch that depends on another one; seconds that a cluster adds, and further ones with sixteen blocks."""
PASS_S = 0.12e-6
"""Seconds of a pass, in which each thread of a block makes its share of one sum."""
AHEAD = 8
"""Loads that a thread has in flight while it adds up sums of tiles."""
POOL_S, BATCH_S = 1.0e-6, 0.7e-6
"""Seconds of the sums over tiles, and of each batch of loads after the first."""
WAVE_S = 1.2e-6
"""Seconds that each further wave of clusters adds to its work."""


@dataclass(frozen=True)
class Problem:
    """Two products of each of ``images`` vectors: from ``depth`` elements to ``hidden`` ones, with stages ``between``,
    and from these to ``channels`` ones, with stages ``epilogue``."""

    images: int
    depth: int
    hidden: int
    channels: int
    between: tuple[render.Stage, ...] = (("bias",),)
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    pixels: int = 0
    """Pixels of an image: the vectors are the means over them."""
    tiles: int = 0
    """Tiles of an image, with the fp32 sums that the launch reads; 0: it reads vectors."""


@dataclass(frozen=True, order=True)
class Config:
    """``cluster`` blocks share an image."""

    cluster: int

    def __str__(self) -> str:
        return f"pair{self.cluster}"


def shares(problem: Problem, config: Config) -> tuple[int, int]:
    """Elements of the hidden vector, and of the result, per block."""
    return -(-problem.hidden // config.cluster), -(-problem.channels // config.cluster)


def part(problem: Problem) -> int:
    """Threads that share a sum of the second product: a power of two."""
    return min(MOST_SHARE, 1 << (-(-problem.hidden // 8) - 1).bit_length())


def warps(problem: Problem) -> int:
    """Warps of a block."""
    return POOLING_WARPS if problem.tiles else WARPS


def pooled(problem: Problem, config: Config) -> int:
    """Channels whose means a block computes."""
    return -(-problem.depth // config.cluster // 8) * 8 if problem.tiles else 0


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: two barriers, the hidden vector, the image's vector, both shares of weights, their biases."""
    rows, columns = shares(problem, config)
    vectors = 4 * problem.hidden + 2 * problem.depth
    sums = 4 * 8 * 32 * warps(problem) + 16 if problem.tiles else 0
    return 16 + vectors + 2 * (rows * problem.depth + columns * problem.hidden) + 4 * (rows + columns) + sums


def refuse(
    problem: Problem, config: Config, *, shared: int = BLOCK_SHARED, capability: tuple[int, int] = (9, 0)
) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if capability < (9, 0):
        return f"GPUs of capability {capability[0]}.{capability[1]} have no clusters"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"the kernel takes 16-bit floats, not {problem.dtype}"
    if problem.depth % 8 or problem.hidden % 8:
        return f"vectors of {problem.depth} and {problem.hidden} elements are not multiples of 8"
    if any(render.uses_residual(stages) for stages in (problem.between, problem.epilogue)):
        return "nothing is added to its results"
    if config.cluster not in CLUSTERS:
        return f"{config.cluster} blocks are no cluster of this kernel"
    if (share := pooled(problem, config)) > 32 * warps(problem):
        return f"{share} channels are too many for the threads of a block"
    return no_room(shared_bytes(problem, config), shared, 1)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes are parameters."""
    sizes = {"CLUSTER": config.cluster, "WARPS": warps(problem), "PART": part(problem), "POOL": int(problem.tiles > 0)}
    defines = render.constants(sizes)
    stages = [render.epilogue(problem.between, "between_one"), render.epilogue(problem.epilogue)]
    text = "\n".join([defines, *stages, ""])
    return Recipe("gemv_pair.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int) -> Launch:
    """The launch. Operands: ``x``, ``first`` (``[hidden, depth]``) and ``second`` (``[channels, hidden]``), ``first_bias`` and
    ``second_bias`` (fp32), ``output``. Pitches are elements from an image's vector to the next; with tiles, ``x_pitch`` is from a
    tile's sums to the next."""
    parameters = Parameters().pointer("x", "first", "first_bias", "second", "second_bias", "output")
    parameters.i32(problem.depth, problem.hidden, problem.channels, *shares(problem, config), x_pitch, out_pitch)
    parameters.i32(problem.tiles, pooled(problem, config)).f32(1.0 / max(1, problem.pixels))
    return parameters.launch(
        recipe(problem, config, gpu.arch), "gemv_pair", config.cluster * problem.images, warps(problem) * 32,
        shared=shared_bytes(problem, config), cluster=config.cluster,
    )  # fmt: skip


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, from 40 launches of SE-ResNet-50, TResNet-M and ResNeSt-26 on an H200."""
    rows, columns = shares(problem, config)
    waves = math.ceil(problem.images / max(1, gpu.clusters_at_once(config.cluster)))
    together = (MEET_S if config.cluster > 1 else 0.0) + (SIXTEEN_S if config.cluster == 16 else 0.0)
    threads = 32 * warps(problem)
    passes = -(-rows // warps(problem)) + -(-columns // (threads // part(problem)))
    steps = -(-problem.depth // 512) - 1 + -(-problem.hidden // (8 * part(problem))) - 1
    block = PASS_S * (passes + 0.25 * steps)
    if problem.tiles:
        loads = problem.tiles * pooled(problem, config) / 8 / threads
        block += POOL_S + BATCH_S * (math.ceil(loads / AHEAD) - 1) + together
    return LAUNCH_S + together + block + (waves - 1) * (WAVE_S + block)


def candidates(problem: Problem, gpu: GpuFacts) -> list[Config]:
    """The configurations to time, the best predicted first."""
    found = [Config(cluster) for cluster in CLUSTERS]
    fitting = [c for c in found if refuse(problem, c, shared=gpu.shared_per_block, capability=gpu.capability) is None]
    return sorted(fitting, key=lambda c: (estimate(problem, c, gpu), c))
