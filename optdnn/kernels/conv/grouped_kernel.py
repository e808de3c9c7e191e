"""Plans of convolutions with narrow groups, or of few channels (``grouped_sm90.cu``): 16-bit images, on Hopper.

``out[n, y, x, g, o] = epilogue(sum over taps and i of in[n, y*sh - ph + r*dh, x*sw - pw + s*dw, g, i] * w[g, o, i, r, s])``: a band
``g`` has as many input as output channels, a multiple of eight. A single band may have other numbers of them. Optionally also the mean
over all pixels of each image and channel.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from optdnn.kernels.conv.cost_terms import sector_bytes, stages_issue
from optdnn.kernels.conv.depthwise_cost import FINISH
from optdnn.kernels.conv.problem import OneSource, Source
from optdnn.kernels.conv.tile_walk import CLOCK, EXPOSED, L2, LAUNCH, MEMORY, Walk
from optdnn.kernels.launch import BLOCK_SHARED, Launch, template_options
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array


@dataclass(frozen=True)
class Costs:
    """Constants of the cost model. ``shared``, ``product`` and ``load``: factors on cycles of shared memory, and of TMA's loads; cycles of
    the tensor cores for a product. ``overlap``: exponent of the norm that combines cycles of different units, or of resident blocks and of
    a warp's chain. ``tile``: cycles of a tile in which its block waits; ``chain``: cycles of a warp's load, product, and instruction after
    the products. ``start`` and ``filter``: cycles of a block before its first tile, and for a lane's load of its filters. ``launch``:
    seconds. ``part``: the share of a partly read sector's other bytes that counts as loads; ``l2``: a factor on L2's time."""

    shared: float
    product: float
    load: float
    overlap: float
    tile: float
    chain: tuple[float, float, float]
    start: float
    filter: float
    launch: float
    part: float
    l2: float


FEW_CHANNELS = Costs(0.86, 0.35, 0.16, 1.6, 980.0, (5.0, 3.0, 0.25), 798.0, 3.99, LAUNCH, 0.0, 1.0)
"""Fitted to 288 timings of 36 convolutions of few channels on an H200, within 8 % on average."""
GROUPS = Costs(0.86, 0.46, 0.12, 1.6, 760.0, (3.8, 6.5, 0.18), 712.0, 3.8, 0.72e-6, 0.6, 1.1)
"""Fitted to 612 timings of 34 convolutions with groups on an H200, within 8 % on average. The first choices are 5 % behind the best."""


@dataclass(frozen=True)
class Problem(OneSource):
    """``batch`` images of ``source`` (whose ``channels`` are also the output's) in ``bands`` equal groups of channels. ``squeeze``: also
    write the channel means. ``pitches``: elements from a pixel to the next of the input, of the result and of the residual; 0: their
    channels. ``results``: the output's channels if there is one band; 0 otherwise. ``summed``: the gate's launch adds up the sums of
    tiles."""

    batch: int
    source: Source
    bands: int
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    squeeze: bool = False
    pitches: tuple[int, int, int] = (0, 0, 0)
    results: int = 0
    summed: bool = False

    @property
    def chunks(self) -> int:
        """Chunks of eight input channels in a band."""
        return -(-self.source.channels // self.bands // 8)

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        s, out = self.source, self.results or self.source.channels
        read = self.batch * s.height * s.width * s.channels
        written = self.batch * math.prod(self.out_size) * out * (2 if self.residual else 1)
        return 2 * (read + written + out * 8 * self.chunks * math.prod(s.kernel))


@dataclass(frozen=True, order=True)
class Config:
    """A warp computes ``strips`` strips of 16 pixels (``strip_w`` wide), one below the other, of ``results`` times
    eight channels. A block has ``grid_x`` x ``grid_y`` such tiles of ``chunks`` times eight channels. ``stages``:
    patches in flight; ``blocks``: per multiprocessor."""

    strips: int
    strip_w: int
    results: int
    grid_x: int
    grid_y: int
    chunks: int
    stages: int
    blocks: int = 1

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.chunks // self.results * self.grid_x * self.grid_y

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block's results."""
        return self.grid_y * self.strips * 16 // self.strip_w, self.grid_x * self.strip_w

    def __str__(self) -> str:
        warp, grid = f"{self.strips}x{self.strip_w}m{self.results}", f"{self.grid_x}x{self.grid_y}"
        return f"grp{warp}g{grid}c{self.chunks}r{self.stages}b{self.blocks}"


def walk(problem: Problem, config: Config) -> Walk:
    """How blocks walk over tiles."""
    parts = config.grid_x * config.grid_y
    return Walk(
        1, *config.tile, config.chunks, config.warps, parts, config.stages, ways=2, results=problem.results,
        residual=problem.residual,
    )  # fmt: skip


def pairs(problem: Problem) -> int:
    """K steps of a filter row."""
    return -(-problem.source.kernel[1] * problem.chunks // 2)


def registers(problem: Problem, config: Config) -> int:
    """Estimated registers of a thread: accumulators, filters, addresses, and a residual with its addresses."""
    filters = problem.source.kernel[0] * pairs(problem) * config.results * 2
    added = config.strips * (2 * config.results + 8) if problem.residual else 0
    return config.strips * config.results * 4 + filters + pairs(problem) + 4 * config.results + 36 + added


def refuse(
    problem: Problem, config: Config, *, shared: int = BLOCK_SHARED, capability: tuple[int, int] = (9, 0)
) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    s = problem.source
    if capability < (9, 0):
        return f"it loads by TMA, which GPUs of capability {capability[0]}.{capability[1]} do not have"
    if problem.dtype not in ("float16", "bfloat16"):
        return "it is for 16-bit images"
    dense = problem.results > 0
    if dense != (problem.bands == 1) or (not dense and s.channels % (8 * problem.bands)):
        return "the channels of its groups are not multiples of 8"
    shared_by = config.chunks if dense else problem.chunks
    if config.strip_w not in (4, 8, 16) or not 1 <= config.strips <= 8 or shared_by % config.results:
        return "not a tile of a warp"
    if not dense and config.chunks % problem.chunks:
        return f"{config.chunks} chunks of channels are not bands of {problem.chunks}"
    limit = min(255, 512 // -(-config.warps * config.blocks // 4) // 8 * 8) if config.warps else 0
    if (needed := registers(problem, config)) > limit:
        return f"about {needed} registers per thread exceed {limit}"
    return walk(problem, config).refuse(s, problem.batch, problem.squeeze, config.blocks, shared)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes of tensors are parameters."""
    s = problem.source
    defines = walk(problem, config).defines(s, problem.squeeze) | {
        "BAND": problem.chunks, "BLOCKS": config.results, "STRIP_W": config.strip_w, "STRIPS": config.strips,
        "GRID_X": config.grid_x, "GRID_Y": config.grid_y, "DILATION_H": s.dilation[0], "DILATION_W": s.dilation[1],
        "MIN_BLOCKS": config.blocks,
    }  # fmt: skip
    stages = (render.constants(defines), render.paired_epilogue(problem.epilogue), render.mma(problem.dtype))
    options = template_options(problem.dtype)
    return Recipe("grouped_sm90.cu", arch, {"generated.cuh": "\n".join([*stages, ""])}, options)


def pack_weights(weight: Array) -> Array:
    """OIHW (I: input channels of one band) -> ``[O, H, W * I]``, O and I padded to multiples of eight, and then the rows to a multiple
    of 16. Keeps the dtype."""
    (out, inside), (taps_h, taps_w) = (-(-n // 8) * 8 for n in weight.shape[:2]), weight.shape[2:]
    packed = np.zeros((out, taps_h, -(-taps_w * inside // 16) * 16), weight.dtype)
    taps = packed[..., : taps_w * inside].reshape(out, taps_h, taps_w, inside)
    taps[: weight.shape[0], :, :, : weight.shape[1]] = weight.transpose(0, 2, 3, 1)
    packed[..., : taps_w * inside] = taps.reshape(out, taps_h, taps_w * inside)
    return packed


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch: a grid that fills ``gpu``. Operands: ``input``, ``output``, ``weights`` (:func:`pack_weights`), ``bias`` (fp32
    [channels, padded to a multiple of eight]), ``residual`` if there is one, and for a squeeze ``sums`` (fp32 [batch, tiles, channels]) or
    ``means`` ([batch, channels])."""
    made, s = walk(problem, config), problem.source
    parameters = made.parameters(s, problem.batch, problem.dtype, problem.squeeze, problem.pitches)
    return parameters.launch(
        recipe(problem, config, gpu.arch), "grouped_sm90", made.grid(s, problem.batch, gpu, config.blocks), config.warps * 32,
        shared=made.shared_bytes(s, problem.squeeze),
    )  # fmt: skip


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch.

    Shared memory, issue slots and tensor cores overlap in part, and so do the tiles of a multiprocessor's blocks. A lane loads its
    filters four bytes at a time, so the warps of a multiprocessor wait for one another. Slabs of channels that are parts of L2's sectors
    are read and written as whole sectors."""
    s, height, made = problem.source, 16 // config.strip_w, walk(problem, config)
    costs = FEW_CHANNELS if problem.results else GROUPS
    offsets = {m * height * s.stride[0] + r * s.dilation[0] for m in range(config.strips) for r in range(s.kernel[0])}
    loads, products = len(offsets) * pairs(problem), config.strips * s.kernel[0] * pairs(problem) * config.results
    # Pixels at stride two use half of the banks. Rows of fewer than eight pixels share banks.
    conflicts = 2 if s.stride[1] % 2 == 0 or config.strip_w == 4 else made.conflicts(s)
    finish = 4 + 4 * len(problem.epilogue) + stages_issue(problem.epilogue) + (2 if problem.squeeze else 0)
    results = config.strips * config.results * 4
    issued = loads * 6 + products + results * finish + (60 * config.results if problem.squeeze else 0)
    grid, count = made.grid(s, problem.batch, device, config.blocks), made.count(s, problem.batch)
    per_block, together = -(-count // max(1, grid // made.tiles(s)[0])), -(-grid // device.multiprocessors)
    moved, load = made.patch_bytes(s) + made.result_bytes() * (1 + problem.residual), made.load_cycles(s)
    shared = (loads * 4 * conflicts + results / 2) * config.warps + moved / 128
    size, pitch = config.chunks * 16, 2 * (problem.pitches[0] or s.channels)
    whole = 1.0 if problem.results else sector_bytes(size, pitch) / size
    units = (costs.shared * shared, issued * config.warps / 4, costs.product * products * config.warps)
    parts = (*units, costs.load * load * (1 + costs.part * (whole - 1)))
    busy = math.pow(sum(part**costs.overlap for part in parts), 1 / costs.overlap)
    alone = costs.tile + sum(n * one for n, one in zip((loads, products, results * finish), costs.chain, strict=True))
    tile = math.pow((busy * together) ** costs.overlap + alone**costs.overlap, 1 / costs.overlap)
    filters = s.kernel[0] * pairs(problem) * config.results * 2
    start = costs.start + costs.filter * filters * config.warps * together + EXPOSED * load
    memory = max(made.tiles(s)[0] * count * moved * whole * costs.l2 / L2, problem.bytes / MEMORY / 0.85)
    seconds = costs.launch + math.sqrt(math.hypot(((per_block * tile + start) / CLOCK) ** 2, memory**2))
    return seconds + (FINISH if made.squeeze_mode(s, problem.squeeze) == 1 and not problem.summed else 0.0)


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first; at most two per warp tile."""

    def refuses(config: Config) -> bool:
        why = refuse(problem, config, shared=device.shared_per_block, capability=device.capability)
        return why is not None

    out_h, out_w = problem.out_size
    found: list[tuple[float, Config]] = []
    most = -(-(problem.results or problem.source.channels) // 8)
    unit = 1 if problem.results else max(problem.chunks, 1)
    slabs = [n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15) if n % unit == 0 and n <= most]
    for strips, strip_w, results, chunks in itertools.product((1, 2, 4, 7, 8), (4, 8, 16), (1, 2, 3, 4), slabs):
        if refuses(Config(strips, strip_w, results, 1, 1, chunks, 2)):
            continue  # larger blocks take more of everything
        wide, high = -(-out_w // strip_w), -(-out_h // (strips * 16 // strip_w))
        grids = {(x, y) for x in {1, 2, 4, min(wide, 7)} for y in (1, 2, 4, 8) if x <= wide and y <= high}
        for grid_x, grid_y in grids:
            least = Config(strips, strip_w, results, grid_x, grid_y, chunks, 2)
            if refuses(least):
                continue  # so do more stages, or more blocks
            found.append((estimate(problem, least, device), least))
            for stages, blocks in ((2, 2), (3, 1), (2, 3), (2, 4)):
                config = Config(strips, strip_w, results, grid_x, grid_y, chunks, stages, blocks)
                if not refuses(config):
                    found.append((estimate(problem, config, device), config))
    return varied(found, lambda c: (c.strips, c.strip_w, c.results, c.chunks), limit)
