"""Plans of two successive products of one vector per image (``gemv_pair.cu``): 16-bit operands, on Hopper."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.launch import BLOCK_SHARED, Launch, Parameters, no_room, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

WARPS = (8, 16)
"""Warps of a block."""
CLUSTERS = (2, 4, 8, 16)
"""Blocks that share the hidden vector."""
BLOCKS = (1, 2, 4, 8, 16)
"""Blocks that each compute the whole hidden vector."""
IMAGES = (1, 8)
"""Images of a block."""
CHUNK = 32
"""Elements of K that a lane group of four multiplies at a time."""
MOST_CHUNKS = {8: 24, 16: 10}
"""Most chunks of weights of a warp, by the number of warps of a block. Each takes eight registers per thread; with more, some spill."""
FEW_CHUNKS = 4
"""Chunks that a warp takes before a second one helps."""
MOST_LINES = 32
"""Most threads that add up the sums of a channel."""
MOST_AHEAD = 4
"""Most loads that a thread has in flight while it adds up sums of tiles. With eight, it took no less time."""
LAUNCH_S, SIXTEEN_S, MEET_S = 1.0e-6, 0.25e-6, 0.07e-6
"""Seconds of a launch that depends on another one; what sixteen warps and sums of several warps add."""
CLUSTER_S, MEANS_S, CLUSTERS_S = 0.26e-6, 0.07e-6, 0.08e-6
"""Seconds that a cluster adds, that shared means add, and that several clusters of sixteen blocks add."""
CHUNK_S, TILE_S, COLUMNS_S = 0.055e-6, 0.17e-6, 0.51e-6
"""Seconds of a chunk of the second product, of a warp's further tiles, and of several images per block."""
POOL_S, BATCH_S = 0.59e-6, 0.55e-6
"""Seconds of the sums over tiles, and of each batch of loads after the first."""
VECTOR_S, SUM_S, WEIGHT_S = 7.8e-12, 4.1e-12, 3.5e-12
"""Seconds per byte that a block reads: of vectors, of sums, and of weights."""
FULL_S, WAVE_S = 0.9e-6, 0.73e-6
"""Seconds that as many blocks as multiprocessors add, and that each further wave adds."""


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
    out: str = ""
    """Type of the result: "float32", or that of the operands ("")."""


@dataclass(frozen=True, order=True)
class Config:
    """``blocks`` blocks take ``images`` images. ``cluster``: they share the hidden vector and the means; otherwise each block
    computes all of them."""

    blocks: int
    cluster: bool = False
    images: int = 1
    warps: int = 16

    def __str__(self) -> str:
        return f"pair{self.blocks}{'c' * self.cluster}i{self.images}w{self.warps}"


@dataclass(frozen=True)
class Part:
    """How the warps of a block divide a matrix: ``parts`` warps share the K of a tile of 16 rows; a warp has up to ``tiles`` tiles,
    and of each up to ``chunks`` chunks of K."""

    parts: int
    tiles: int
    chunks: int


