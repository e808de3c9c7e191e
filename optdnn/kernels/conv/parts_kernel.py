"""Plans of the kernel for fp32 on Hopper's tensor cores (``conv_parts_sm90.cu``): three products of fp16 for each product."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from optdnn.kernels.builder import up
from optdnn.kernels.conv.cost_terms import CLOCK, MEMORY, waves_of
from optdnn.kernels.conv.header import generated, options
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.launch import BLOCK_SHARED, no_room, whole_kib
from optdnn.kernels.ranking import varied_pairs
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

FUNCTION = "conv_parts_sm90"
PIXELS = 64
"""Pixels of a warpgroup: wgmma's M."""
MOST_COLUMNS = 144
"""Most channels of a warpgroup: a thread has the sums of a K step, and the whole sums."""
VOLUME_COLUMNS, CHANGED_COLUMNS = 136, 112
"""The same for two warpgroups and volumes, whose tiles have more coordinates; and for a prologue together with a vote."""
WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 136, 144)
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
MOST_STAGES = 16
_BARRIER_BYTES = 1024
_NAME = re.compile(
    r"parts(?P<pixel_groups>\d)x(?P<channel_groups>\d)n(?P<columns>\d+)s(?P<stages>\d+)(k(?P<split>\d+))?"
)


@dataclass(frozen=True, order=True)
class PartsConfig:
    """A tile: ``pixel_groups`` x 64 pixels and ``channel_groups`` x ``columns`` channels, by one warpgroup each. ``stages``: depth of
    the ring; ``split``: blocks of a cluster that share K."""

    pixel_groups: int
    channel_groups: int
    columns: int
    stages: int
    split: int = 1

    stores_directly = True
    """Results are stored from registers."""
    box = PIXELS
    """Pixels that TMA loads at a time."""

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.split

    @property
    def groups(self) -> int:
        """Multiplying warpgroups of a block."""
        return self.pixel_groups * self.channel_groups

    @property
    def threads(self) -> int:
        """Threads of a block: one more warpgroup loads."""
        return self.groups * 128 + 128

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Channels and pixels of a block's tile."""
        return self.channel_groups * self.columns, self.pixel_groups * PIXELS

    def __str__(self) -> str:
        end = f"k{self.split}" if self.split > 1 else ""
        return f"parts{self.pixel_groups}x{self.channel_groups}n{self.columns}s{self.stages}{end}"

    @classmethod
    def read(cls, name: str) -> PartsConfig | None:
        """The configuration of this name, or None if there is none."""
        found = _NAME.fullmatch(name)
        made = None if found is None else cls(*(int(n or 1) for n in found.groupdict().values()))
        return made if str(made) == name else None

    def joint_tiles(self, problem: Problem) -> tuple[int, int]:
        """Tiles over the channels, and in all."""
        channels = problem.bands * -(-problem.band_channels // self.tile[0])
        return channels, channels * -(-problem.pixels // self.tile[1])


def kernel_order(block: int) -> tuple[int, ...]:
    """The place in a K step of each of its ``block`` input channels. A thread reads ``block / 4`` neighboring channels of a pixel, four
    for each wgmma; operand A has them in two pairs that lie eight apart."""
    steps = block // 16
    return tuple(e // 4 % steps * 16 + e % 4 // 2 * 8 + e // (4 * steps) * 2 + e % 2 for e in range(block))


LEVEL = 8
"""Input channels get scales if the largest weights of two of them differ by more than this power of two."""
LOWEST = -60
"""The least power of two that is a scale: products below it are lost beside those of other channels."""
TINY, IGNORED = 2.0**-18, 1 / 32
"""A channel ignores inputs if more than this part of its weights is so small, beside its largest one."""


def input_shifts(weights: Array, bands: int = 1, together: int = 1) -> Array | None:
    """Scales of the input channels of ``[output channels, input channels, ...]`` fp32 weights, as powers of two: ``[bands, channels]``,
    int32 and at most 0. A band is ``together`` groups, each of which reads its own ``input channels``.

    Pixels are multiplied by them, and weights divided. Then the largest weights of all input channels of a band have about one size.
    None: they have it already. Channels that nothing reads get the least scale, so that their numbers cost others no bits."""
    inside = weights.shape[1]
    largest = np.abs(weights).reshape(bands, together, -1, inside, weights[0, 0].size).max(axis=(2, 4), initial=0.0)
    largest = largest.reshape(bands, -1)
    used = np.isfinite(largest) & (largest > 0)
    if not used.any():
        return None
    most = np.where(used, largest, 0).max(axis=1, keepdims=True)
    shifts = np.frexp(np.where(used, largest, most))[1]
    shifts = np.where(largest == 0, LOWEST, shifts - shifts.max(axis=1, keepdims=True))
    return None if shifts.min() >= -LEVEL else np.maximum(shifts, LOWEST).astype(np.int32)


def selective(weights: Array) -> bool:
    """Whether an output channel of ``[output channels, inputs]`` weights ignores some inputs, which then may be much larger than those that
    count. Inputs that no channel reads do not count: they have scales."""
    size = np.abs(weights)
    read = size[:, size.any(axis=0)]
    most = read.max(axis=1, initial=0.0, keepdims=True)
    few = (read <= most * TINY).sum(axis=1) > IGNORED * read.shape[1]
    return bool((few & (most[:, 0] > 0)).any())


def divided(weights: Array, block: int) -> tuple[Array, Array]:
    """fp32 rows ``[channels, depth]`` as fp16 in two parts, ``[2 * channels, depth]`` in the kernel's order, and the factor of each channel.

    The sum of its parts, times the factor, is a weight to 22 bits. The factor is a power of two with which the largest weight of the row is
    2^14 or more."""
    rows, depth = weights.shape
    with np.errstate(invalid="ignore", over="ignore"):  # a weight that is not finite becomes NaN
        most = np.abs(weights).max(axis=1)
        _, exponents = np.frexp(np.where(np.isfinite(most) & (most > 0), most, 1))
        shifts = np.clip(15 - exponents, -126, 149).astype(np.int32)
        scaled = np.ldexp(weights, shifts[:, None])
        first = scaled.astype(np.float16)
        rest = (scaled - first.astype(np.float32)).astype(np.float16)
    made = np.empty((2, rows, depth // block, block), np.float16)
    made[..., list(kernel_order(block))] = np.stack([first, rest]).reshape(made.shape)
    return made.reshape(2 * rows, depth), np.ldexp(np.float32(1), -shifts)


def stage_bytes(problem: Problem, config: PartsConfig) -> int:
    """Bytes of shared memory of a stage of the ring."""
    return whole_kib((sum(config.tile) + problem.equalized) * problem.span)


def shared_bytes(problem: Problem, config: PartsConfig) -> int:
    """Dynamic shared memory of a block: barriers, the ring, and sums that other blocks of the cluster send."""
    slots = -(-config.columns // 8 // config.split)
    sums = config.groups * slots * config.split * 2048 if config.split > 1 else 0
    return _BARRIER_BYTES + config.stages * stage_bytes(problem, config) + sums


def _most_columns(problem: Problem, config: PartsConfig) -> int:
    """Most channels of a warpgroup for which registers suffice."""
    if problem.prologue and problem.selective:
        return CHANGED_COLUMNS
    return VOLUME_COLUMNS if config.groups == 2 and problem.volume else MOST_COLUMNS


def refuse(problem: Problem, config: PartsConfig, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if not problem.parts:
        return f"it multiplies fp32 in parts, not {problem.dtype}"
    if problem.pooled or problem.stack or problem.together > 1:
        return "it has no pooling or stacks"
    if (
        config.groups not in (1, 2)
        or config.columns % 8
        or not 8 <= config.columns <= _most_columns(problem, config)
        or config.tile[0] > 256
    ):
        return "not a tile of this kernel"
    if config.split > 16 or config.split > problem.k_steps:
        return f"{problem.k_steps} K steps cannot be split {config.split} ways"
    if not 2 <= config.stages <= MOST_STAGES:
        return f"a ring has 2 to {MOST_STAGES} stages: a thread reads the next one while the current one is multiplied"
    return no_room(shared_bytes(problem, config), shared, 1)


def recipe(problem: Problem, config: PartsConfig, arch: str = "sm_90a") -> Recipe:
    """What to compile. Shapes are parameters."""
    modes = [source.mode for source in problem.sources] + [-1]
    defines = {
        "PARTS": 1, "PIXEL_GROUPS": config.pixel_groups, "CHANNEL_GROUPS": config.channel_groups, "GROUP_CHANNELS": config.columns,
        "BK": problem.block, "STAGES": config.stages, "SPLIT": config.split, "MODE0": modes[0], "MODE1": modes[1],
        "UNEVEN": int(problem.selective), "EQUALIZED": int(problem.equalized), "BANDED": int(problem.bands > 1),
        "PROLOGUE": int(bool(problem.prologue)), "GATED": int(problem.gated),
        "SHARED_BYTES": shared_bytes(problem, config),
    }  # fmt: skip
    text = generated(problem, defines, render.pixels_instruction(config.columns, "float16"))
    return Recipe("conv_parts_sm90.cu", arch, {"generated.cuh": text}, options(problem))


def grid_blocks(problem: Problem, config: PartsConfig, device: GpuFacts) -> int:
    """Blocks to launch: persistent ones, or a cluster per tile."""
    tiles = config.joint_tiles(problem)[1]
    return tiles * config.split if config.split > 1 else min(tiles, device.multiprocessors)


START, EPILOGUE, EXCHANGE = 2400, 980, 670
"""Cycles of a launch until its first products; of a tile after its last ones; and in which a cluster begins to exchange sums."""
COLUMN, SENT = 23.0, 29.0  # cycles to finish a column of a tile; bytes of sums that a block sends per cycle
LEAST_STEP, VOTE, CHANGE = {1: 400, 2: 550}, 75, 100
"""Cycles of a K step without products, by the block's warpgroups: a thread waits for its pixels and divides them; and cycles to look for
uneven ones (seven networks that did so took 9 % longer), and to apply a prologue."""
TOGETHER = 1.29
"""Exponent of the norm that combines these cycles with those of the products."""
BESIDE = 0.7
"""Fraction of the time of memory that nothing hides. The constants are fitted to 284 chains of 58 pairs of layers on an H200: 4 % off
(median)."""


def estimate(problem: Problem, config: PartsConfig, device: GpuFacts) -> float:
    """Predicted seconds of a dependent launch."""
    channels, pixels = config.tile
    tiles, steps = config.joint_tiles(problem)[1], -(-problem.k_steps // config.split)
    products = config.groups * problem.block // 16 * 3 * config.columns / 2
    least = LEAST_STEP[config.groups] + (VOTE if problem.selective else 0) + (CHANGE if problem.prologue else 0)
    step = float((products**TOGETHER + least**TOGETHER) ** (1 / TOGETHER))
    end = EPILOGUE + COLUMN * config.columns
    if config.split > 1:
        end += EXCHANGE + channels * pixels * 4 * (config.split - 1) / config.split / SENT
    cycles = START + waves_of(tiles, config.split, device) * (steps * step + end)
    return cycles / CLOCK + BESIDE * problem.bytes / MEMORY


def _widths(problem: Problem, groups: int) -> Sequence[int]:
    """Channels of a warpgroup to consider: with bands, also those that divide a band into equal tiles."""
    if problem.bands == 1:
        return WIDTHS
    even = {up(-(-problem.band_channels // (n * groups)), 8) for n in range(1, problem.band_channels // 8 + 1)}
    return sorted({*WIDTHS, *(n for n in even if n <= MOST_COLUMNS)})


def candidates(problem: Problem, device: GpuFacts, limit: int = 12) -> list[tuple[float, PartsConfig]]:
    """The configurations to time with their predicted seconds, best first."""
    found = []
    for pixel_groups, channel_groups in ((1, 1), (2, 1), (1, 2)):
        if pixel_groups == 2 and problem.pixels <= PIXELS:
            continue
        for columns in _widths(problem, channel_groups):
            if (
                channel_groups * columns - 8 >= problem.band_channels and columns > 8
            ) or channel_groups * columns > 256:
                continue
            for split in SPLITS:
                shallow = PartsConfig(pixel_groups, channel_groups, columns, 2, split)
                tiles = shallow.joint_tiles(problem)[1]
                if split > problem.k_steps or (split > 1 and tiles * split > 2 * device.multiprocessors):
                    continue
                room = device.shared_per_block - shared_bytes(problem, shallow) + 2 * stage_bytes(problem, shallow)
                steps = -(-problem.k_steps // split)
                config = replace(shallow, stages=min(MOST_STAGES, max(2, steps), room // stage_bytes(problem, shallow)))
                if refuse(problem, config, shared=device.shared_per_block) is None:
                    found.append((estimate(problem, config, device), config))
    whole = min((pair for pair in found if pair[1].split == 1), default=None)
    best = varied_pairs(found, lambda c: (*c.tile, c.split), limit)
    return best if whole is None or whole in best else [*best, whole]  # one that sums in the same order for all sizes
