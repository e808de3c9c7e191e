"""Plans of the depthwise convolution on tensor cores (``depthwise_bands_sm90.cu``): 16-bit images, stride 1, on Hopper.

Problems and operands are as of :mod:`optdnn.kernels.conv.depthwise_kernel`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv.depthwise_cost import finish_seconds
from optdnn.kernels.conv.depthwise_problem import FEW_TAPS, Problem
from optdnn.kernels.conv.tile_walk import Walk
from optdnn.kernels.launch import BLOCK_SHARED, Launch
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.ranking import varied
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

SLOWER_VOLUMES = 1.25
"""Factor of the time of volumes: each warp loads the filter of each frame (60 timings on an H100)."""
STEP = 16
"""Pixels of a K step. Eight neighboring windows must fit into it."""


@dataclass(frozen=True, order=True)
class Config:
    """A warp computes ``groups`` times ``rows`` rows x ``across`` times eight columns of ``images`` images, of eight
    channels. A block has ``grid_x`` x ``grid_y`` such tiles of ``chunks`` times eight channels. ``stages``: patches in
    flight; ``blocks``: per multiprocessor."""

    rows: int
    groups: int
    across: int
    images: int
    grid_x: int
    grid_y: int
    chunks: int
    stages: int
    blocks: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.chunks * self.grid_x * self.grid_y * 32

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block's results."""
        return self.grid_y * self.groups * self.rows, self.grid_x * self.across * 8

    def __str__(self) -> str:
        warp, grid = f"{self.rows}x{self.groups}x{self.across}", f"{self.grid_x}x{self.grid_y}"
        return f"dwb{warp}n{self.images}g{grid}c{self.chunks}r{self.stages}b{self.blocks}"


def walk(problem: Problem, config: Config) -> Walk:
    """How blocks walk over tiles. A patch is wide enough that the rows that a quarter of a warp reads begin four pixels
    apart, modulo eight. So no two of its lanes read the same banks."""
    (height, width), columns = config.tile, config.tile[1] + problem.source.kernel[1] - 1
    while config.rows * columns % 8 != 4 and config.rows < 8:
        columns += 1
    parts = config.grid_x * config.grid_y
    return Walk(config.images, height, width, config.chunks, config.chunks * parts, parts, config.stages, columns)


