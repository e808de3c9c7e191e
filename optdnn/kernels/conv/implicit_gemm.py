"""Plans of the Hopper convolution kernel (``conv_sm90.cu``): tile configuration, resources, sources and grid.

The kernel computes ``out[pixel, channel] = epilogue(sum over sources, taps and channels)`` over NHWC tensors; a plain GEMM is
the 1x1 convolution with one "image" per row. Everything here is a pure function of the problem and the device.
:func:`optdnn.kernels.conv.hopper_launch.launch` describes the launch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from optdnn.kernels.conv.header import generated, options
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.launch import BLOCK_SHARED, no_room, whole_kib
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

FUNCTION = "conv_sm90"
_BARRIER_BYTES = 1024
_NAME = re.compile(
    r"(?P<wgm>\d+)x(?P<wgn>\d+)m(?P<mt>\d+)n(?P<bn>\d+)s(?P<stages>\d+)(?P<end>k(?P<split>\d+)|d|o(?P<buffers>\d+))"
    r"(?P<stationary>w?)b(?P<blocks>\d+)(?P<alternate>a?)(c(?P<channels>\d+)x(?P<pixels>\d+))?(?P<stream>t?)"
)
TWO_SETS = 64
"""Up to this many columns (``mt * bn``) a thread keeps two sets of accumulators, so that products do not wait for each other."""


@dataclass(frozen=True, order=True)
class Config:
    """A tile: ``wgm x wgn`` consumer warpgroups over channels x pixels, each of ``mt`` x 64 channels and ``bn`` pixels.

    ``stages``: ring depth; ``split``: blocks per cluster that share K; ``out_buffers``: output tiles in flight; ``stationary``:
    the block loads the weights of its K range once and keeps them; ``blocks``: blocks per multiprocessor that registers must allow;
    ``direct``: one tile per block, stored from registers (always so when ``split`` > 1). ``alternate``: two warpgroups take whole
    tiles in turn: one runs its epilogue while the other multiplies. ``share``: blocks of a cluster over channels x pixels;
    multicast loads pixels (weights) once for all blocks with the same pixels (channels). ``stream``: stream-K: the blocks
    that run at a time take equal spans of the K steps of all tiles.
    """

    wgm: int
    wgn: int
    mt: int
    bn: int
    stages: int
    split: int = 1
    out_buffers: int = 1
    stationary: bool = False
    blocks: int = 1
    direct: bool = False
    alternate: bool = False
    share: tuple[int, int] = (1, 1)
    stream: bool = False

    @property
    def sharers(self) -> int:
        """Blocks of a cluster that share loads by multicast."""
        return self.share[0] * self.share[1]

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.split * self.sharers

    @property
    def box(self) -> int:
        """Pixels that TMA loads at a time."""
        return self.bn // self.share[0]

    @property
    def turns(self) -> int:
        """Tiles that the block's warpgroups work on at a time."""
        return 2 if self.alternate else 1

    @property
    def groups(self) -> int:
        """Multiplying warpgroups of a block."""
        return self.wgm * self.wgn * self.turns

    @property
    def stores_directly(self) -> bool:
        """One tile per block, stored from registers."""
        return self.direct or self.split > 1

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Channels and pixels of a block's tile."""
        return self.wgm * self.mt * 64, self.wgn * self.bn

    @property
    def wide(self) -> bool:
        """More than 128 accumulators per thread: multiplying warps take registers from the loading warps."""
        return self.mt * self.bn > 256

    @property
    def threads(self) -> int:
        """Threads of a block: the consumer warpgroups and two loading warps (where wide, a warpgroup with two idle warps)."""
        return self.groups * 128 + (128 if self.wide else 64)

    def __str__(self) -> str:
        name = f"{self.wgm}x{self.wgn}m{self.mt}n{self.bn}s{self.stages}"
        return (
            name
            + (f"k{self.split}" if self.split > 1 else "d" if self.direct else f"o{self.out_buffers}")
            + ("w" if self.stationary else "")
            + f"b{self.blocks}"
            + ("a" if self.alternate else "")
            + ("c{}x{}".format(*self.share) if self.sharers > 1 else "")
            + ("t" if self.stream else "")
        )

    @classmethod
    def read(cls, name: str) -> Config | None:
        """The configuration of this name, or None if there is none."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        wgm, wgn, mt, bn, stages = (int(found[k]) for k in ("wgm", "wgn", "mt", "bn", "stages"))
        made = cls(
            wgm, wgn, mt, bn, stages, int(found["split"] or 1), int(found["buffers"] or 1), bool(found["stationary"]),
            int(found["blocks"]), found["end"] == "d", bool(found["alternate"]),
            (int(found["channels"] or 1), int(found["pixels"] or 1)), bool(found["stream"]),
        )  # fmt: skip
        return made if str(made) == name else None

    def joint_tiles(self, problem: Problem) -> tuple[int, int]:
        """Tiles over the channels, and in all. The tiles of a cluster that shares loads count as one."""
        channels = -(-problem.channels // (self.tile[0] * self.share[0]))
        return channels, problem.count * channels * -(-problem.pixels // (self.tile[1] * self.share[1]))


SHARES = ((1, 1), (2, 1), (1, 2))
"""Clusters that share loads. They have two blocks, since multiprocessors come in pairs: clusters of four do not fill an
H200, and a grid of them took twice as long."""
WIDE_REGISTERS = 232
"""Registers of a multiplying thread when the loading warps give up theirs."""


def direct_bytes(m_tiles: int, columns: int, split: int) -> int:
    """Bytes of shared memory of one warpgroup's DirectStore: what the cluster's ranks send it, and room to transpose blocks."""
    slots = -(-columns // 8 // split)
    return (m_tiles * slots * split * 2048 if split > 1 else 0) + 4 * m_tiles * slots * 640


def late(problem: Problem, config: Config) -> bool:
    """Whether registers do not hold both accumulators and addresses of results, which are then computed after the last product."""
    wide = problem.item == 4 or (problem.item == 2 and problem.out_item == 4)
    return config.stores_directly and wide and config.mt * config.bn > DIRECT_COLUMNS


def stage_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory of a stage of the ring."""
    return (config.tile[1] + (0 if config.stationary else config.tile[0])) * problem.span


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    weights, stage = config.tile[0] * problem.span, stage_bytes(problem, config)
    operands = config.stages * stage + (-(-problem.k_steps // config.split) * weights if config.stationary else 0)
    operands = whole_kib(operands)
    buffers = config.out_buffers * config.turns
    factors = 0 if problem.row_norm is None else (1 if config.stores_directly else buffers) * config.tile[1] * 8
    if config.stores_directly:
        direct = config.wgm * config.wgn * direct_bytes(config.mt, config.bn, config.split)
        if late(problem, config) and config.split == 1:  # in the ring's memory
            return _BARRIER_BYTES + max(operands, direct) + factors
        return _BARRIER_BYTES + operands + direct + factors
    return _BARRIER_BYTES + operands + buffers * config.tile[0] * config.tile[1] * problem.out_item + factors


def deepest(problem: Problem, config: Config, limit: int) -> int:
    """The most stages that fit ``limit`` bytes of shared memory per block; less than 1 if none fits."""
    stage = stage_bytes(problem, config)
    kept = -(-problem.k_steps // config.split) * config.tile[0] * problem.span if config.stationary else 0
    beside = max(_BARRIER_BYTES, shared_bytes(problem, config) - whole_kib(config.stages * stage + kept))
    return ((limit - beside) // 1024 * 1024 - kept) // stage


DIRECT_COLUMNS = 128
"""Most columns (``mt * bn``) of 16-bit tiles that are stored from registers."""
REGISTERS = 65536
"""Registers of a multiprocessor."""


def register_limit(threads: int, blocks: int) -> int:
    """Registers per thread when that many blocks share a multiprocessor: its four schedulers divide the warps."""
    warps = -(-blocks * -(-threads // 32) // 4)
    return min(248, REGISTERS // 128 // warps // 8 * 8)


def refuse(problem: Problem, config: Config, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if problem.parts:
        return "fp32 in parts has a kernel of its own"
    if config.bn % 8 or not 8 <= config.bn <= 256 or config.mt not in (1, 2) or config.wgm * config.wgn not in (1, 2):
        return "not a tile of this kernel"
    if config.alternate and (config.groups != 2 or config.blocks > 1 or config.stores_directly):
        return "alternating warpgroups need a block that has its multiprocessor to itself and stores by TMA"
    if any(source.pitch for source in problem.sources):
        return "only the patch kernel reads pixels that overlap"
    if problem.together > 1:
        return "only the patch kernel joins several frames of a volume into one image"
    if problem.pooled:
        return "its tiles are runs of pixels, which cannot be pooled: the patch kernel's tiles can"
    return (
        _refuse_stages(problem, config, shared)
        or _refuse_registers(problem, config)
        or _refuse_parts(problem, config)
        or _refuse_forms(problem, config)
    )


def _refuse_stages(problem: Problem, config: Config, shared: int) -> str | None:
    """Why the tile does not fit wgmma, TMA or shared memory, or None."""
    if problem.from_registers and not config.stores_directly:
        return "fp32 results are stored from registers"
    if not render.wgmma_columns(config.bn, problem.dtype):
        return f"wgmma has no tile of {config.bn} columns of {problem.dtype}"
    if config.split > 16 or config.split > problem.k_steps:
        return f"{problem.k_steps} K steps cannot be split {config.split} ways"
    if config.stages == 1 and problem.k_steps > config.split:
        return "a stage is released while the next one is read: a ring of one stage holds one K step"
    if not 1 <= config.stages <= 24 or not 1 <= config.out_buffers <= 4:
        return "too many stages"
    return no_room(shared_bytes(problem, config), shared, config.blocks)


def _refuse_registers(problem: Problem, config: Config) -> str | None:
    """Why a thread's accumulators do not fit its registers, or None."""
    if problem.prologue and (config.alternate or config.sharers > 1 or config.wide):
        return "a prologue needs a single block whose warpgroups share a tile, with up to 128 accumulators per thread"
    if problem.row_norm is not None and config.wide:
        return "rows are normalized after up to 128 accumulators per thread"
    if problem.row_scale and config.mt == 2 and 224 < config.mt * config.bn <= 256:
        return "the accumulators of two subtiles and the scales of their rows exceed the registers"
    threads = config.threads + problem.helpers
    limit = WIDE_REGISTERS if config.wide else register_limit(threads, config.blocks)
    sets = 2 if config.mt * config.bn <= TWO_SETS else 1  # small tiles have two sets of accumulators
    needed = config.mt * config.bn // 2 * sets
    if late(problem, config):
        needed += 8 * config.mt
    elif config.stores_directly:
        needed += -(-config.bn // 8 // config.split) * (2 + max(2, problem.out_item) * config.mt)
        needed += 12 * config.mt if problem.dynamic else 0  # the zero point's correction of each channel
        needed += 16 * config.mt if problem.image_scale else 0  # the constants of the next image
    if needed + 40 > limit:
        return f"{needed} accumulators and addresses exceed {limit} registers"
    return None


def _refuse_parts(problem: Problem, config: Config) -> str | None:
    """Why blocks cannot share loads or take spans of K steps, or None."""
    if problem.row_scale and (config.split > 1 or config.stream):
        return "scales per row are applied to whole sums: K is not split"
    if problem.item == 1 and (config.stream or (config.sharers > 1 and not problem.row_scale)):
        return "shared loads and stream-K of 8-bit operands have not been measured"
    if config.sharers > 1 and (reason := _refuse_sharing(config)):
        return reason
    if problem.stack and (config.stationary or config.stores_directly or config.sharers > 1 or problem.prologue):
        return "a stack of products keeps no weights, shares no loads, has no prologue, and stores by TMA"
    if config.stream and (problem.moments or problem.row_norm is not None):
        return "moments of rows need whole tiles"
    if config.stream and problem.row_bias:
        return "a bias per row needs whole tiles"
    return _refuse_streaming(problem, config) if config.stream else None


def _refuse_forms(problem: Problem, config: Config) -> str | None:
    """Why the tile does not suit heads that turn, bands, wide tiles, scattered blocks or direct stores, or None."""
    if problem.turn is not None and (config.stores_directly or config.stream):
        return "heads are rotated in whole tiles in shared memory"
    if problem.turn is not None and config.mt % problem.turn.tiles:
        return "a warpgroup has one tile of 64 channels, but pairs span two"
    if problem.bands > 1 and (problem.band_channels % config.tile[0] or config.share[0] > 1):
        return f"blocks of {config.tile[0]} channels that load the same pixels do not divide a band of {problem.band_channels}"
    if config.wide and (config.groups != 2 or config.blocks > 1 or config.stores_directly):
        return "more than 128 accumulators per thread are for two warpgroups of a block that has its multiprocessor to itself"
    if config.mt * config.bn > 320:
        return "more than 160 accumulators per thread"
    if problem.scatter and (why := refuse_scatter(problem, config.stores_directly)):
        return why
    if late(problem, config) and problem.out_size != (1, 1):
        return "larger tiles of tf32 made convolutions slower (ResNet-50 at batch 32: 1.86 -> 2.21 ms)"
    if config.direct and (config.stationary or (config.mt * config.bn > DIRECT_COLUMNS and not late(problem, config))):
        return "direct stores are for small tiles, one per block"
    return None


def refuse_scatter(problem: Problem, stores_directly: bool) -> str | None:
    """Why the launch cannot store blocks of pixels at their final positions, or None."""
    if problem.residual:
        return "nothing is added to blocks of pixels"
    if problem.out_item == 1 or (problem.out_item == 4 and not stores_directly):
        return "blocks of pixels are of 16 bits, or of fp32 and stored from registers"
    return None


def _refuse_sharing(config: Config) -> str | None:
    """Why blocks of a cluster cannot share loads, or None."""
    over_channels, over_pixels = config.share
    if config.share not in SHARES:
        return "not a cluster of this kernel"
    if config.bn % (8 * over_channels) or config.tile[0] % (8 * over_pixels):
        return "blocks load whole groups of eight rows for one another"
    if config.stationary or config.stores_directly:
        return "blocks that share loads keep no weights and store by TMA"
    return None


LEAST_SPAN = 2
"""Least K steps of a stream-K block. A tile of N steps is cut into about sqrt(N) spans, since the tile's owner adds
them up one by one."""


def _refuse_streaming(problem: Problem, config: Config) -> str | None:
    """Why blocks cannot take spans of K steps, or None."""
    if config.stationary or config.stores_directly or config.alternate or config.sharers > 1 or problem.scatter:
        return "stream-K is for single blocks that keep no weights, take one tile at a time, and store by TMA"
    if problem.prologue:
        return "a prologue walks through whole tiles"
    if sum(config.tile) * problem.span < config.groups * 2048:
        return "a stage holds less than 16 bytes of partial sums per thread"
    steps = config.joint_tiles(problem)[1] * problem.k_steps
    if steps < 2 * LEAST_SPAN:
        return f"{steps} K steps in all are too few to divide"
    if steps * 2048 >= 1 << 32:
        return f"{steps} K steps are too many to count"
    return None


PAIRED_TILE = 8192
"""Results of a tile from which on a SiLU is applied to two at once: EfficientNet-B0 at batch 128 gained 2 %, smaller
tiles at batch 1 lost 1 %."""


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Shapes are parameters: problems that share modes, epilogue and configuration share the cubin."""
    modes = [source.mode for source in problem.sources] + [-1]
    defines = {
        "WGM": config.wgm, "WGN": config.wgn, "MT": config.mt, "BN": config.bn, "BK": problem.block, "STAGES": config.stages,
        "SPLIT": config.split,
        "DIRECT": int(config.stores_directly), "OUT_BUFFERS": config.out_buffers, "WEIGHTS_STATIONARY": int(config.stationary),
        "ALTERNATE": int(config.alternate), "SHARE_CHANNELS": config.share[0], "SHARE_PIXELS": config.share[1],
        "STREAM": int(config.stream), "MIN_CTAS": config.blocks, "MODE0": modes[0], "MODE1": modes[1],
        "PROLOGUE": int(bool(problem.prologue)), "GATED": int(problem.gated), "GATE_ALONE": int(problem.prologue == (("gate",),)),
        **({} if config.stationary else {"SHARED_BYTES": shared_bytes(problem, config)}),  # stationary weights depend on the depth
        "BATCHED": int(problem.stack is not None), "ACROSS": int(problem.across), "BANDED": int(problem.bands > 1),
    }  # fmt: skip
    instruction = render.wgmma(config.bn, problem.dtype, across=problem.across)
    return Recipe(
        "conv_sm90.cu",
        arch,
        {"generated.cuh": generated(problem, defines, instruction, math.prod(config.tile) >= PAIRED_TILE)},
        options(problem),
    )


# ---- launch ---------------------------------------------------------------------------------------------------------------


def grid_blocks(problem: Problem, config: Config, device: GpuFacts) -> int:
    """Blocks to launch: every tile once for direct stores, a persistent grid otherwise."""
    channel_tiles, tiles = config.joint_tiles(problem)
    if config.stores_directly:
        return tiles * config.split
    if config.stream:
        spans = tiles * max(1, min(problem.k_steps // LEAST_SPAN, 1 + math.isqrt(problem.k_steps)))
        return min(device.multiprocessors * config.blocks, spans)
    if config.sharers > 1:
        return min(tiles, device.multiprocessors // config.sharers) * config.sharers
    resident = device.multiprocessors * max(
        1, min(config.blocks, device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024))
    )
    if tiles <= resident:
        return tiles
    if config.stationary:  # a block keeps its channel tile
        return resident // channel_tiles * channel_tiles or channel_tiles
    return resident


def workspace(problem: Problem, config: Config, device: GpuFacts) -> tuple[int, int]:
    """Bytes of stream-K's partial sums (one tile per block), and of its counters (zero before the first launch); (0, 0)
    without stream-K."""
    if not config.stream:
        return 0, 0
    blocks = grid_blocks(problem, config, device)
    return blocks * math.prod(config.tile) * 4, blocks * 4