def divided(rows: int, depth: int, warps: int) -> Part:
    """How ``warps`` warps divide a matrix of ``rows`` rows."""
    tiles, chunks = -(-rows // 16), -(-depth // CHUNK)
    each = -(-chunks // min(-(-chunks // FEW_CHUNKS), max(1, warps // tiles)))
    return Part(-(-chunks // each), -(-tiles // warps), each)


def shares(problem: Problem, config: Config) -> tuple[int, int]:
    """Elements of the hidden vector, and of the result, per block: multiples of 16."""
    return _share(problem.hidden, config.blocks if config.cluster else 1), _share(problem.channels, config.blocks)


def _share(elements: int, blocks: int) -> int:
    return -(-elements // 16 // blocks) * 16


def parts(problem: Problem, config: Config) -> tuple[Part, Part]:
    """How the warps of a block divide both matrices."""
    rows, columns = shares(problem, config)
    return divided(rows, problem.depth, config.warps), divided(columns, problem.hidden, config.warps)


def own(problem: Problem, config: Config) -> int:
    """Channels whose means a block computes: a multiple of 8."""
    return -(-problem.depth // 8 // (config.blocks if config.cluster else 1)) * 8


def pooling(problem: Problem, config: Config) -> tuple[int, int, int]:
    """How a block adds up sums of tiles: threads per channel, loads that each has in flight, and vectors of eight channels per thread."""
    vectors = own(problem, config) // 8 * config.images
    lines = min(max(1, 32 * config.warps // vectors), MOST_LINES, max(1, problem.tiles))
    ahead = min(MOST_AHEAD, -(-problem.tiles // lines))
    return lines, ahead, -(-vectors // (32 * config.warps))


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: a barrier, the vectors of its images, biases, and sums of warps."""
    (rows, columns), (first, second) = shares(problem, config), parts(problem, config)
    vectors = sum((-(-n // CHUNK) | 1) * CHUNK for n in (problem.depth, problem.hidden))
    sums = [config.images * first.parts * rows, config.images * second.parts * columns]
    if problem.tiles:
        sums.append(8 * 32 * config.warps)
    return 16 + 2 * config.images * vectors + 4 * (rows + columns) + 4 * max(sums)


def refuse(
    problem: Problem, config: Config, *, shared: int = BLOCK_SHARED, capability: tuple[int, int] = (9, 0)
) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if capability < (9, 0):
        return f"GPUs of capability {capability[0]}.{capability[1]} have no clusters"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"the kernel takes 16-bit floats, not {problem.dtype}"
    if problem.out not in ("", problem.dtype, "float32"):
        return f"the kernel does not store {problem.out}"
    if problem.depth % 8:
        return f"vectors of {problem.depth} elements are no multiples of 8"
    if any(render.uses_residual(stages) for stages in (problem.between, problem.epilogue)):
        return "nothing is added to its results"
    if config.blocks not in (CLUSTERS if config.cluster else BLOCKS):
        return f"{config.blocks} blocks are no configuration of this kernel"
    first, second = parts(problem, config)
    if first.tiles > 1:
        return f"{shares(problem, config)[0]} elements of the hidden vector are too many for the warps of a block"
    if (chunks := first.chunks + second.tiles * second.chunks) > MOST_CHUNKS[config.warps]:
        return f"{chunks} chunks of weights are too many for the registers of a warp"
    return no_room(shared_bytes(problem, config), shared, 1)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile."""
    (first, second), (lines, ahead, _) = parts(problem, config), pooling(problem, config)
    rows, columns = shares(problem, config)
    sizes = {
        "WARPS": config.warps, "DEPTH": problem.depth, "HIDDEN": problem.hidden, "CHANNELS": problem.channels, "ROWS": rows, "COLUMNS": columns,
        "IMAGES": config.images, "FLOAT_RESULT": int(problem.out == "float32"), "CLUSTER": config.blocks if config.cluster else 1, "POOL": int(problem.tiles > 0),
        "OWN": own(problem, config), "LINES": lines, "AHEAD": max(1, ahead),
        "FIRST_PARTS": first.parts, "FIRST_CHUNKS": first.chunks,
        "SECOND_PARTS": second.parts, "SECOND_TILES": second.tiles, "SECOND_CHUNKS": second.chunks,
    }  # fmt: skip
    stages = [render.epilogue(problem.between, "between_one"), render.epilogue(problem.epilogue)]
    text = "\n".join([render.constants(sizes), *stages, render.mma(problem.dtype), ""])
    return Recipe("gemv_pair.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts, x_pitch: int, out_pitch: int) -> Launch:
    """The launch. Operands: ``x``, ``first`` (``[hidden, depth]``) and ``second`` (``[channels, hidden, padded to a multiple of 8]``),
    ``first_bias`` and ``second_bias`` (fp32), ``output``. Pitches are elements from an image's vector to the next; with tiles,
    ``x_pitch`` is from a tile's sums to the next."""
    parameters = Parameters().pointer("x", "first", "first_bias", "second", "second_bias", "output")
    parameters.i32(problem.images, config.blocks, x_pitch, out_pitch, problem.tiles).f32(1.0 / max(1, problem.pixels))
    return parameters.launch(
        recipe(problem, config, gpu.arch), "gemv_pair", config.blocks * -(-problem.images // config.images), config.warps * 32,
        shared=shared_bytes(problem, config), cluster=config.blocks if config.cluster else 1,
    )  # fmt: skip


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of one dependent launch, from 858 timings of 30 pairs of matrices in chains on an H200,
    within 10 % on average. First choices are 3 % behind the best."""
    (first, second), (rows, columns) = parts(problem, config), shares(problem, config)
    groups = -(-problem.images // config.images)
    at_once = gpu.clusters_at_once(config.blocks) if config.cluster else gpu.multiprocessors // config.blocks
    waves = math.ceil(groups / max(1, at_once))
    seconds = LAUNCH_S + CHUNK_S * second.chunks + TILE_S * (second.tiles - 1)
    seconds += WEIGHT_S * 2 * (rows * problem.depth + columns * problem.hidden)
    seconds += FULL_S * groups * config.blocks / gpu.multiprocessors + WAVE_S * (waves - 1)
    if problem.tiles:
        lines, ahead, rounds = pooling(problem, config)
        seconds += POOL_S + BATCH_S * (math.ceil(problem.tiles / lines / ahead) * rounds - 1)
        seconds += SUM_S * 4 * config.images * problem.tiles * own(problem, config)
    else:
        seconds += VECTOR_S * 2 * config.images * problem.depth
    added = (
        (SIXTEEN_S, config.warps == 16), (MEET_S, config.cluster or first.parts > 1), (CLUSTER_S, config.cluster),
        (MEANS_S, config.cluster and problem.tiles), (CLUSTERS_S, config.cluster and config.blocks == 16 and groups > 1),
        (COLUMNS_S, config.images > 1),
    )  # fmt: skip
    return seconds + sum(s for s, applies in added if applies)


def candidates(problem: Problem, gpu: GpuFacts) -> list[Config]:
    """The configurations to time, the best predicted first."""
    images = [n for n in IMAGES if n == 1 or problem.images > 1]
    found = [
        Config(b, cluster, n, w)
        for w in WARPS
        for n in images
        for cluster, of in ((False, BLOCKS), (True, CLUSTERS))
        for b in of
    ]
    fitting = [c for c in found if refuse(problem, c, shared=gpu.shared_per_block, capability=gpu.capability) is None]
    return sorted(fitting, key=lambda c: (estimate(problem, c, gpu), c))
