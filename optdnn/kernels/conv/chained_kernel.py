"""Plans of two successive 1x1 convolutions in one launch (``chained_sm90.cu``). NHWC, of 16-bit floats or 8-bit integers.

``middle[p, c] = round(first(sum over k of a[c, k] * in[p, k], added[p, c]))`` and
``out[p, o] = second(sum over c of b[o, c] * middle[p, c], added_last[p, o])`` for each pixel ``p``; ``first`` and
``second`` are stages. Examples are the last convolution of a bottleneck with the first one of the next (He et al.,
"Deep Residual Learning", 2016), and a perceptron with one hidden layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from optdnn.kernels.conv.cost_terms import CLOCK, STAGE_ISSUE
from optdnn.kernels.conv.parameters import put_requantize
from optdnn.kernels.launch import BLOCK_SHARED, Launch, Parameters, no_room, template_options, tensor_map
from optdnn.kernels.ranking import joint, varied
from optdnn.ops.requantize import MAX_CONSTANTS, Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import TensorMap

TILE_CHANNELS = 64
"""Channels of a tile: wgmma's M."""
ROW_BYTES = 128
"""Bytes of a row of shared memory, which holds a chunk of channels."""
_HEAD_BYTES = 1024
MOST_OUT_TILES = 4
"""Most tiles of output channels whose accumulators fit a thread's registers."""


@dataclass(frozen=True)
class Pitches:
    """Elements from a pixel to the next of each tensor."""

    image: int
    middle: int
    output: int
    added: int = 0
    added_last: int = 0


