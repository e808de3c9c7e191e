"""Plans of the depthwise convolution with loads by threads (``depthwise.cu``): any stride, dilation and padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv.depthwise_cost import estimate
from optdnn.kernels.conv.depthwise_problem import (
    Config,
    Problem,
    begins,
    met,
    no_kernel,
    reach,
    squeeze_mode,
    tiles,
    weight_item,
)
from optdnn.kernels.conv.parameters import put_requantize
from optdnn.kernels.launch import BLOCK_SHARED, Launch, Parameters, template_options
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.ranking import varied
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

__all__ = [
    "Config",
    "Problem",
    "candidates",
    "estimate",
    "generated",
    "launch",
    "launch_squeeze",
    "no_kernel",
    "options",
    "pack_weights",
    "reach",
    "recipe",
    "refuse",
    "squeeze_mode",
    "squeeze_recipe",
    "tiles",
    "weight_item",
]

MAX_TAPS, MAX_WIDE_TAPS = 128, 32
"""Most taps of a filter: in general, and of fp32. With more fp32 taps, the compiler hoists loads until registers spill."""
TAPS_OF_BANDS, LOADED_ROWS = 49, 1.5
"""Most taps of a band of a larger filter; cost of a band, in rows of the filter, of the rows of the image that it loads again."""
MOST_PRODUCTS = 49 * 64
"""Most multiplications of a thread. They are fully unrolled."""
MOST_IN_STEPS = 96
"""Most elements of a row of inputs where weights come from L1, with eight channels: the compiler loads many weights at a time."""
TILES = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (2, 3), (2, 4), (4, 2), (4, 4), (2, 7))
"""Rows and columns of a thread's results."""
TALL = ((1, 1), (2, 1), (4, 1), (8, 1))
"""Rows and columns of a thread's results in images of one column, which are sequences."""


