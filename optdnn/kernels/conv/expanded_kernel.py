"""Plans of a 1x1 convolution and the depthwise one after it in one launch (``expanded_sm90.cu``). NHWC, 16-bit.

``out[n, y, x, c] = epilogue(sum over taps of round(between(sum over k of in[n, y*sh - ph + r*dh, x*sw - pw + s*dw, k] * e[c, k])) *
f[c, r, s])``, with zeros outside of the image (the first half of Sandler et al., "MobileNetV2", 2018). Optionally also
the means of the result, as in :mod:`optdnn.kernels.conv.depthwise_kernel`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv.depthwise_cost import CLOCK, MEMORY, finish_seconds
from optdnn.kernels.conv.separable_kernel import MAX_TAPS
from optdnn.kernels.launch import (
    BLOCK_SHARED,
    Launch,
    Parameters,
    at_once,
    no_room,
    template_options,
    tensor_map,
    whole_kib,
)
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

MOST_DEPTH = 320
"""Most channels of an image: shared memory holds all channels of a pixel."""
_HEAD_BYTES = 1024


@dataclass(frozen=True)
class Problem:
    """``filtered``: the depthwise convolution, with the channels of the result. Its input is the product of an image's
    pixels, which have ``depth`` channels and are ``pitch`` elements apart (0: ``depth``), followed by the stages
    ``between`` (the bias first)."""

    filtered: depthwise.Problem
    depth: int
    between: tuple[render.Stage, ...] = (("bias",),)
    pitch: int = 0

    @property
    def channels(self) -> int:
        """Channels of the result."""
        return self.filtered.channels

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        f, s = self.filtered, self.filtered.source
        written = f.batch * math.prod(f.out_size) * self.channels
        return 2 * (
            f.batch * s.height * s.width * self.depth + written + self.channels * (self.depth + math.prod(s.kernel))
        )


@dataclass(frozen=True, order=True)
class Config:
    """A warp takes ``strips`` strips, one below the other, of 16 output pixels, ``strip_w`` wide. A tile has ``grid_x``
    x ``grid_y`` of these. A block has ``channels`` channels; ``warps`` warps share each 16 of them. ``stages``: patches
    of the image in the ring; ``blocks``: blocks per multiprocessor that registers must allow."""

    strips: int
    strip_w: int
    grid_x: int
    grid_y: int
    channels: int
    warps: int
    stages: int = 2
    blocks: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.channels // 16 * self.warps * 32

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile's output pixels."""
        return self.grid_y * self.strips * (16 // self.strip_w), self.grid_x * self.strip_w

    def __str__(self) -> str:
        strips = f"exp{self.strips}w{self.strip_w}g{self.grid_x}x{self.grid_y}"
        return f"{strips}c{self.channels}w{self.warps}s{self.stages}b{self.blocks}"


def tiles(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Slabs of channels, and tiles along columns and rows."""
    (out_h, out_w), (high, wide) = problem.filtered.out_size, config.tile
    return -(-problem.channels // config.channels), -(-out_w // wide), -(-out_h // high)


def squeeze_mode(problem: Problem, config: Config) -> int:
    """The mode of the squeeze, as of :func:`optdnn.kernels.conv.depthwise_kernel.squeeze_mode`."""
    if not problem.filtered.squeeze:
        return 0
    return 2 if tiles(problem, config)[1:] == (1, 1) else 1


def patch(problem: Problem, config: Config) -> tuple[int, int]:
    """Rows and columns of a tile's patch of the image."""
    return problem.filtered.source.patch(config.tile)


def swizzle(problem: Problem) -> int:
    """Bytes of the swizzle of a pixel's channels; 0: none. Rows of an odd number of 16-byte chunks have no bank conflicts without
    it, and rows of twice an odd number have few."""
    return 0 if problem.depth % 32 else 64 if problem.depth % 64 else 128


def _bands(problem: Problem, config: Config) -> int:
    """Bands of 16 pixels in a patch."""
    return -(-math.prod(patch(problem, config)) // 16)


def _steps(problem: Problem) -> int:
    """K steps of the product."""
    return -(-problem.depth // 16)


def stage_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory of a patch of the image."""
    row = swizzle(problem) or problem.depth * 2
    return problem.depth * 2 // row * whole_kib(_bands(problem, config) * 16 * row)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: barriers, the ring, the matrix, the expanded patch and its masks, results
    before their store, and the squeeze's sums."""
    matrix, pitch = config.channels * (_steps(problem) * 2 | 1) * 16, (config.channels // 8 | 1) * 16
    own = _bands(problem, config) * 16 * (pitch + 4) + config.threads // 32 * 768
    sums = config.warps * config.channels * 4 if problem.filtered.squeeze else 0
    return _HEAD_BYTES + config.stages * stage_bytes(problem, config) + matrix + own + sums


def no_kernel(problem: Problem) -> str | None:
    """Why the kernel has no form for the problem, or None."""
    f, s = problem.filtered, problem.filtered.source
    if f.item != 2 or f.out_dtype != f.dtype:
        return f"it is for 16-bit floats, not {f.dtype}"
    for stages in (problem.between, f.epilogue):
        if stages[:1] != (("bias",),) or render.uses_residual(stages):
            return "its stages do not begin with a bias, or add a residual"
    if f.relu:
        return "a ReLU stands before the depthwise convolution"
    if math.prod(s.kernel) > MAX_TAPS:
        return f"{math.prod(s.kernel)} taps exceed {MAX_TAPS}"
    if max(s.dilation) > 1 and max(s.stride) > 1:
        return "its filter has both a stride and a dilation"
    if problem.depth % 8 or not 8 <= problem.depth <= MOST_DEPTH:
        return f"its image has {problem.depth} channels: not a multiple of 8, or more than {MOST_DEPTH}"
    if problem.channels % 8 or f.unit < 8 or min(f.out_size) < 1:
        return "its result is empty, or its number of channels is not a multiple of 8"
    return None


def refuse(problem: Problem, config: Config, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if (why := no_kernel(problem)) is not None:
        return why
    if config.strips not in (1, 2, 4) or config.strip_w not in (4, 8, 16) or config.channels % 16:
        return "not a tile of this kernel"
    if not 1 <= config.stages <= 4 or not 32 <= config.threads <= 512:
        return f"no block of {config.threads} threads and {config.stages} stages"
    if max(patch(problem, config)) > 256:
        return "the patch exceeds a TMA box"
    if (why := no_room(shared_bytes(problem, config), shared, config.blocks)) is not None:
        return why
    limit = register_limit(config.threads, config.blocks)
    if (found := registers(problem, config)) > limit:
        return f"about {found} registers per thread exceed {limit}"
    if math.prod(tiles(problem, config)) * problem.filtered.batch >= 1 << 31:
        return "more tiles than the kernel can count"
    return None


def register_limit(threads: int, blocks: int) -> int:
    """Most registers per thread: a multiprocessor's four schedulers divide the warps of its blocks."""
    return min(255, 512 // -(-(threads // 32) * blocks // 4) // 8 * 8)


def registers(problem: Problem, config: Config) -> int:
    """Estimated registers of a thread: filters and biases throughout, plus the larger of those of products and of filtering."""
    s = problem.filtered.source
    pairs, single = divmod(s.kernel[1], 2)
    words = -(-math.prod(s.kernel) // 2)
    held = 2 * (-(-words // 4) * 4) + 8 + 24
    filtering = config.strips * 8 + 8 * pairs + 4 * single + 24
    return held + max(filtering, 4 * (min(4, _steps(problem)) + 2) + 30)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes of tensors are parameters."""
    f, s = problem.filtered, problem.filtered.source
    defines = {
        "STRIPS": config.strips, "STRIP_W": config.strip_w, "GRID_X": config.grid_x, "GRID_Y": config.grid_y,
        "CHANNELS": config.channels, "WARPS": config.warps, "STAGES": config.stages, "MIN_BLOCKS": config.blocks,
        "KERNEL_H": s.kernel[0], "KERNEL_W": s.kernel[1], "STRIDE_H": s.stride[0], "STRIDE_W": s.stride[1],
        "DILATION_H": s.dilation[0], "DILATION_W": s.dilation[1], "DEPTH": problem.depth, "SWIZZLE": swizzle(problem),
        "SQUEEZE": squeeze_mode(problem, config),
    }  # fmt: skip
    parts = [render.constants(defines), render.between(problem.between[1:], f.dtype)]
    parts += [render.between(f.epilogue[1:], f.dtype, "after"), render.mma(f.dtype), ""]
    return Recipe("expanded_sm90.cu", arch, {"generated.cuh": "\n".join(parts)}, template_options(f.dtype))


def pack_expansion(weight: Array) -> Array:
    """``[channels, depth, 1, 1]`` -> ``[channels, depth to a multiple of 16]``, zero-filled. Keeps the dtype."""
    if weight.shape[2:] != (1, 1):
        raise InternalError("a 1x1 convolution has one tap")
    packed = np.zeros((len(weight), -(-weight.shape[1] // 16) * 16), weight.dtype)
    packed[:, : weight.shape[1]] = weight[:, :, 0, 0]
    return packed


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch: a grid that fills ``gpu``. Operands: ``input``, ``output`` (channels-last), ``expansion`` (packed) and ``shifts`` (its
    bias, fp32), ``filters`` (packed as of :mod:`optdnn.kernels.conv.separable_kernel`) and ``bias`` (fp32), and for a squeeze ``sums`` or
    ``means``, as of :func:`optdnn.kernels.conv.depthwise_kernel.launch`."""
    f, s = problem.filtered, problem.filtered.source
    (out_h, out_w), mode, (slabs, tiles_x, tiles_y) = f.out_size, squeeze_mode(problem, config), tiles(problem, config)
    count, item, span = tiles_x * tiles_y * f.batch, (problem.pitch or problem.depth) * 2, swizzle(problem)
    box_h, box_w = patch(problem, config)
    shape, strides = (problem.depth, s.width, s.height, f.batch), (item, s.width * item, s.height * s.width * item)
    box = (span // 2 or problem.depth, box_w, box_h, 1)
    parameters = Parameters().tensor_map(tensor_map("input", f.dtype, shape, strides, box, swizzle=span))
    parameters.pointer("output", "filters", "bias", "sums" if mode == 1 else None, "means" if mode == 2 else None)
    parameters.pointer("expansion", "shifts")
    parameters.i32(s.height, s.width, problem.channels, out_h, out_w, *s.padding[:2], f.pitch[1])
    parameters.i32(slabs, tiles_x, tiles_x * tiles_y, count).f32(1.0 / (out_h * out_w))
    per_slab = max(1, min(count, gpu.multiprocessors * at_once(shared_bytes(problem, config), config.blocks) // slabs))
    return parameters.launch(
        recipe(problem, config, gpu.arch), "expanded_sm90", per_slab * slabs, config.threads, shared=shared_bytes(problem, config)
    )  # fmt: skip


LAUNCH = 2.4e-6  # s until the first patch arrives, plus those from the last result on
TILE = 750.0  # cycles per tile in which a block waits
HALO = 2.2  # cycles for each part of a pixel that TMA loads
RESULT = 1100.0  # cycles from requesting a patch to its first byte
SPECIAL = 8.0  # cycles of a scheduler for an instruction of the special function units
TWO_TAPS, ONE_TAP = 6.5, 3.5  # cycles of a scheduler for a product of two taps, or of one
MATRICES = 4.0  # cycles of shared memory for four matrices of 8 x 8
# Fractions of the cycles of instruction issue, special function units, tensor cores and shared memory that add to a
# tile's cycles: these overlap little. Fitted to 143 timings on an H200 (within 9 % on average).
ISSUED, SPECIALS, TENSORS, SHARED = 0.92, 0.28, 0.32, 0.78
# With fewer warps on a multiprocessor, a tile takes longer by LONELY for each missing warp.
FEW_WARPS, LONELY = 12, 0.03


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    f = problem.filtered
    slabs, tiles_x, tiles_y = tiles(problem, config)
    count, together = tiles_x * tiles_y * f.batch, at_once(shared_bytes(problem, config), config.blocks)
    bands, places = _bands(problem, config), config.grid_x * config.grid_y
    mine, way = -(-bands // config.warps), -(-places // config.warps)
    work = [mine * x + way * y for x, y in zip(_band(problem)[:3], _place(problem, config)[:3], strict=True)]
    shared = (bands * _band(problem)[3] + places * _place(problem, config)[3]) * config.channels / 16
    slots = sum(part * share for part, share in zip(work, (ISSUED, SPECIALS, TENSORS), strict=True))
    tile = slots * config.threads / 128 + SHARED * shared
    pixels = math.prod(patch(problem, config))
    load = HALO * pixels * (problem.depth * 2 // (swizzle(problem) or problem.depth * 2))
    per_block = -(-count // max(1, device.multiprocessors * together // slabs))
    full = min(together, -(-slabs * count // device.multiprocessors))
    tile *= 1 + LONELY * max(0.0, FEW_WARPS - together * config.threads / 32)
    waits = TILE + (load + RESULT if config.stages == 1 and per_block > 1 else 0.0)
    compute = per_block * max(tile * full + waits, load * full) / CLOCK
    moved = pixels * problem.depth + math.prod(config.tile) * config.channels
    l2 = slabs * count * moved * 2 / 5.0e12
    second = finish_seconds(problem.filtered, squeeze_mode(problem, config))
    return LAUNCH + max(compute, l2, problem.bytes / MEMORY / 0.85) + second


def _band(problem: Problem) -> tuple[float, float, float, float]:
    """Costs of a warp's 16 pixels x 16 channels of the product: issue slots, and cycles of special function units,
    tensor cores and shared memory."""
    own, slow = _activation(problem.between)
    steps = _steps(problem)
    loads = steps if steps <= 4 else 2 * steps
    return 8 * own + loads + 2 * steps + 20, 8 * slow * SPECIAL, 2 * TWO_TAPS * steps, MATRICES * (loads + 1.5)


def _place(problem: Problem, config: Config) -> tuple[float, float, float, float]:
    """The same costs for a warp's strips x 16 channels of the depthwise convolution."""
    f, s, strip_h = problem.filtered, problem.filtered.source, 16 // config.strip_w
    own, slow = _activation(f.epilogue)
    pairs, single = divmod(s.kernel[1], 2)
    rows = {m * strip_h * s.stride[0] + r * s.dilation[0] for m in range(config.strips) for r in range(s.kernel[0])}
    products, loads = config.strips * s.kernel[0] * 2, len(rows) * (2 * pairs + single)
    issued = loads + products * (pairs + single) + 2 * math.prod(s.kernel) + 30.0
    issued += config.strips * (8 * own + 34 + (14 if f.squeeze else 0))
    multiplied = products * (pairs * TWO_TAPS + single * ONE_TAP)
    shared = MATRICES * (loads * _ways(problem, config) + 2 * config.strips)
    return issued, config.strips * 8 * slow * SPECIAL, multiplied, shared


def _ways(problem: Problem, config: Config) -> int:
    """Bank conflicts, as a factor, of a matrix whose rows are eight pixels of a strip in two rows of the patch. 16
    bytes are one of eight bank groups."""
    if config.strip_w > 4:
        return 1
    _, wide = patch(problem, config)
    row = problem.filtered.source.stride[0] * wide
    return max(Counter((x + y * row) * (config.channels // 8 | 1) % 8 for x in range(4) for y in range(2)).values())


def _activation(stages: tuple[render.Stage, ...]) -> tuple[float, float]:
    """Instructions per element: those of the stages after the bias, with the rounding, and those on the special function units."""
    slow = [str(name) for name, *_ in stages[1:] if name in render.INEXACT]
    shared = stages[-1] == ("silu",)  # two elements share a reciprocal
    return 0.5 + len(stages) - 1 - len(slow) + 6.5 * len(slow), 2.0 * len(slow) - 0.5 * shared


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first; at most two per tile."""
    if no_kernel(problem) is not None or device.capability[0] != 9:
        return []
    found = [(estimate(problem, c, device), c) for c in _configs(problem, device)]
    return varied(found, lambda c: (c.tile, c.channels), limit)


def _configs(problem: Problem, device: GpuFacts) -> Iterator[Config]:
    out_h, out_w = problem.filtered.out_size
    whole = [c for c in range(16, min(160, problem.channels) + 1, 16) if problem.channels % c == 0]
    for channels, strips, strip_w in product(whole or [32, 64], (1, 2, 4), (4, 8, 16)):
        wide, high = -(-out_w // strip_w), -(-out_h // (strips * 16 // strip_w))
        if (strip_w > 4 and strip_w >= 2 * out_w) or (strips > 1 and strips * 16 // strip_w >= 2 * out_h):
            continue
        across, down = {wide, -(-wide // 2), -(-wide // 4)}, {min(high, n) for n in (1, 2, 3, 4, 7)}
        for grid_x, grid_y, warps in product(sorted(across), sorted(down), (1, 2, 3, 4, 6, 8)):
            config = Config(strips, strip_w, grid_x, grid_y, channels, warps)
            if 128 <= config.threads <= 512 and warps <= grid_x * grid_y:
                yield from _resident(problem, config, device)


def _resident(problem: Problem, config: Config, device: GpuFacts) -> Iterator[Config]:
    """The configuration with two stages and as many blocks per multiprocessor as fit, and the one with one stage if
    more blocks fit then."""
    most, needed = 0, registers(problem, config)
    if needed > register_limit(config.threads, 1):
        return
    for stages in (2, 1):
        fit = device.shared_per_multiprocessor // (shared_bytes(problem, replace(config, stages=stages)) + 1024)
        blocks = next((n for n in range(min(4, fit), most, -1) if needed <= register_limit(config.threads, n)), 0)
        found = replace(config, stages=stages, blocks=blocks)
        if blocks and refuse(problem, found, shared=device.shared_per_block) is None:
            most = blocks
            yield found


def with_batch(problem: Problem, batch: int) -> Problem:
    """The problem with another number of images."""
    return replace(problem, filtered=replace(problem.filtered, batch=batch))