def tiles(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Slabs of channels, and tiles along columns and rows."""
    return walk(problem, config).tiles(problem.source)


def squeeze_mode(problem: Problem, config: Config) -> int:
    """See :func:`optdnn.kernels.conv.depthwise_kernel.squeeze_mode`."""
    return walk(problem, config).squeeze_mode(problem.source, problem.squeeze)


def registers(problem: Problem, config: Config) -> int:
    """Estimated registers of a thread: accumulators, the filter's matrices, a row's pixels, addresses."""
    return config.rows * 32 + problem.source.kernel[0] * 16 + 8 * -(-(problem.source.kernel[1] + 7) // 4) + 38


def refuse(
    problem: Problem, config: Config, *, shared: int = BLOCK_SHARED, capability: tuple[int, int] = (9, 0)
) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    s = problem.source
    if capability < (9, 0):
        return f"it loads by TMA, which GPUs of capability {capability[0]}.{capability[1]} do not have"
    if problem.item != 2 or problem.out_dtype != problem.dtype or problem.residual or problem.beside is not None:
        return "it is for 16-bit images in and out, with nothing added"
    if problem.grown or problem.band:
        return "it is transposed, or its filter is too large"
    if any(problem.gaps):
        return "its volumes do not follow one another in memory"
    if render.reads_channels(problem.epilogue):
        return "its stages have per-channel operands"
    if problem.unit < 8:
        return "TMA reads pixels that begin at multiples of 16 bytes"
    if s.stride != (1, 1) or s.dilation != (1, 1) or s.kernel[1] > STEP - 7:
        return f"its windows have a stride, holes, or more than {STEP - 7} columns"
    if config.groups * config.across * config.images != 16 or config.groups < 2 or config.rows not in (1, 2, 4):
        return "not a tile of a warp"
    limit = min(255, 512 // -(-(config.threads // 32) * config.blocks // 4) // 8 * 8)
    if (needed := registers(problem, config)) > limit:
        return f"about {needed} registers per thread exceed {limit}"
    return walk(problem, config).refuse(s, problem.batch, problem.squeeze, config.blocks, shared)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes of tensors are parameters."""
    defines = walk(problem, config).defines(problem.source, problem.squeeze)
    defines |= {"ROWS": config.rows, "GROUPS": config.groups, "BLOCKS": config.across, "GRID_X": config.grid_x}
    defines |= {"GRID_Y": config.grid_y, "MIN_BLOCKS": config.blocks}
    text = "\n".join([depthwise.generated(problem, defines), render.mma(problem.dtype), ""])
    return Recipe("depthwise_bands_sm90.cu", arch, {"generated.cuh": text}, depthwise.options(problem))


def launch(
    problem: Problem,
    config: Config,
    gpu: GpuFacts,
    requantize: Requantize | None = None,
    mean: QuantizedStore | None = None,
) -> Launch:
    """The launch: a grid that fills ``gpu``. Operands as of :func:`optdnn.kernels.conv.depthwise_kernel.launch`."""
    made = walk(problem, config)
    parameters = made.parameters(
        problem.source, problem.batch, problem.dtype, problem.squeeze, problem.pitches, problem.images_apart[:2]
    )
    return parameters.launch(
        recipe(problem, config, gpu.arch), "depthwise_bands_sm90", made.grid(problem.source, problem.batch, gpu, config.blocks),
        config.threads, shared=made.shared_bytes(problem.source, problem.squeeze),
    )  # fmt: skip


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    kernel_h, loads = problem.source.kernel[0], -(-(problem.source.kernel[1] + 7) // 4)
    frames = problem.frames
    rows, products = (config.rows + kernel_h - 1) * frames, config.rows * kernel_h * 8 * frames
    read, results = rows * 2 * loads, config.rows * 4
    finish = 6 + 4 * len(problem.epilogue) + (2 if problem.squeeze else 0)
    issued = read * 5 + rows * 32 + products + results * (8 * finish + 10) + (100 if problem.squeeze else 0)
    issued += frames * kernel_h * 24 if problem.source.depth is not None else 0  # the filter of each frame
    seconds = walk(problem, config).seconds(
        problem.source, problem.batch, device, config.blocks, shared=read * 4 + results * 8, tensor=products,
        issued=issued, depth=issued * 1.5, least=problem.bytes, start=1800,
    )  # fmt: skip
    seconds *= SLOWER_VOLUMES if problem.source.depth is not None else 1.0
    return seconds + finish_seconds(problem, squeeze_mode(problem, config))


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first; at most two per warp tile. None for few taps: memory bounds them, and the
    other kernels were faster."""
    if problem.taps <= FEW_TAPS or problem.item != 2 or problem.unit < 8 or device.capability < (9, 0):
        return []
    out_h, out_w = problem.out_size
    found: list[tuple[float, Config]] = []
    forms = [(g, a, 16 // g // a) for g in (2, 4, 8, 16) for a in (1, 2, 4, 8) if g * a in (2, 4, 8, 16)]
    depth = problem.source.depth
    forms = [form for form in forms if form[2] <= (problem.batch if depth is None else depth.out)]
    for rows, (groups, across, images), chunks in itertools.product((1, 2, 4), forms, (2, 3, 4, 5, 7, 8)):
        if chunks > -(-problem.channels // 8) and chunks != 2:
            continue
        wide, high = -(-out_w // (8 * across)), -(-out_h // (groups * rows))
        grids = {(x, y) for x in {1, 2, 4, min(wide, 7)} for y in (1, 2, 4) if x <= wide and y <= high}
        for (grid_x, grid_y), (stages, blocks) in itertools.product(grids, ((2, 1), (2, 2), (3, 1), (2, 3), (2, 4))):
            config = Config(rows, groups, across, images, grid_x, grid_y, chunks, stages, blocks)
            if refuse(problem, config, shared=device.shared_per_block, capability=device.capability) is None:
                found.append((estimate(problem, config, device), config))
    return varied(found, lambda c: (c.rows, c.groups, c.across, c.images, c.chunks), limit)
