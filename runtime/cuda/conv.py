"""Plans of the Hopper convolution kernel (``kernels/conv_sm90.cu``): problem, tile configuration, cost, launch.

The kernel computes ``out[pixel, channel] = epilogue(sum over sources, taps and channels)`` over NHWC tensors; a plain GEMM is
the 1x1 convolution with one "image" per row. Everything here is a pure function of the problem and the device; only
:func:`bind` needs a GPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from optdnn.errors import InternalError
from optdnn.runtime.cuda import render
from optdnn.runtime.cuda.describe import ParameterBlock
from optdnn.runtime.cuda.device import Device, Function, Launch, encode_im2col, encode_tiled
from optdnn.runtime.cuda.nvrtc import KernelCache, Recipe
from optdnn.types import Array

ROWS, IM2COL = 0, 1
ITEM = {"float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float32": 4, "tfloat32": 4}
"""Bytes of an element; fp32 is for results alone."""
_BARRIER_BYTES = 1024
TWO_SETS = 64
"""Up to this many columns (``mt * bn``) a thread keeps two sets of sums, so that products need not wait for each other."""


@dataclass(frozen=True)
class Source:
    """One activation tensor the convolution reads: NHWC ``height`` x ``width`` x ``channels``, and how it is walked.

    ``padding`` is (top, left, bottom, right).
    """

    height: int
    width: int
    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    pitch: int = 0
    """Elements from a pixel to the next; 0: ``channels``. Less than ``channels``: pixels that overlap (see :mod:`.quantized`)."""

    @property
    def mode(self) -> int:
        """How TMA reads it."""
        pointwise = self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0, 0, 0)
        return ROWS if pointwise else IM2COL

    def output(self) -> tuple[int, int]:
        """Height and width of the result."""
        top, left, bottom, right = self.padding
        h = (self.height + top + bottom - (self.kernel[0] - 1) * self.dilation[0] - 1) // self.stride[0] + 1
        w = (self.width + left + right - (self.kernel[1] - 1) * self.dilation[1] - 1) // self.stride[1] + 1
        return h, w


def space_to_depth(source: Source) -> Source:
    """The stride-1 source that a strided few-channel one becomes when ``stride x stride`` pixels are moved into the channels.

    Tap t of the new filter covers taps ``stride * (t - pad') + d + pad`` of the old one, for d in 0..stride - 1, where ``pad'`` is
    the new padding. Channels are filled up with zeros to a multiple of 16.
    """
    stride = source.stride[0]
    if source.stride != (stride, stride) or source.dilation != (1, 1):
        raise InternalError("space_to_depth needs equal strides and no dilation")
    out = source.output()
    size = (-(-source.height // stride), -(-source.width // stride))
    before = [-(-pad // stride) for pad in source.padding[:2]]
    taps = [
        (k - 1 - pad) // stride + b + 1 for k, pad, b in zip(source.kernel, source.padding[:2], before, strict=True)
    ]
    after = [o - n - b + t - 1 for o, n, b, t in zip(out, size, before, taps, strict=True)]
    channels = -(-source.channels * stride * stride // 16) * 16
    return Source(size[0], size[1], channels, (taps[0], taps[1]), (1, 1), (before[0], before[1], after[0], after[1]))


def space_to_depth_weights(source: Source, weight: Array) -> Array:
    """OIHW weights of ``source`` -> OIHW weights of ``space_to_depth(source)``. Keeps the dtype; every weight appears once."""
    made, stride = space_to_depth(source), source.stride[0]
    out, channels, taps_h, taps_w = weight.shape
    packed = np.zeros((out, made.channels, *made.kernel), weight.dtype)
    for r in range(taps_h):
        for s in range(taps_w):
            row, dy = divmod(r - source.padding[0], stride)
            column, dx = divmod(s - source.padding[1], stride)
            lane = (dy * stride + dx) * channels
            packed[:, lane : lane + channels, row + made.padding[0], column + made.padding[1]] = weight[:, :, r, s]
    return packed


@dataclass(frozen=True)
class Problem:
    """A convolution: ``batch`` images, ``channels`` output channels, one or two sources of equal output size, and the stages of
    its epilogue. What follows from that is kept: thousands of configurations are asked about one problem."""

    batch: int
    channels: int
    sources: tuple[Source, ...]
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    out: str = ""
    """Element type of the result; "": ``dtype``."""
    residual_dtype: str = ""
    """Element type of the residual, of the result's size; "": the result's."""
    zero_point: bool = False
    """Whether an integer result has a zero point other than 0."""
    prologue: tuple[render.Stage, ...] = ()
    """What is done to the pixels before they are multiplied (see :func:`.render.prologue`)."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.sources) <= 2 or len({source.output() for source in self.sources}) != 1:
            raise InternalError("a convolution has one or two sources with the same output size")
        if self.dtype not in render.WGMMA_KINDS or self.out_dtype not in ITEM:
            raise InternalError(f"no kernel turns {self.dtype} into {self.out_dtype}")
        if any(source.channels * self.item % 16 for source in self.sources) or self.channels * self.out_item % 16:
            raise InternalError("TMA addresses 16 bytes: pad the channels to multiples of 8 (of 8-bit elements: 16)")
        if self.item == 2 and self.out_dtype not in (self.dtype, "float32"):
            raise InternalError(f"no kernel turns {self.dtype} into {self.out_dtype}")
        if self.item == 4 and self.out_dtype != "float32":
            raise InternalError(f"no kernel turns {self.dtype} into {self.out_dtype}")
        if self.prologue and (self.item != 2 or [s.mode for s in self.sources] != [ROWS]):
            raise InternalError("a prologue is for 16-bit pixels that are read once each")

    @property
    def gated(self) -> bool:
        """Whether the prologue reads a factor per image and channel."""
        return any(stage[0] == "gate" for stage in self.prologue)

    @property
    def helpers(self) -> int:
        """Threads of a block besides the configuration's: those that apply the prologue."""
        return 128 if self.prologue else 0

    @cached_property
    def out_dtype(self) -> str:
        """Element type of the result."""
        return self.out or self.dtype

    @cached_property
    def item(self) -> int:
        """Bytes of an operand's element."""
        return ITEM[self.dtype]

    @cached_property
    def out_item(self) -> int:
        """Bytes of a result's (and residual's) element."""
        return ITEM[self.out_dtype]

    @cached_property
    def out_span(self) -> int:
        """Bytes of 64 channels of a result, which is the span of its swizzle (fp32, which TMA does not store, has none)."""
        return 64 * self.out_item if self.out_item < 4 else 0

    @cached_property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.sources[0].output()

    @cached_property
    def pixels(self) -> int:
        """Output pixels over the batch."""
        return self.batch * math.prod(self.out_size)

    @cached_property
    def block(self) -> int:
        """BK: channels per K step."""
        widest = max(source.channels for source in self.sources) * self.item
        return (32 if widest <= 32 else 64 if widest <= 64 else 128) // self.item

    @cached_property
    def span(self) -> int:
        """Bytes of a row of a K step: 32, 64 or 128, also the swizzle's span."""
        return self.block * self.item

    def steps(self, source: Source) -> int:
        """K steps of one source."""
        return math.prod(source.kernel) * -(-source.channels // self.block)

    @cached_property
    def k_steps(self) -> int:
        """K steps over all sources."""
        return sum(self.steps(source) for source in self.sources)

    @cached_property
    def residual(self) -> bool:
        """Whether the epilogue reads a second tensor of the output's shape."""
        return render.uses_residual(self.epilogue)

    @cached_property
    def flops(self) -> int:
        """Multiply-adds counted as two, without padding."""
        return 2 * self.pixels * self.channels * sum(math.prod(s.kernel) * s.channels for s in self.sources)

    @cached_property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        read = sum(s.height * s.width * (s.pitch or s.channels) // math.prod(s.stride if s.kernel == (1, 1) else (1, 1))
                   for s in self.sources) * self.batch  # fmt: skip
        weights = self.k_steps * self.block * self.channels
        written = self.pixels * self.channels * self.out_item * (2 if self.residual else 1)
        return self.item * (read + weights) + written


@dataclass(frozen=True, order=True)
class Config:
    """A tile: ``wgm x wgn`` consumer warpgroups over channels x pixels, each of ``mt`` x 64 channels and ``bn`` pixels.

    ``stages``: ring depth; ``split``: blocks per cluster that share K; ``out_buffers``: output tiles in flight; ``stationary``:
    the weights of the block's K range are loaded once and kept; ``blocks``: blocks per multiprocessor that registers must allow;
    ``direct``: one tile per block, stored from registers (always so when ``split`` > 1). ``alternate``: two warpgroups take whole
    tiles in turn, one finishing while the other multiplies. ``share``: blocks of a cluster over channels x pixels; those of the
    same pixels (or channels) load their pixels (weights) once, by multicast.
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

    @property
    def sharers(self) -> int:
        """Blocks of a cluster that load together."""
        return math.prod(self.share)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.split * self.sharers

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

    @property
    def tile(self) -> tuple[int, int]:
        """Channels and pixels of a block's tile."""
        return self.wgm * self.mt * 64, self.wgn * self.bn

    @property
    def wide(self) -> bool:
        """More than 128 sums a thread: multiplying warps take registers from the loading ones."""
        return self.mt * self.bn > 256

    @property
    def threads(self) -> int:
        """Threads of a block: the consumer warpgroups and two loading warps (a warpgroup of which two idle, where wide)."""
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
        )

    def joint_tiles(self, problem: Problem) -> tuple[int, int]:
        """Tiles over the channels, and in all; those of a cluster that shares are one."""
        channels = -(-problem.channels // (self.tile[0] * self.share[0]))
        return channels, channels * -(-problem.pixels // (self.tile[1] * self.share[1]))


SHARES = ((1, 1), (2, 1), (1, 2))
"""Clusters that load together. Of two blocks, since multiprocessors come in pairs: clusters of four do not fill an H200, and a grid
of them took twice as long."""
WIDE_REGISTERS = 232
"""Of a multiplying thread where the loading warps give theirs up."""


def direct_bytes(m_tiles: int, columns: int, split: int) -> int:
    """Shared memory of one warpgroup's DirectStore: what the cluster's ranks send it, and the room to turn blocks around."""
    slots = -(-columns // 8 // split)
    return (m_tiles * slots * split * 2048 if split > 1 else 0) + 4 * m_tiles * slots * 640


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block."""
    span = problem.span
    weights = config.tile[0] * span
    stage = config.tile[1] * span + (0 if config.stationary else weights)
    operands = config.stages * stage + (-(-problem.k_steps // config.split) * weights if config.stationary else 0)
    operands = -(-operands // 1024) * 1024
    if config.stores_directly:
        return _BARRIER_BYTES + operands + config.wgm * config.wgn * direct_bytes(config.mt, config.bn, config.split)
    buffers = config.out_buffers * config.turns
    return _BARRIER_BYTES + operands + buffers * config.tile[0] * config.tile[1] * problem.out_item


def register_limit(threads: int, blocks: int, registers: int = 65536) -> int:
    """Registers per thread when that many blocks share a multiprocessor: its four schedulers divide the warps."""
    warps = -(-blocks * -(-threads // 32) // 4)
    return min(248, registers // 128 // warps // 8 * 8)


def refuse(problem: Problem, config: Config, *, shared: int = 232448, registers: int = 65536) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if config.bn % 8 or not 8 <= config.bn <= 256 or config.mt not in (1, 2) or config.wgm * config.wgn not in (1, 2):
        return "not a tile of this kernel"
    if config.alternate and (config.groups != 2 or config.blocks > 1 or config.stores_directly):
        return "two warpgroups of a block alone on its multiprocessor take tiles in turn"
    if any(source.pitch for source in problem.sources):
        return "pixels that overlap are for the patch kernel"
    if problem.out_item == 4 and not config.stores_directly:
        return "fp32 results are stored from registers"
    if not render.wgmma_columns(config.bn, problem.dtype):
        return f"wgmma has no tile of {config.bn} columns of {problem.dtype}"
    if config.tile[0] > 256:
        return "a weight tile of more than 256 rows exceeds a TMA box"
    if config.split > 16 or config.split > problem.k_steps:
        return f"{problem.k_steps} K steps cannot be split {config.split} ways"
    if config.stages == 1 and problem.k_steps > config.split:
        return "a stage is handed back when the next one is being read: one stage holds one K step"
    if not 1 <= config.stages <= 24 or not 1 <= config.out_buffers <= 4:
        return "too many stages"
    if (needed := shared_bytes(problem, config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    if config.blocks > 1 and config.blocks * (shared_bytes(problem, config) + 1024) > shared + 1024:
        return "shared memory does not allow that many blocks per multiprocessor"
    if problem.prologue and (config.alternate or config.sharers > 1 or config.wide):
        return "a prologue is for blocks of their own whose warpgroups share a tile, of up to 128 sums a thread"
    threads = config.threads + problem.helpers
    limit = WIDE_REGISTERS if config.wide else register_limit(threads, config.blocks, registers)
    needed = (
        config.mt * config.bn // 2 * (2 if config.mt * config.bn <= TWO_SETS else 1)
    )  # two sets of sums when they are short
    if config.stores_directly:
        needed += -(-config.bn // 8 // config.split) * (2 + max(2, problem.out_item) * config.mt)
    if needed + 40 > limit:
        return f"{needed} accumulators and addresses exceed {limit} registers"
    if problem.item == 1 and (config.alternate or config.sharers > 1):
        return "tiles of 8-bit operands that take turns or load together have not been measured"
    if config.sharers > 1 and (reason := _refuse_sharing(config)):
        return reason
    if config.wide and (config.groups != 2 or config.blocks > 1 or config.stores_directly):
        return "more than 128 accumulators a thread are for two warpgroups of a block alone on its multiprocessor"
    if config.mt * config.bn > 320:
        return "more than 160 accumulators a thread"
    if config.direct and (config.stationary or config.mt * config.bn > 128):
        return "direct stores are for small tiles, one per block"
    return None


def _refuse_sharing(config: Config) -> str | None:
    """Why blocks of a cluster cannot load together, or None."""
    over_channels, over_pixels = config.share
    if config.share not in SHARES:
        return "not a cluster of this kernel"
    if config.bn % (8 * over_channels) or config.tile[0] % (8 * over_pixels):
        return "the parts that blocks load for one another are whole groups of eight rows"
    if config.stationary or config.stores_directly:
        return "blocks that load together keep no weights, and store by TMA"
    return None


def recipe(problem: Problem, config: Config, arch: str = "sm_90a", *, checked: bool = False) -> Recipe:
    """What to compile. Shapes are parameters: problems that share modes, epilogue and configuration share the cubin.

    ``checked`` makes a wait that never ends trap instead of hanging the GPU."""
    modes = [source.mode for source in problem.sources] + [-1]
    defines = {
        "WGM": config.wgm, "WGN": config.wgn, "MT": config.mt, "BN": config.bn, "BK": problem.block, "STAGES": config.stages,
        "SPLIT": config.split,
        "DIRECT": int(config.stores_directly), "OUT_BUFFERS": config.out_buffers, "WEIGHTS_STATIONARY": int(config.stationary),
        "ALTERNATE": int(config.alternate), "SHARE_CHANNELS": config.share[0], "SHARE_PIXELS": config.share[1],
        "MIN_CTAS": config.blocks, "MODE0": modes[0], "MODE1": modes[1],
        "PROLOGUE": int(bool(problem.prologue)), "GATED": int(problem.gated),
    }  # fmt: skip
    return Recipe(
        "conv_sm90.cu", arch, {"generated.cuh": generated(problem, defines, config.bn)}, options(problem, checked)
    )


def generated(problem: Problem, tile: Mapping[str, int], columns: int) -> str:
    """The header of a Hopper convolution kernel: its ``tile``, the element types, the epilogue and wgmma of ``columns`` columns."""
    types = {
        "HAS_RESIDUAL": int(problem.residual), "OPERAND_ITEM": problem.item, "OUT_ITEM": problem.out_item,
        "INTEGER": int(problem.dtype in ("int8", "uint8")), "OUT_FLOAT8": int(problem.out_dtype == "float8_e4m3fn"),
        "OUT_ZERO": int(problem.zero_point), "RESIDUAL_UNSIGNED": int((problem.residual_dtype or problem.out_dtype) == "uint8"),
    }  # fmt: skip
    stages = render.epilogue(problem.epilogue)
    if problem.item == 1:
        stages = render.runtime_epilogue(problem.epilogue, problem.out_dtype in ("int8", "uint8"))
    before = [render.prologue(problem.prologue)] if problem.prologue else []
    parts = [render.constants({**tile, **types}), *before, stages, render.wgmma(columns, problem.dtype), ""]
    return "\n".join(parts)


def options(problem: Problem, checked: bool) -> tuple[str, ...]:
    """Compiler options. Quantized results are exact to the bit, so their arithmetic is not contracted."""
    return ("--std=c++17", "--use_fast_math", *(("--fmad=false",) if problem.item == 1 else ()),
            *(("-DDTYPE_BF16",) if "bfloat16" in (problem.dtype, problem.out_dtype) else ()),
            *(("-DBARRIER_TRAP",) if checked else ()))  # fmt: skip


def pack_weights(problem: Problem, weights: Sequence[Array]) -> Array:
    """OIHW weights of each source -> ``[channels, k_steps * block]`` in the kernel's K order, zero-filled. Keeps the dtype.

    Where results have 8 bits, there are rows to a multiple of 16, and of each 16 row r + 8 h is channel 2 r + h: a thread of
    the kernel then holds neighbouring channels."""
    rows: list[Array] = []
    for weight in weights:
        out, channels, taps_h, taps_w = weight.shape
        packed = np.zeros((out, taps_h, taps_w, -(-channels // problem.block) * problem.block), weight.dtype)
        packed[..., :channels] = weight.transpose(0, 2, 3, 1)
        rows.append(packed.reshape(out, -1))
    joined = np.concatenate(rows, axis=1)
    if problem.out_item == 1:
        full = np.zeros((-(-len(joined) // 16) * 16, joined.shape[1]), joined.dtype)
        full[: len(joined)] = joined
        joined = full.reshape(-1, 8, 2, joined.shape[1]).transpose(0, 2, 1, 3).reshape(full.shape)
    return np.ascontiguousarray(joined)


# ---- launch ---------------------------------------------------------------------------------------------------------------


MAX_CONSTANTS = 8
"""Of a quantized epilogue's stages."""


@dataclass(frozen=True)
class Requantize:
    """The numbers of a quantized epilogue that are the whole tensor's: ``Requantize`` of ``kernels/conv_element.cuh``."""

    residual_scale: float = 1.0
    residual_offset: float = 0.0
    low: float = -128.0
    high: float = 127.0
    zero: int = 0


def put_requantize(block: ParameterBlock, stages: Sequence[render.Stage], requantize: Requantize | None) -> None:
    """The numbers at the end of a parameter block, with the constants of the stages."""
    r = requantize or Requantize()
    constants = render.constants_of(stages) if requantize is not None else []
    if len(constants) > MAX_CONSTANTS:
        raise InternalError(f"a quantized epilogue has at most {MAX_CONSTANTS} constants, not {len(constants)}")
    block.f32(r.residual_scale, r.residual_offset, r.low, r.high).i32(r.zero)
    block.f32(*constants, *[0.0] * (MAX_CONSTANTS - len(constants)))


class _Source(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in (
        "channel_blocks", "taps_h", "taps_w", "dilation_h", "dilation_w", "stride_h", "stride_w", "pad_h", "pad_w",
    )]  # fmt: skip


class _Params(ctypes.Structure):
    _fields_ = [
        ("maps", ctypes.c_ubyte * (5 * 128)),
        ("bias", ctypes.c_void_p), ("output", ctypes.c_void_p), ("residual", ctypes.c_void_p),
        *[(name, ctypes.c_int) for name in (
            "channels", "pixel_count", "out_h", "out_w", "channel_tiles", "tiles", "k_steps", "reverse",
        )],
        ("source", _Source * 2),
        *[(name, ctypes.c_float) for name in ("residual_scale", "residual_offset", "low", "high")],
        ("zero", ctypes.c_int), ("constants", ctypes.c_float * MAX_CONSTANTS),
        ("before", ctypes.c_void_p), ("gate", ctypes.c_void_p),
        *[(name, ctypes.c_int) for name in ("gate_pitch", "image_pixels", "images", "gate_channels")],
    ]  # fmt: skip


BEFORE = _Params.before.offset
"""Where the addresses of a prologue's constants and of its gate are."""
_PARAMS_BYTES = -(-ctypes.sizeof(_Params) // 64) * 64


@dataclass(frozen=True)
class Pointers:
    """Device addresses: NHWC sources, packed weights, fp32 bias (padded to a multiple of 4; of 8-bit operands: pairs of scale and
    bias), NHWC output, NHWC residual; of a prologue, pairs of scale and shift per input channel (whole K steps), and the gate."""

    sources: tuple[int, ...]
    weights: int
    bias: int
    output: int
    residual: int = 0
    before: int = 0
    gate: int = 0


def weight_rows(problem: Problem) -> int:
    """Rows of the packed weights."""
    return problem.channels if problem.out_item > 1 else -(-problem.channels // 16) * 16


def grid_blocks(problem: Problem, config: Config, device: Device) -> int:
    """Blocks to launch: every tile once for direct stores, a persistent grid otherwise."""
    channel_tiles, tiles = config.joint_tiles(problem)
    if config.stores_directly:
        return tiles * config.split
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


def parameters(
    problem: Problem, pointers: Pointers, maps: Sequence[bytes], requantize: Requantize | None = None
) -> Any:
    """The kernels' parameter block (a ctypes structure), but for the tile counts. ``maps``: weights, pixels, pixels, output,
    residual."""
    params = _Params()
    ctypes.memmove(params.maps, b"".join(maps), 5 * 128)
    params.bias, params.output, params.residual = pointers.bias, pointers.output, pointers.residual or None
    params.channels, params.pixel_count = problem.channels, problem.pixels
    params.out_h, params.out_w = problem.out_size
    params.k_steps = problem.k_steps
    params.before, params.gate = pointers.before or None, pointers.gate or None
    params.gate_pitch = params.gate_channels = problem.sources[0].channels
    params.image_pixels, params.images = math.prod(problem.out_size), problem.batch
    for slot, source in zip(params.source, problem.sources, strict=False):
        slot.channel_blocks = -(-source.channels // problem.block)
        slot.taps_h, slot.taps_w = source.kernel
        slot.dilation_h, slot.dilation_w = source.dilation
        slot.stride_h, slot.stride_w = source.stride
        slot.pad_h, slot.pad_w = source.padding[0], source.padding[1]
    if requantize is not None:
        for name in ("residual_scale", "residual_offset", "low", "high", "zero"):
            setattr(params, name, getattr(requantize, name))
        constants = render.constants_of(problem.epilogue)
        if len(constants) > MAX_CONSTANTS:
            raise InternalError(f"a quantized epilogue has at most {MAX_CONSTANTS} constants, not {len(constants)}")
        params.constants[: len(constants)] = constants
    return params


def raw_bytes(params: Any) -> bytes:
    """The block as the kernel takes it: tensor maps make it a multiple of 64 bytes."""
    return bytes(params).ljust(_PARAMS_BYTES, b"\0")


def _source_map(problem: Problem, source: Source, config: Config, pointer: int) -> bytes:
    span = problem.span
    n = problem.batch
    if source.pitch:
        raise InternalError("pixels that overlap are for the patch kernel")
    if source.mode == ROWS:
        rows = n * source.height * source.width
        strides = (source.channels * problem.item,)
        box = (problem.block, config.bn // config.share[0])
        return encode_tiled(problem.dtype, pointer, (source.channels, rows), strides, box, span)
    return encode_im2col(
        problem.dtype, pointer, (n, source.height, source.width, source.channels), kernel=source.kernel, stride=source.stride,
        padding=source.padding, dilation=source.dilation, pixels=config.bn // config.share[0], channels=problem.block, swizzle=span,
    )  # fmt: skip


def bind(
    problem: Problem,
    config: Config,
    device: Device,
    function: Function,
    pointers: Pointers,
    *,
    reverse: bool = False,
    dependent: bool = True,
    label: str = "",
    requantize: Requantize | None = None,
) -> Launch:
    """The launch of the problem on these buffers. ``reverse`` walks the pixels from the end, to meet what L2 still holds."""
    block, depth = problem.block, problem.k_steps * problem.block
    shape, strides = (depth, weight_rows(problem)), (depth * problem.item,)
    maps = [
        encode_tiled(
            problem.dtype, pointers.weights, shape, strides, (block, config.tile[0] // config.share[1]), problem.span
        ),
        *[
            _source_map(problem, source, config, at)
            for source, at in zip(problem.sources, pointers.sources, strict=True)
        ],
    ]
    if len(maps) == 2:
        maps.append(maps[1])
    item, dtype = problem.out_item, problem.out_dtype
    shape, strides, box = (problem.channels, problem.pixels), (problem.channels * item,), (64, config.bn)
    maps.append(encode_tiled(dtype, pointers.output, shape, strides, box, problem.out_span))
    maps.append(encode_tiled(dtype, pointers.residual or pointers.output, shape, strides, box, problem.out_span))
    params = parameters(problem, pointers, maps, requantize)
    params.channel_tiles, params.tiles = config.joint_tiles(problem)
    params.reverse = int(reverse)
    return Launch(
        function, (grid_blocks(problem, config, device), 1, 1), config.threads + problem.helpers, [raw_bytes(params)],
        shared=shared_bytes(problem, config), cluster=config.cluster, dependent=dependent, label=label or str(config),
    )  # fmt: skip


def load(
    problem: Problem, config: Config, cache: KernelCache, arch: str = "sm_90a", *, checked: bool = False
) -> Function:
    """The compiled kernel on the current device."""
    cubin = cache.get(recipe(problem, config, arch, checked=checked))
    return Function(cubin, "conv_sm90", shared=shared_bytes(problem, config), wide_cluster=config.split > 8)
