"""Plans of the Hopper patch convolution (``conv_patch_sm90.cu``): stride 1, each input patch loaded once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from optdnn.kernels.conv.cost import row_cycles
from optdnn.kernels.conv.cost_terms import L2_PER_CLOCK, most_sums, room_for, stages_issue, waves_of
from optdnn.kernels.conv.header import generated, options
from optdnn.kernels.conv.implicit_gemm import direct_bytes, refuse_scatter, register_limit
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.launch import BLOCK_SHARED, whole_kib
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

FUNCTION = "conv_patch_sm90"
_BARRIER_BYTES = 1024
PATCH_LATENCY = 700
"""Cycles that the warps wait for the next block of channels when only one patch fits (``conv-tiles-h200.json``)."""
RINGED = 1.03
"""Factor on the cycles of products that wait for their weights step by step."""
KEPT_PER_CLOCK = 90.0
"""Bytes per cycle at which kept weights arrive, half of them during the previous launch."""
ACTIVATED = 2.3
"""Cycles per column of an activation's instruction, which both groups issue."""
CROWDED, UNEVEN = 1.4, 1.15
"""Factors on a block's cycles if two fit a multiprocessor: with no more blocks than multiprocessors, and with more."""
_NAME = re.compile(
    r"patch(?P<wgm>\d+)x(?P<wgn>\d+)t(?P<height>\d+)x(?P<width>\d+)s(?P<stages>\d+)(r(?P<ring>\d+)|w)"
    r"(?P<end>k(?P<split>\d+)|d|o(?P<buffers>\d+))b(?P<blocks>\d+)"
)