def refuse(problem: Problem, config: Config, *, shared: int = BLOCK_SHARED) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: bytes that a block can have (99 KB on sm_86)."""
    s = problem.source
    if config.lanes not in (4, 8) or problem.channels % config.lanes:
        return f"{problem.channels} channels are not a multiple of {config.lanes}"
    if config.lanes * problem.item > 16:
        return f"{config.lanes} elements exceed an access of 16 bytes"
    if config.lanes > problem.unit:
        return f"pixels that begin at multiples of {problem.unit} elements are not read {config.lanes} at a time"
    if (why := no_kernel(problem)) is not None:
        return why
    if not 1 <= config.sharers <= problem.steps:
        return f"{config.sharers} threads cannot share {problem.steps} steps"
    if problem.grown and any(n % step for n, step in zip((config.tile_h, config.tile_w), s.stride, strict=True)):
        return "its tiles do not begin at multiples of the stride"
    if (taps := math.prod(problem.unrolled)) > MAX_TAPS:
        return f"{taps} taps exceed {MAX_TAPS}: weights would not fit"
    if problem.item == 4 and taps > MAX_WIDE_TAPS:
        return f"{taps} taps of fp32 exceed the registers"
    if min(problem.out_size) < 1:
        return "the output is empty"
    if not 1 <= config.threads <= 256:
        return f"{config.threads} threads are not a block of this kernel"
    most = 32 if problem.item == 4 and problem.steps > 1 else 64
    if (sums := problem.matrices * config.sums) > most:
        return f"more than {most} accumulators per thread"
    if (products := sums * met(problem)) > MOST_PRODUCTS:
        return f"{products} multiplications a thread: its code would be too long"
    if (needed := shared_bytes(problem, config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    _, columns = reach(problem, (config.tile_h, config.tile_w))
    if columns * config.lanes > (MOST_IN_STEPS if problem.steps > 1 and config.lanes > 4 else 128):
        return f"a row of {columns} input vectors does not fit the registers"
    _, x, y = tiles(problem, config)
    if problem.batch > 65535 or x * y > 65535:
        return "the grid is too large"
    if (
        max(s.height * s.width * problem.pitch[0], *problem.apart, *map(abs, problem.gaps), problem.second[1])
        >= 1 << 31
    ):
        return "an image has more elements than the kernel addresses"
    return None


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: the weights of large filters, and later the squeeze's sums or those of threads that share frames,
    at the same addresses."""
    weights = problem.matrices * problem.taps * config.vectors * config.lanes * weight_item(problem)
    weights = weights if problem.weights_in_shared else 0
    sums = config.threads * config.lanes * 4 if problem.squeeze else 0
    sums = max(sums, (config.sharers - 1) * (config.threads // config.sharers) * config.sums * 4)
    return max(weights, sums)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes are parameters: problems that share filter, stride, epilogue and tile share the cubin."""
    s = problem.source
    defines = {
        "LANES": config.lanes, "KERNEL_H": problem.unrolled[0], "KERNEL_W": problem.unrolled[1], "STRIDE_H": s.stride[0], "STRIDE_W": s.stride[1],
        "DILATION_H": s.dilation[0], "DILATION_W": s.dilation[1], "TILE_H": config.tile_h, "TILE_W": config.tile_w,
        "MAX_THREADS": 128 if config.threads <= 128 else 256, "MIN_BLOCKS": config.blocks,
        "SQUEEZE": squeeze_mode(problem, config), "SHARERS": config.sharers,
    }  # fmt: skip
    return Recipe("depthwise.cu", arch, {"generated.cuh": generated(problem, defines)}, options(problem))


def generated(problem: Problem, tile: Mapping[str, int]) -> str:
    """The header of a depthwise kernel: its ``tile``, the element types, the epilogue."""
    types = {
        "HAS_RESIDUAL": int(problem.residual), "OPERAND_ITEM": problem.item, "OUT_ITEM": problem.out_item, "INTEGER": 0,
        "OUT_FLOAT8": 0, "OUT_ZERO": int(problem.zero_point), "INPUT_UNSIGNED": int(problem.dtype == "uint8"),
        "RESIDUAL_UNSIGNED": int((problem.residual_dtype or problem.out_dtype) == "uint8"), "RELU_BEFORE": int(problem.relu),
        "BESIDE": problem.matrices - 1, **_steps(problem), **({"CHANNEL_STAGES": 1} if render.reads_channels(problem.epilogue) else {}),
    }  # fmt: skip
    stages = render.epilogue(problem.epilogue, exact=problem.item == 4)
    if problem.beside is not None:
        stages += "\n" + render.epilogue(problem.beside, "epilogue_beside", exact=problem.item == 4)
    if problem.item == 1:
        stages = render.runtime_epilogue(problem.epilogue, problem.out_item == 1)
    return "\n".join([render.constants({**tile, **types}), stages, ""])


def _steps(problem: Problem) -> dict[str, int]:
    """The constants of a walk along the depth of volumes and over bands of the filter, and of a transposed convolution."""
    s, depth, transposed = problem.source, problem.source.depth, problem.grown is not None
    found = {"TRANSPOSED": int(transposed), "KERNEL_D": 0 if depth is None else depth.taps, "BANDS": problem.bands}
    found |= {
        f"PHASE_{axis}": p % stride if transposed else 0
        for axis, p, stride in zip("HW", s.padding[:2], s.stride, strict=True)
    }
    return found | ({} if depth is None else {"STRIDE_D": depth.stride, "DILATION_D": depth.dilation})


def options(problem: Problem) -> tuple[str, ...]:
    """Compiler options. Products of 8-bit images are summed exactly with or without contraction; nothing else may be contracted."""
    return template_options(problem.dtype, problem.out_dtype, exact=problem.item == 1, fast=problem.item != 4)


def pack_weights(weight: Array, band: int = 0) -> Array:
    """``[channels, 1, taps …]`` weights -> ``[taps, channels]``. Keeps the dtype. ``band``: as of a problem; rows of zeros complete the last
    band of each frame."""
    channels, more = len(weight), rows_held(weight.shape[-2], band) - weight.shape[-2]
    if weight.shape[1] != 1:
        raise InternalError("a depthwise convolution has one input channel per output channel")
    padded = np.pad(weight, [(0, 0)] * (weight.ndim - 2) + [(0, more), (0, 0)])
    return np.ascontiguousarray(padded.reshape(channels, -1).T)


def rows_held(rows: int, band: int) -> int:
    """Rows of packed weights of a filter's frame of so many ``rows``: whole bands."""
    return -(-rows // band) * band if band else rows


def rows_at_a_time(kernel: tuple[int, int], item: int) -> int:
    """Rows of a filter that a thread should add at a time; 0: all, since its code is short enough, or since a single row is too long.
    ``item``: bytes of an element."""
    (high, wide), most = kernel, MAX_WIDE_TAPS if item == 4 else MAX_TAPS
    if high * wide <= most or wide > most:
        return 0
    fitting = [n for n in range(1, high) if n * wide <= min(most, TAPS_OF_BANDS)] or [1]
    return min(fitting, key=lambda n: (-(-high // n) * (n + LOADED_ROWS), n))


def launch(
    problem: Problem,
    config: Config,
    gpu: GpuFacts,
    requantize: Requantize | None = None,
    mean: QuantizedStore | None = None,
) -> Launch:
    """The launch.

    Operands: ``input``, ``output``, ``weights`` (packed; of 8-bit images 16-bit ones), ``bias`` (fp32 [channels]; of 8-bit images
    scale and bias, [channels, 2]; with per-channel stages bias and their operands, [channels, 4]) and ``residual``. A pair adds ``second``, ``second_weights`` and ``second_bias``. A squeeze adds,
    by :func:`squeeze_mode`, ``sums`` (fp32 [batch, tiles, channels]; the tiles of all frames of a volume) or ``means`` ([batch, channels], of the result's type).
    ``mean``: how 8-bit means are computed from sums.
    """
    s, (out_h, out_w), mode = problem.source, problem.out_size, squeeze_mode(problem, config)
    blocks_c, blocks_x, blocks_y = tiles(problem, config)
    parameters = Parameters().pointer("input", "output", "weights", "bias", "residual" if problem.residual else None)
    parameters.pointer("sums" if mode == 1 else None, "means" if mode == 2 else None)
    parameters.i32(s.height, s.width, problem.channels // config.lanes, out_h, out_w, *begins(problem))
    # of volumes, also the frames of a volume and the gap behind it; the input's come later
    frames = [()] * 3 if s.depth is None else [(), *((s.depth.out, gap) for gap in problem.gaps[1:])]
    places = zip(problem.pitch, problem.apart, frames, strict=True)
    parameters.i32(*itertools.chain(*((pitch, apart, *more) for pitch, apart, more in places)))
    parameters.i32(config.vectors, config.strips_x, config.strips_y, blocks_x)
    (mean or QuantizedStore(1.0 / (out_h * out_w))).put(parameters)
    parameters.i32(four_bytes(problem.outside))
    if s.depth is not None:
        parameters.i32(s.depth.size, s.depth.out, -s.depth.first, problem.gaps[0])
    put_requantize(parameters, problem.epilogue, requantize)
    if problem.beside is not None:
        parameters.pointer("second", "second_weights", "second_bias").i32(*problem.second)
    grid, shared = (blocks_c, blocks_x * blocks_y, problem.batch), shared_bytes(problem, config)
    return parameters.launch(recipe(problem, config, gpu.arch), "depthwise", grid, config.threads, shared=shared)


def four_bytes(value: int) -> int:
    """Four times the byte of an 8-bit integer, as a signed 32-bit one."""
    return int(np.int32(np.uint32((value & 255) * 0x01010101).view(np.int32)))


def squeeze_recipe(problem: Problem, arch: str = "sm_90a") -> Recipe:
    """The kernel of :func:`launch_squeeze`."""
    kinds = {"bfloat16": ("-DDTYPE_BF16",), "float32": ("-DWIDE",)}
    kind = ("-DNARROW",) if problem.out_item == 1 else kinds.get(problem.out_dtype, ())
    return Recipe("squeeze_finish.cu", arch, {}, ("--std=c++17", "--use_fast_math", *kind))


def launch_squeeze(problem: Problem, tiles_per_image: int, gpu: GpuFacts, mean: QuantizedStore | None = None) -> Launch:
    """The second launch of a squeeze in mode 1: ``sums`` [batch, tiles, channels] -> ``means``."""
    count, images = problem.averaged
    mean = mean or QuantizedStore(1.0 / (images * math.prod(problem.out_size)))
    return finish_squeeze(squeeze_recipe(problem, gpu.arch), count, images * tiles_per_image, problem.channels, mean)


def finish_squeeze(recipe: Recipe, batch: int, tiles_per_image: int, channels: int, mean: QuantizedStore) -> Launch:
    """The launch of a :func:`squeeze_recipe`."""
    parameters = Parameters().pointer("sums", "means").i32(tiles_per_image, channels)
    mean.put(parameters)
    return parameters.launch(recipe, "squeeze_finish", (-(-channels // 32), batch, 1), 512)


def _tiles_of(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Rows and columns of a thread's results to try. Those of a transposed convolution are multiples of its strides."""
    of_form = TALL if problem.out_size[1] == 1 else TILES
    if problem.grown is None:
        return of_form
    high, wide = problem.source.stride
    return tuple((y * high, x * wide) for y, x in of_form)


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first; at most two per thread tile."""
    out_h, out_w = problem.out_size
    found: list[tuple[float, Config]] = []
    for lanes in (8, 4) if problem.channels % 8 == 0 and problem.item < 4 else (4,):
        vectors = problem.channels // lanes
        widths = [
            v for v in (8, 16, 12, 10, 9, 6, 5, 4, 7, 11, 13, 15, 14, 3, 2, 1) if v <= vectors and vectors % v == 0
        ][:3]
        if vectors > 16 and (not widths or widths[0] < 4):
            widths.append(8)
        for tile_h, tile_w in _tiles_of(problem):
            for v in widths:
                for threads in (64, 128, 256):
                    strips, wide = threads // v, -(-out_w // tile_w)
                    for strips_x in sorted({min(strips, wide), min(strips, -(-wide // 2))}):
                        if strips_x < 1:
                            continue
                        strips_y = max(1, min(strips // strips_x, -(-out_h // tile_h)))
                        for sharers in {1, *(-(-problem.steps // n) for n in (1, 2, 3))}:
                            config = Config(tile_h, tile_w, v, strips_x, strips_y, lanes, sharers=sharers)
                            if refuse(problem, config, shared=device.shared_per_block) is None:
                                found.append((estimate(problem, config, device), config))
    return varied(set(found), lambda c: (c.tile_h, c.tile_w, c.lanes, c.sharers), limit)