@dataclass(frozen=True)
class Integers:
    """Types of 8-bit tensors ("": there is none). ``zeros``: whether a zero point is added to the results of the first
    and of the second product. The rows of weights are permuted as by
    :func:`optdnn.kernels.conv.parameters.pack_weights`, and ``first_bias`` and ``second_bias`` are pairs of scale and
    bias."""

    image: str = "int8"
    middle: str = "int8"
    output: str = "int8"
    added: str = ""
    added_last: str = ""
    zeros: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class Problem:
    """``batch`` images of ``size`` (height, width): from ``depth`` channels to ``middle`` and then ``channels``
    channels. ``stored``: whether the middle result is stored. ``pitches``; None: no gaps between pixels."""

    batch: int
    size: tuple[int, int]
    depth: int
    middle: int
    channels: int
    first: tuple[render.Stage, ...] = (("bias",),)
    second: tuple[render.Stage, ...] = (("bias",),)
    stored: bool = True
    dtype: str = "float16"
    pitches: Pitches | None = None
    integers: Integers | None = None
    """Types of 8-bit integers, in place of ``dtype``; None: floats."""

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return 2 if self.integers is None else 1

    @property
    def chunk(self) -> int:
        """Channels of a row of shared memory."""
        return ROW_BYTES // self.item

    @property
    def pixels(self) -> int:
        """Rows of both products."""
        return self.batch * math.prod(self.size)

    @property
    def chunks(self) -> int:
        """Chunks of the middle channels."""
        return -(-self.middle // self.chunk)

    @property
    def depth_blocks(self) -> int:
        """Rows of shared memory that hold a pixel's channels of the image."""
        return -(-self.depth // self.chunk)

    @property
    def out_tiles(self) -> int:
        """Tiles of the output channels."""
        return -(-self.channels // TILE_CHANNELS)

    @property
    def row_bytes(self) -> int:
        """Least global traffic of a pixel."""
        added = self.middle * render.uses_residual(self.first) + self.channels * render.uses_residual(self.second)
        return self.item * (self.depth + self.middle * self.stored + self.channels + added)

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        return self.pixels * self.row_bytes + self.item * self.middle * (self.depth + self.channels)


@dataclass(frozen=True, order=True)
class Config:
    """``groups`` warpgroups of ``columns`` pixels each. Each warpgroup has ``images`` input tiles and ``buffers``
    buffers of results. The ring of weights has ``stages`` chunks (0: all weights stay in shared memory)."""

    groups: int
    columns: int
    images: int
    buffers: int
    stages: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.groups * 128 + 128

    def __str__(self) -> str:
        return f"chain{self.groups}x{self.columns}i{self.images}b{self.buffers}s{self.stages}"


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: barriers, weights, images, buffers."""
    rows = config.columns * ROW_BYTES
    weights = (config.stages or problem.chunks) * chunk_bytes(problem)
    return _HEAD_BYTES + weights + config.groups * rows * (config.images * problem.depth_blocks + config.buffers)


def chunk_bytes(problem: Problem) -> int:
    """Bytes of the weights of a chunk of middle channels."""
    tiles_of_chunk = problem.chunk // TILE_CHANNELS
    return (tiles_of_chunk * problem.depth_blocks + problem.out_tiles) * TILE_CHANNELS * ROW_BYTES


def tiles(problem: Problem, config: Config) -> int:
    """Tiles of all pixels."""
    return -(-problem.pixels // (config.groups * config.columns))


def no_kernel(problem: Problem) -> str | None:
    """Why the kernel has no form for the problem, or None."""
    if problem.integers is None and problem.dtype not in ("float16", "bfloat16"):
        return f"it is for 16-bit floats, not {problem.dtype}"
    for stages in (problem.first, problem.second):
        if stages[:1] != (("bias",),) or render.SCALE_SHIFT in stages:
            return "its epilogues do not begin with a bias, or have a scale per channel"
    if any(n * problem.item % 16 for n in (problem.depth, problem.middle, problem.channels)):
        return f"its number of channels is not a multiple of {16 // problem.item}"
    if problem.integers is not None and max(map(_constants, (problem.first, problem.second))) > MAX_CONSTANTS:
        return f"a product's stages have more than {MAX_CONSTANTS} constants"
    if problem.out_tiles > MOST_OUT_TILES:
        return f"{problem.channels} channels of the result exceed {MOST_OUT_TILES * TILE_CHANNELS}"
    if problem.pixels < 1:
        return "it is empty"
    return None


def _constants(stages: Sequence[render.Stage]) -> int:
    return len(render.constants_of(stages))


REGISTERS = {1: 255, 2: 232, 3: 160}
"""Multiplying warpgroups of a block -> registers of their threads."""
OTHER_REGISTERS = 40
"""Registers of a thread besides its accumulators."""


def refuse(problem: Problem, config: Config, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if (why := no_kernel(problem)) is not None:
        return why
    if config.groups not in REGISTERS or config.columns % (32 // problem.item) or not 16 <= config.columns <= 256:
        return "not a tile of this kernel"
    if config.buffers < 2 or config.images < 1 or config.stages == 1:
        return "too few buffers: a chunk's buffer is released while the next one is in use"
    sums = (1 + problem.out_tiles) * config.columns // 2
    if sums + OTHER_REGISTERS > REGISTERS[config.groups]:
        return f"{sums} accumulators per thread exceed its registers"
    if (config.stages or problem.chunks) * 4 + config.groups * 2 * (config.images + config.buffers) > _HEAD_BYTES // 8:
        return "more barriers than the kernel has room for"
    if (why := no_room(shared_bytes(problem, config), shared, 1)) is not None:
        return why
    if problem.pixels >= 1 << 31:
        return "more pixels than the kernel can count"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. The numbers of pixels and of middle channels are parameters; with weights that stay in shared
    memory, only that of pixels is."""
    defines = {
        "GROUPS": config.groups, "BN": config.columns, "DEPTH_BLOCKS": problem.depth_blocks,
        "OUT_TILES": problem.out_tiles, "IMAGES": config.images, "BUFFERS": config.buffers,
        "WEIGHT_STAGES": config.stages or problem.chunks, "STATIONARY": int(not config.stages),
        "ADDED": int(render.uses_residual(problem.first)), "ADDED_LAST": int(render.uses_residual(problem.second)),
        "STORED": int(problem.stored), "ITEM": problem.item, "DEPTH_STEPS": -(-problem.depth * problem.item // 32),
    }  # fmt: skip
    types, results = (problem.dtype, problem.dtype), render.epilogue
    if (of := problem.integers) is not None:
        types, results = (of.image, of.middle), partial(render.runtime_epilogue, coarse=True)
        defines |= {"FIRST_ZERO": int(of.zeros[0]), "SECOND_ZERO": int(of.zeros[1])}
        defines |= {"ADDED_UNSIGNED": int(of.added == "uint8"), "ADDED_LAST_UNSIGNED": int(of.added_last == "uint8")}
    parts = [
        render.constants(defines), results(problem.first, name="first_result"), results(problem.second, name="second_result"),
        render.wgmma(config.columns, types[0], name="first_product"), render.wgmma(config.columns, types[1], name="second_product"), "",
    ]  # fmt: skip
    options = template_options(types[0])
    return Recipe("chained_sm90.cu", arch, {"generated.cuh": "\n".join(parts)}, options)


def launch(
    problem: Problem,
    config: Config,
    gpu: GpuFacts,
    numbers: tuple[Requantize, Requantize] = (Requantize(), Requantize()),
) -> Launch:
    """The launch: a grid that fills ``gpu``. Operands: ``input``, ``output``, and if they exist ``middle``, ``added``
    and ``added_last`` (channels-last); ``first`` and ``second`` (matrices: [channels, inputs]), ``first_bias`` and
    ``second_bias`` (fp32, padded to whole chunks). ``numbers``: those of the two epilogues of integers."""
    p, box, of = problem, (problem.chunk, config.columns), problem.integers
    pitches = p.pitches or Pitches(p.depth, p.middle, p.channels, p.middle, p.channels)

    def rows(name: str, channels: int, pitch: int) -> TensorMap[str]:
        dtype = p.dtype if of is None else getattr(of, {"input": "image"}.get(name, name))
        return tensor_map(name, dtype, (channels, p.pixels), (pitch * p.item,), box, ROW_BYTES)

    def matrix(name: str, depth: int, channels: int) -> TensorMap[str]:
        dtype = p.dtype if of is None else "int8"
        return tensor_map(name, dtype, (depth, channels), (depth * p.item,), (p.chunk, TILE_CHANNELS), ROW_BYTES)

    image = rows("input", p.depth, pitches.image)
    added, added_last = render.uses_residual(p.first), render.uses_residual(p.second)
    parameters = Parameters().tensor_map(
        matrix("first", p.depth, p.middle),
        matrix("second", p.middle, p.channels),
        image,
        rows("added", p.middle, pitches.added) if added else image,
        rows("middle", p.middle, pitches.middle) if p.stored else image,
        rows("added_last", p.channels, pitches.added_last) if added_last else image,
        rows("output", p.channels, pitches.output),
    )
    count = tiles(p, config)
    parameters.pointer("first_bias", "second_bias").i32(p.chunks, count)
    if of is not None:
        for stages, own in zip((p.first, p.second), numbers, strict=True):
            put_requantize(parameters, stages, own)
    return parameters.launch(
        recipe(p, config, gpu.arch), "chained_sm90", min(count, gpu.multiprocessors), config.threads, shared=shared_bytes(p, config)
    )  # fmt: skip


SHARED = 118.0  # bytes per cycle of shared memory, read and written
PRODUCT = 0.71  # cycles per column of a product with 16 of K, in a warpgroup that runs alone
FINISH = 26.0  # cycles per result of a thread in the epilogue, which waits for shared memory
FINISH_BYTE = 18.0  # the same for 8-bit integers: fitted to 52 timings of 5 problems, 8 % off on average
GELU = 9.9  # the same for a GELU
CHUNK_WAIT = 77.0  # cycles per chunk in which a warpgroup waits
FIRST = 3500.0  # cycles from the launch to a block's first product, plus those from its last product to the end
TILE = 865.0  # cycles of a tile besides its chunks
MEMORY = 5.8e12  # bytes per second: more than the real rate, because overlapping times are combined by a norm
TOGETHER = 4.0  # exponent of the norm that combines overlapping times
"""Fitted to 580 timings of 14 problems on an H200 (docs/internals/kernels-fused-convolutions.md)."""


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    rows, count = config.groups * config.columns, tiles(problem, config)
    tiles_of_chunk = problem.chunk // TILE_CHANNELS
    first, second = (
        config.columns
        / 2
        * (
            (FINISH if problem.item == 2 else FINISH_BYTE)
            + sum(GELU if s[0] == "gelu" else STAGE_ISSUE.get(str(s[0]), 1.0) for s in stages)
        )
        for stages in (problem.first, problem.second)
    )
    # Cycles of a chunk.
    steps = tiles_of_chunk * -(-problem.depth * problem.item // 32) + 4 * problem.out_tiles
    alone = steps * config.columns * PRODUCT / 2 + tiles_of_chunk * (first + CHUNK_WAIT)
    finished = config.groups * tiles_of_chunk * first
    chunk = joint(TOGETHER, _shared_traffic(problem, config, steps) / SHARED, alone, finished)
    tile = problem.chunks * chunk + problem.out_tiles * (second + CHUNK_WAIT / 2) + TILE
    busy = min(1.0, count / device.multiprocessors)  # few blocks have more bandwidth each
    memory = busy * rows * problem.row_bytes * device.multiprocessors * CLOCK / MEMORY
    turns = count / device.multiprocessors
    turns = turns + 0.4 if turns >= 8 else math.ceil(turns)
    return (FIRST + turns * joint(TOGETHER, tile, memory)) / CLOCK


def _shared_traffic(problem: Problem, config: Config, steps: int) -> int:
    """Bytes of shared memory that a chunk reads and writes: both operands of each product of 64 x columns x 16,
    residuals and results, and the weights that the ring loads."""
    moves = 2 + 2 * render.uses_residual(problem.first) + problem.stored
    of_group = steps * (TILE_CHANNELS + config.columns) * 32 + moves * config.columns * ROW_BYTES
    return config.groups * of_group + chunk_bytes(problem) * (config.stages > 0)


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first; at most two per tile. Empty if the kernel cannot run the problem."""
    if no_kernel(problem) is not None or device.capability[0] != 9:
        return []
    found = [(estimate(problem, c, device), c) for c in _configs(problem, device)]
    return varied(found, lambda c: (c.groups, c.columns), limit)


def _configs(problem: Problem, device: GpuFacts) -> Iterator[Config]:
    for groups, columns in product((2, 3, 1), (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)):
        tile = Config(groups, columns, 1, 2)
        if columns % (32 // problem.item):
            continue
        if columns > 16 and groups * (columns - 16) >= problem.pixels:
            continue
        fitting = [
            c
            for stages, images, buffers in product((0, 4, 3, 2), (2, 1), (4, 3, 2))
            if refuse(
                problem,
                c := replace(tile, images=images, buffers=buffers, stages=stages),
                shared=device.shared_per_block,
            )
            is None
        ]
        # All weights in shared memory come first, then deeper buffers, which let residuals arrive early.
        yield from sorted(fitting, key=lambda c: (c.stages > 0, -min(c.buffers, 3), -c.images, -c.stages))[:2]