@dataclass(frozen=True, order=True)
class PatchConfig:
    """A tile: ``wgm`` x 64 channels x ``wgn`` patches of ``tile_h`` x ``tile_w`` output pixels.

    ``stages``: patches in flight per group; ``weight_stages``: depth of the weights' ring, 0 to keep all of a channel tile's
    weights; ``out_buffers``: output tiles in flight; ``blocks``: blocks per multiprocessor that registers must allow;
    ``split``: blocks of a cluster that share the channel blocks; ``direct``: one tile per block, stored from registers (always
    so when ``split`` > 1).
    """

    wgm: int
    wgn: int
    tile_h: int
    tile_w: int
    stages: int
    weight_stages: int = 0
    out_buffers: int = 1
    blocks: int = 1
    split: int = 1
    direct: bool = False

    @property
    def stores_directly(self) -> bool:
        """One tile per block, stored from registers."""
        return self.direct or self.split > 1

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.split

    @property
    def threads(self) -> int:
        """Threads of a block: the consumer warpgroups and three loading warps."""
        return self.wgm * self.wgn * 128 + 96

    def __str__(self) -> str:
        ring = f"r{self.weight_stages}" if self.weight_stages else "w"
        end = f"k{self.split}" if self.split > 1 else "d" if self.direct else f"o{self.out_buffers}"
        return f"patch{self.wgm}x{self.wgn}t{self.tile_h}x{self.tile_w}s{self.stages}{ring}{end}b{self.blocks}"

    @classmethod
    def read(cls, name: str) -> PatchConfig | None:
        """The configuration of this name, or None if there is none."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        wgm, wgn, height, width, stages = (int(found[k]) for k in ("wgm", "wgn", "height", "width", "stages"))
        made = cls(
            wgm, wgn, height, width, stages, int(found["ring"] or 0), int(found["buffers"] or 1), int(found["blocks"]),
            int(found["split"] or 1), found["end"] == "d",
        )  # fmt: skip
        return made if str(made) == name else None


def patch_size(problem: Problem, config: PatchConfig) -> tuple[int, int]:
    """Rows and columns of the input patch of a tile."""
    source = problem.sources[0]
    return (
        config.tile_h + (source.kernel[0] - 1) * source.dilation[0],
        config.tile_w + (source.kernel[1] - 1) * source.dilation[1],
    )


def columns(problem: Problem, config: PatchConfig) -> int:
    """wgmma's N: the tile's rows at the patch's pitch, the last one without its tail, rounded up to a multiple of 8."""
    wide = (config.tile_h - 1) * patch_size(problem, config)[1] + config.tile_w
    eights = -(-wide // 8) * 8
    return eights if eights > 256 or render.wgmma_columns(eights, problem.dtype) else eights + 8


def kept_steps(problem: Problem, config: PatchConfig) -> int:
    """K steps of the weights that a block keeps if it keeps all: those of its share of the channel blocks."""
    taps = problem.sources[0].kernel[0] * problem.sources[0].kernel[1]
    return -(-(problem.k_steps // taps) // config.split) * taps


def shared_bytes(problem: Problem, config: PatchConfig) -> int:
    """Dynamic shared memory of a block."""
    span = problem.span
    height, width = patch_size(problem, config)
    weights = (config.weight_stages or kept_steps(problem, config)) * config.wgm * 64 * span
    patches = config.wgn * config.stages * whole_kib(height * width * span)
    out = (
        config.wgm
        * config.wgn
        * config.out_buffers
        * whole_kib((config.tile_h * config.tile_w + 1) * 64 * problem.out_item)
    )
    if config.stores_directly:
        out = config.wgm * config.wgn * direct_bytes(1, columns(problem, config), config.split)
    return _BARRIER_BYTES + weights + patches + out


def refuse(problem: Problem, config: PatchConfig, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if problem.parts:
        return "fp32 in parts has a kernel of its own"
    if len(problem.sources) != 1 or problem.prologue:
        return "it reads one source, without a prologue"
    if problem.beside is not None:
        return "it does not combine pairs of channels"
    source = problem.sources[0]
    if problem.out_item == 4 and not config.stores_directly:
        return "fp32 results are stored from registers"
    if problem.scatter and (why := refuse_scatter(problem, config.stores_directly)):
        return why
    if problem.together > 1 and (problem.out_item != 2 or problem.residual or config.stores_directly or config.wgm > 1):
        return "several frames as one image need 16-bit results that are stored from shared memory, without a residual"
    if problem.pooled and (problem.out_item != 2 or problem.residual or config.stores_directly):
        return "pooling needs 16-bit results in shared memory, without a residual"
    if problem.pooled and (config.tile_h % 2 or config.tile_w % 2):
        return "its tiles would cut windows of the pool"
    if source.stride != (1, 1):
        return "it needs stride 1"
    if problem.bands > 1 and problem.band_channels % (config.wgm * 64):
        return f"tiles of {config.wgm * 64} channels do not divide a band of {problem.band_channels}"
    if config.wgm * config.wgn not in (1, 2) or config.stages < 1 or not 1 <= config.out_buffers <= 4:
        return "not a tile of this kernel"
    height, width = patch_size(problem, config)
    if max(height, width) > 256:
        return f"a patch of {height} x {width} exceeds a TMA box"
    n = columns(problem, config)
    if n > 256:
        return f"{n} columns exceed wgmma's 256"
    needed = shared_bytes(problem, config)
    if needed > shared or config.blocks * (needed + 1024) > shared + 1024:
        return f"{needed} bytes of shared memory exceed what {config.blocks} blocks can have"
    if n // 2 + 40 > register_limit(config.threads, config.blocks):
        return "accumulators and addresses exceed the registers"
    if config.direct and n > 128:
        return "direct stores are for small tiles"
    if not 1 <= config.split <= min(16, problem.k_steps // (source.kernel[0] * source.kernel[1])):
        return f"the channel blocks cannot be split {config.split} ways"
    if config.weight_stages > 32:
        return "too many stages"
    if config.weight_stages == 1 or (
        config.weight_stages == 0 and problem.k_steps * config.wgm * 64 * problem.span >= 1 << 20
    ):
        return "the weights' barrier cannot count them"
    return None


def recipe(problem: Problem, config: PatchConfig, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes of the image are parameters; the filter and the tile are not."""
    source = problem.sources[0]
    defines = {
        "WGM": config.wgm, "WGN": config.wgn, "TILE_H": config.tile_h, "TILE_W": config.tile_w,
        "TAPS_H": source.kernel[0], "TAPS_W": source.kernel[1], "DILATION_H": source.dilation[0], "DILATION_W": source.dilation[1],
        "BN": columns(problem, config), "BK": problem.block, "STAGES": config.stages, "SPLIT": config.split,
        "DIRECT": int(config.stores_directly), "WEIGHT_STAGES": config.weight_stages,
        "OUT_BUFFERS": config.out_buffers, "MIN_CTAS": config.blocks, "POOLED": int(problem.pooled),
        "BANDED": int(problem.bands > 1),
        **({"SHARED_BYTES": shared_bytes(problem, config)} if config.weight_stages else {}),  # kept weights depend on the depth
    }  # fmt: skip
    text = generated(problem, defines, render.wgmma(columns(problem, config), problem.dtype))
    return Recipe("conv_patch_sm90.cu", arch, {"generated.cuh": text}, options(problem))


def tiles(problem: Problem, config: PatchConfig) -> tuple[int, int]:
    """Channel tiles, and all tiles of the grid."""
    h, w = problem.out_size
    spatial = problem.batch * -(-h // config.tile_h) * -(-w // config.tile_w)
    channel_tiles = -(-problem.channels // (config.wgm * 64))
    return channel_tiles, channel_tiles * -(-spatial // config.wgn)


def grid_blocks(problem: Problem, config: PatchConfig, device: GpuFacts) -> int:
    """Blocks to launch: a persistent grid; a block that keeps its weights keeps its channel tile."""
    channel_tiles, count = tiles(problem, config)
    if config.stores_directly:
        return count * config.split
    fit = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    resident = device.multiprocessors * max(1, min(config.blocks, fit))
    if count <= resident:
        return count
    return resident if config.weight_stages else resident // channel_tiles * channel_tiles or channel_tiles


def candidates(problem: Problem, device: GpuFacts) -> list[PatchConfig]:
    """Every sensible tile, the best predicted first: the whole width or a divisor of it, all row counts that fit, splits that
    fill the device, and for each of them the deepest rings that fit."""
    if len(problem.sources) != 1 or problem.sources[0].stride != (1, 1) or problem.sources[0].kernel == (1, 1):
        return []
    h, w = problem.out_size
    channel_blocks = problem.k_steps // (problem.sources[0].kernel[0] * problem.sources[0].kernel[1])
    found: list[PatchConfig] = []
    most = min(256, most_sums(problem) - 16)
    whole = w + w % 2 if problem.pooled else w  # pooled tiles have whole windows
    widths = [x for x in range(7, whole + 1) if whole % x == 0 and x <= 128 and not (problem.pooled and x % 2)][-2:]
    for wgm, wgn in ((1, 1), (1, 2), (2, 1)):
        if wgm * 64 > -(-problem.channels // 64) * 64:
            continue
        for tile_w in widths:
            for tile_h in range(1, h + 1):
                probe = PatchConfig(wgm, wgn, tile_h, tile_w, 1)
                n = columns(problem, probe)
                if n > most or tile_h * tile_w < 0.75 * n or (n < 100 and tile_h < h and problem.pixels > 50000):
                    continue
                _, count = tiles(problem, probe)
                narrow = 96 if problem.out_item == 4 and wgm * wgn > 1 else 128  # fp32 residuals take registers
                for split in (1, 2, 3, 4, 6, 8):
                    if split > channel_blocks or (split > 1 and count * split > 2 * device.multiprocessors):
                        continue
                    for blocks in (1, 2):
                        few = count <= 2 * device.multiprocessors
                        for direct in (
                            (False, True) if n <= narrow and split == 1 and (few or problem.out_item == 4) else (False,)
                        ):
                            for buffers in (1,) if split > 1 or direct else (1, 2):
                                found += _deepest(
                                    problem, PatchConfig(wgm, wgn, tile_h, tile_w, 1, 0, buffers, blocks, split, direct)
                                )
    found.sort(key=lambda c: (cycles(problem, c, device), c))
    kept: list[PatchConfig] = []
    shapes: dict[tuple[int, ...], int] = {}
    for config in found:  # at most two per tile and split
        shape = (config.wgm, config.wgn, config.tile_h, config.tile_w, config.split)
        shapes[shape] = shapes.get(shape, 0) + 1
        if shapes[shape] <= 2:
            kept.append(config)
    return kept


def _deepest(problem: Problem, config: PatchConfig) -> list[PatchConfig]:
    """The ring depths worth trying: kept weights with the most patches, else one to three patches, with the deepest ring."""
    height, width = patch_size(problem, config)
    patch, weights = config.wgn * whole_kib(height * width * problem.span), config.wgm * 64 * problem.span
    kept, limit = (
        kept_steps(problem, config) * weights,
        min(BLOCK_SHARED, (BLOCK_SHARED + 1024) // config.blocks - 1024),
    )
    room = limit - (shared_bytes(problem, config) - config.stages * patch - (config.weight_stages * weights or kept))

    def able(made: PatchConfig) -> list[PatchConfig]:
        return [made] if refuse(problem, made) is None else []

    if (stages := min(4, (room - kept) // patch)) >= 1 and (found := able(replace(config, stages=stages))):
        return found
    rings = []
    for stages in (1, 2, 3):
        if (ring := min(24, (room - stages * patch) // weights)) >= 3:
            rings += able(replace(config, stages=stages, weight_stages=ring))
    return rings


def cycles(problem: Problem, config: PatchConfig, device: GpuFacts) -> float:
    """Predicted cycles from tensor cores, loads and waves: enough to rank the best tiles first."""
    _, count = tiles(problem, config)
    n = columns(problem, config)
    groups = config.wgm * config.wgn
    steps = kept_steps(problem, config)
    multiply = groups * (problem.span // 32) * max(n / 2, 16 + n / 4)
    height, width = patch_size(problem, config)
    taps = problem.sources[0].kernel[0] * problem.sources[0].kernel[1]
    loaded = config.wgn * height * width * problem.span / taps + (
        config.wgm * 64 * problem.span if config.weight_stages else 0
    )
    shallow = 1.0 + 2.0 / config.weight_stages if config.weight_stages else 1.0
    short = problem.span < 128
    rows = config.wgn * height * width * row_cycles(problem) / taps if short else 0.0
    busy = steps * max(multiply, loaded / 45 * shallow, rows) * (RINGED if config.weight_stages else 1.0)
    first = (
        config.wgn * height * width * problem.span / L2_PER_CLOCK
    )  # the first patches arrive before the first product
    idle = 1500 + first + n * (2.0 if config.stores_directly else 3.0)
    if config.split > 1:
        idle += 600 + groups * 64 * n * 4 * (config.split - 1) / config.split / 12
    jobs = waves_of(
        count, config.split, device, room_for(shared_bytes(problem, config), config.threads, n // 2, device)
    )
    if not config.weight_stages:  # the first product waits for all kept weights
        idle += steps * config.wgm * 64 * problem.span / KEPT_PER_CLOCK
    if config.stages == 1:  # the next patch is requested after this one is read
        busy += PATCH_LATENCY * (steps // taps - 1)
    if config.blocks > 1:  # during the previous launch, some multiprocessors get two of few blocks and others none
        busy *= CROWDED if count * config.split <= device.multiprocessors else UNEVEN
    if config.stores_directly:
        return jobs * (busy + idle) + 200 * (3 - min(3, config.stages))
    overlapped = config.wgn * config.blocks > 1
    if overlapped and short:  # the other group's products do not hide the epilogue
        finish = 1500 + n * (3.0 + ACTIVATED * stages_issue(problem.epilogue))
        busy = math.sqrt(math.hypot(busy**2, (busy / 2 + finish) ** 2))
    return jobs * (busy if overlapped else busy + idle) + idle + 200 * (3 - min(3, config.stages + config.out_buffers))
