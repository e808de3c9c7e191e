"""Plans of the depthwise convolution (``depthwise.cu``): NHWC, floats or 8-bit integers, any stride, dilation and padding.

``out[n, y, x, c] = epilogue(sum over taps of in[n, y*sh - ph + r*dh, x*sw - pw + s*dw, c] * w[r, s, c])``. Optionally also the
mean over all pixels of each image and channel (the squeeze of squeeze-and-excitation), summed in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv.cost import stages_issue
from optdnn.kernels.conv.parameters import put_requantize
from optdnn.kernels.conv.problem import ITEM, OneSource, Source
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.ranking import varied
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

MAX_TAPS, MAX_WIDE_TAPS = 128, 32
"""Most taps of a filter: in general, and of fp32. With more fp32 taps, the compiler hoists loads until registers spill."""
FEW_TAPS = 9
"""Most taps whose weights a thread keeps in registers."""
MOST_PRODUCTS = 49 * 64
"""Most multiplications of a thread. They are fully unrolled."""
MAX_PIXELS = 1 << 16
"""Most pixels of an image whose 8-bit values fp32 sums exactly."""
CLOCK = 1.75e9
MEMORY = 4.2e12
L2 = 3.2e12
TILES = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (2, 3), (2, 4), (4, 2), (4, 4), (2, 7))
"""Rows and columns of a thread's results."""
TALL = ((1, 1), (2, 1), (4, 1), (8, 1))
"""Rows and columns of a thread's results in images of one column, which are sequences."""
SECTOR = 32
"""Bytes of an L2 sector, the least that L2 moves."""
FINISH = 1.2e-6
"""Seconds of the launch that adds up the sums of tiles."""
RUNTIME_STAGES, SLOWER_BYTES = 8.0, 1.35
"""Factors of 8-bit launches: on the instructions of their stages, and on their compute time (42 timings of two networks)."""


@dataclass(frozen=True)
class Problem(OneSource):
    """``batch`` images of ``source`` (whose ``channels`` are also the output's). ``squeeze``: also write the channel means."""

    batch: int
    source: Source
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    squeeze: bool = False
    out: str = ""
    """Element type of the result; "": ``dtype``."""
    residual_dtype: str = ""
    """Element type of the residual; "": the result's."""
    zero_point: bool = False
    """Whether an 8-bit result has a zero point other than 0."""
    outside: int = 0
    """Value of the padding of 8-bit images: their zero point."""
    pitches: tuple[int, int] = (0, 0)
    """Elements from a pixel to the next of the input and of the result; 0: their channels."""
    unit: int = 8
    """4 or 8: pixels of input and result begin at multiples of this many elements."""
    relu: bool = False
    """Whether a ReLU is applied to the (float) input before the filter."""
    summed: bool = False
    """Whether the launch that reads a squeeze's means adds up the sums of tiles itself."""
    beside: tuple[render.Stage, ...] | None = None
    """Stages of a second convolution of the same form, whose result ``epilogue`` reads in place of a residual; None:
    there is none."""
    second_pitch: int = 0
    """Elements from a pixel to the next of the second convolution's image; 0: its channels."""
    grown: tuple[int, int] | None = None
    """Height and width of the result of a transposed convolution; None: the convolution is an ordinary one."""

    @cached_property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the result."""
        return self.grown or self.source.output()

    @property
    def images(self) -> int:
        """Images that the convolution reads. Of volumes, the result may have more frames or fewer."""
        depth = self.source.depth
        return self.batch if depth is None else self.batch // depth.out * depth.size

    @property
    def frames(self) -> int:
        """Frames that a frame of the result reads; 1 if images are not frames of volumes."""
        depth = self.source.depth
        return 1 if depth is None else -(-depth.taps // (depth.stride if self.grown else 1))

    @property
    def averaged(self) -> tuple[int, int]:
        """Images or volumes with means of their own, and images of each."""
        depth = self.source.depth
        return (self.batch, 1) if depth is None else (self.batch // depth.out, depth.out)

    @property
    def taps(self) -> int:
        """Taps of the filter."""
        depth = self.source.depth
        return math.prod(self.source.kernel) * (1 if depth is None else depth.taps)

    @property
    def weights_in_shared(self) -> bool:
        """Whether weights are read from shared memory, not from registers or, those of volumes, from L1."""
        return self.source.depth is None and self.taps > FEW_TAPS

    @property
    def residual(self) -> bool:
        """Whether the epilogue reads a second tensor of the result's shape."""
        return self.beside is None and super().residual

    @property
    def filters(self) -> int:
        """Convolutions of a launch."""
        return 1 if self.beside is None else 2

    @property
    def out_dtype(self) -> str:
        """Element type of the result."""
        return self.out or self.dtype

    @property
    def item(self) -> int:
        """Bytes of an element of the input."""
        return ITEM[self.dtype]

    @property
    def out_item(self) -> int:
        """Bytes of an element of the result."""
        return ITEM[self.out_dtype]

    @property
    def channels(self) -> int:
        """Channels of input and output."""
        return self.source.channels

    @property
    def pitch(self) -> tuple[int, int]:
        """Elements from a pixel to the next of the input and of the result."""
        read, written = self.pitches
        return read or self.channels, written or self.channels

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        s = self.source
        out = math.prod(self.out_size) * self.out_item * (2 if self.residual else 1)
        read = self.images * s.height * s.width * self.item + weight_item(self) * self.taps
        return self.channels * (self.filters * read + self.batch * out)


@dataclass(frozen=True, order=True)
class Strips:
    """A thread's ``tile_h`` x ``tile_w`` output pixels of ``lanes`` (4 or 8) channels; a block's ``vectors`` (of ``lanes``) x
    ``strips_x`` x ``strips_y`` threads."""

    tile_h: int
    tile_w: int
    vectors: int
    strips_x: int
    strips_y: int
    lanes: int = 8

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block's results."""
        return self.tile_h * self.strips_y, self.tile_w * self.strips_x


@dataclass(frozen=True, order=True)
class Config(Strips):
    """``blocks`` per multiprocessor that registers must allow. ``sharers`` threads share the frames under a filter."""

    blocks: int = 1
    sharers: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.vectors * self.strips_x * self.strips_y * self.sharers

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.tile_h * self.tile_w * self.lanes

    def __str__(self) -> str:
        strips = f"{self.strips_x}x{self.strips_y}" + (f"f{self.sharers}" if self.sharers > 1 else "")
        return f"dw{self.tile_h}x{self.tile_w}l{self.lanes}v{self.vectors}s{strips}b{self.blocks}"


def tiles(problem: Problem, config: Strips) -> tuple[int, int, int]:
    """Slabs of channel vectors, and tiles along columns and rows."""
    (out_h, out_w), (high, wide) = problem.out_size, config.tile
    return -(-problem.channels // config.lanes // config.vectors), -(-out_w // wide), -(-out_h // high)


def refuse(problem: Problem, config: Config, *, shared: int = 232448) -> str | None:
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
    if not 1 <= config.sharers <= problem.frames:
        return f"{config.sharers} threads cannot share {problem.frames} frames"
    if problem.grown and any(n % step for n, step in zip((config.tile_h, config.tile_w), s.stride, strict=True)):
        return "its tiles do not begin at multiples of the stride"
    if math.prod(s.kernel) > MAX_TAPS:
        return f"{math.prod(s.kernel)} taps exceed {MAX_TAPS}: weights would not fit"
    if problem.item == 4 and math.prod(s.kernel) > MAX_WIDE_TAPS:
        return f"{math.prod(s.kernel)} taps of fp32 exceed the registers"
    if min(problem.out_size) < 1:
        return "the output is empty"
    if not 1 <= config.threads <= 256:
        return f"{config.threads} threads are not a block of this kernel"
    if (sums := problem.filters * config.sums) > 64:
        return "more than 64 accumulators per thread"
    if (products := sums * _met(problem)) > MOST_PRODUCTS:
        return f"{products} multiplications a thread: its code would be too long"
    if (needed := shared_bytes(problem, config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    _, columns = reach(problem, (config.tile_h, config.tile_w))
    if columns * config.lanes > 128:
        return f"a row of {columns} input vectors does not fit the registers"
    _, x, y = tiles(problem, config)
    if problem.batch > 65535 or x * y > 65535:
        return "the grid is too large"
    if s.height * s.width * problem.pitch[0] >= 1 << 31:
        return "an image has more elements than the kernel addresses"
    return None


def _met(problem: Problem) -> int:
    """Taps of a frame with which a result is computed."""
    s = problem.source
    strides = s.stride if problem.grown else (1, 1)
    return math.prod(-(-k // stride) for k, stride in zip(s.kernel, strides, strict=True))


def reach(problem: Problem, results: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the input under so many rows and columns of results: ``Axis`` of ``depthwise_core.cuh``."""
    s = problem.source
    if problem.grown is None:
        first, second = (
            (n - 1) * stride + (k - 1) * dilation + 1
            for n, k, stride, dilation in zip(results, s.kernel, s.stride, s.dilation, strict=True)
        )
        return first, second
    axes = zip(results, s.kernel, s.stride, s.padding[:2], strict=True)
    first, second = ((n - 1 + p % stride) // stride - _first(k, stride, p) + 1 for n, k, stride, p in axes)
    return first, second


def _first(kernel: int, stride: int, pad: int) -> int:
    """The first input under a tile at the first result of a transposed convolution, without whole strides of the pads."""
    return -(max(0, kernel - 1 - pad % stride) // stride)


def _begins(problem: Problem) -> tuple[int, int]:
    """Rows and columns by which the first tile's input begins before the image."""
    s = problem.source
    if problem.grown is None:
        return s.padding[:2]
    first, second = (
        -(p // stride + _first(k, stride, p)) for k, stride, p in zip(s.kernel, s.stride, s.padding[:2], strict=True)
    )
    return first, second


def no_kernel(problem: Problem) -> str | None:
    """Why neither depthwise kernel has these element types, or None."""
    quantized = problem.dtype in ("int8", "uint8")
    results = ("int8", "uint8", "float16", "bfloat16", "float32") if quantized else (problem.dtype,)
    exact = problem.out_item == 1 and math.prod(problem.out_size) <= MAX_PIXELS
    if (
        problem.out_dtype not in results
        or (quantized and problem.squeeze and not exact)
        or problem.dtype == "float8_e4m3fn"
    ):
        return f"no kernel turns {problem.dtype} into {problem.out_dtype}"
    if problem.beside is not None and (quantized or problem.relu):
        return "pairs of convolutions are for floats without a ReLU before them"
    if problem.source.depth is not None or problem.grown:
        if quantized or problem.beside is not None:
            return "volumes and transposed convolutions are floats, alone"
        if problem.grown and problem.squeeze:
            return "transposed convolutions are without means"
    return None


def weight_item(problem: Problem) -> int:
    """Bytes of a weight; 8-bit weights are held in 16 bits."""
    return max(2, problem.item)


def squeeze_mode(problem: Problem, config: Strips) -> int:
    """0: no squeeze; 1: partial sums per block, which :func:`launch_squeeze` finishes; 2: one block sees a whole image."""
    if not problem.squeeze or problem.source.depth is not None:
        return int(problem.squeeze)
    return 2 if tiles(problem, config)[1:] == (1, 1) else 1


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: the weights of large filters, and later the squeeze's sums or those of threads that share frames,
    at the same addresses."""
    weights = problem.filters * problem.taps * config.vectors * config.lanes * weight_item(problem)
    weights = weights if problem.weights_in_shared else 0
    sums = config.threads * config.lanes * 4 if problem.squeeze else 0
    sums = max(sums, (config.sharers - 1) * (config.threads // config.sharers) * config.sums * 4)
    return max(weights, sums)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes are parameters: problems that share filter, stride, epilogue and tile share the cubin."""
    s = problem.source
    defines = {
        "LANES": config.lanes, "KERNEL_H": s.kernel[0], "KERNEL_W": s.kernel[1], "STRIDE_H": s.stride[0], "STRIDE_W": s.stride[1],
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
        "BESIDE": problem.filters - 1, **_steps(problem), **({"CHANNEL_STAGES": 1} if render.reads_channels(problem.epilogue) else {}),
    }  # fmt: skip
    stages = render.epilogue(problem.epilogue, exact=problem.item == 4)
    if problem.beside is not None:
        stages += "\n" + render.epilogue(problem.beside, "epilogue_beside", exact=problem.item == 4)
    if problem.item == 1:
        stages = render.runtime_epilogue(problem.epilogue, problem.out_item == 1)
    return "\n".join([render.constants({**tile, **types}), stages, ""])


def _steps(problem: Problem) -> dict[str, int]:
    """The constants of a walk along the depth of volumes, and of a transposed convolution."""
    s, depth, transposed = problem.source, problem.source.depth, problem.grown is not None
    found = {"TRANSPOSED": int(transposed), "KERNEL_D": 0 if depth is None else depth.taps}
    found |= {
        f"PHASE_{axis}": p % stride if transposed else 0
        for axis, p, stride in zip("HW", s.padding[:2], s.stride, strict=True)
    }
    return found | ({} if depth is None else {"STRIDE_D": depth.stride, "DILATION_D": depth.dilation})


def options(problem: Problem, checked: bool = False) -> tuple[str, ...]:
    """Compiler options. Products of 8-bit images are summed exactly with or without contraction; nothing else may be contracted."""
    return template_options(
        problem.dtype, problem.out_dtype, exact=problem.item == 1, fast=problem.item != 4, checked=checked
    )


def pack_weights(weight: Array) -> Array:
    """``[channels, 1, taps …]`` weights -> ``[taps, channels]``. Keeps the dtype."""
    channels = weight.shape[0]
    if weight.shape[1] != 1:
        raise InternalError("a depthwise convolution has one input channel per output channel")
    return np.ascontiguousarray(weight.reshape(channels, -1).T)


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
    parameters.i32(s.height, s.width, problem.channels // config.lanes, out_h, out_w, *_begins(problem))
    parameters.i32(*problem.pitch)
    parameters.i32(config.vectors, config.strips_x, config.strips_y, blocks_x)
    (mean or QuantizedStore(1.0 / (out_h * out_w))).put(parameters)
    parameters.i32(four_bytes(problem.outside))
    if s.depth is not None:
        parameters.i32(s.depth.size, s.depth.out, -s.depth.first)
    put_requantize(parameters, problem.epilogue, requantize)
    if problem.beside is not None:
        parameters.pointer("second", "second_weights", "second_bias").i32(problem.second_pitch or problem.channels)
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


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    s = problem.source
    if s.depth is not None or problem.grown:
        return _other_seconds(problem, config, device)
    blocks = math.prod(tiles(problem, config)) * problem.batch
    rows, columns = reach(problem, (config.tile_h, config.tile_w))
    outputs, taps = config.tile_h * config.tile_w, math.prod(s.kernel)
    # Instructions of a thread: multiply-adds, conversions of inputs and weights, loads with their bounds, the epilogue.
    lanes = config.lanes
    # 8-bit values are converted both ways, and their stages are chosen at run time.
    convert, finish = {1: (2.2, 15.0), 2: (1.0, 5.0), 4: (0.0, 4.0)}[problem.item]
    if problem.item == 1:
        finish += RUNTIME_STAGES * stages_issue(problem.epilogue)
    work = problem.filters * (outputs * taps * lanes + rows * columns * (convert * lanes + 6) + taps * lanes)
    work += outputs * (finish * lanes + 4) + 150
    registers = min(255, problem.filters * (outputs * lanes + taps * lanes) + 2 * columns * lanes // 2 + 40)
    resident = max(1, config.blocks, 65536 // (registers * config.threads))
    resident = min(resident, 2048 // config.threads)
    waves = blocks / (device.multiprocessors * resident)
    whole = math.ceil(waves) if waves < 4 else waves
    compute = whole * min(resident, max(1.0, blocks / device.multiprocessors)) * config.threads * work / 128 / CLOCK
    # A block reads its tile and the halo around it through L2.
    tile_h, tile_w = config.tile
    patch = (tile_h * s.stride[0] + s.kernel[0] - s.stride[0]) * (tile_w * s.stride[1] + s.kernel[1] - s.stride[1])
    size = config.vectors * lanes * problem.item
    pixels = blocks * (problem.filters * patch + tile_h * tile_w)
    moved = sectors(problem, config) * SECTOR
    l2 = pixels * moved / L2
    unread = pixels * (moved - size) / L2  # parts of sectors that only other blocks use delay each of a thread's loads
    # Fitted to 150 timings on an H200 (within 22 %). Loads wait for one another, so neither memory nor issue slots are full.
    slower = (1.36 if taps > FEW_TAPS else 2.1) * (SLOWER_BYTES if problem.item == 1 else 1.0)
    thread = work * (3.4e-9 if taps > FEW_TAPS else 2.5e-9)  # a wave takes at least as long as one of its threads
    memory = problem.bytes / 2.96e12
    second = finish_seconds(problem, squeeze_mode(problem, config))
    return 0.57e-6 + max(memory, l2, compute * slower, whole * thread) + unread + second


def _other_seconds(problem: Problem, config: Config, device: GpuFacts) -> float:
    """:func:`estimate` of volumes and of transposed convolutions. Fitted to 282 timings of 20 problems on an H100: 21 % off on average;
    first choices are 10 % behind the best."""
    blocks, lanes, outputs = (
        math.prod(tiles(problem, config)) * problem.batch,
        config.lanes,
        config.tile_h * config.tile_w,
    )
    rows, columns = reach(problem, (config.tile_h, config.tile_w))
    moved, steps = sectors(problem, config) * SECTOR, -(-problem.frames // config.sharers)
    # Instructions of a thread: multiply-adds; conversions and loads of inputs and weights; sums of other threads, results.
    each = (
        outputs * _met(problem) * lanes + rows * columns * (lanes + 6) + math.prod(problem.source.kernel) * (lanes + 4)
    )
    added = config.sums * (config.sharers - 1) / config.sharers
    work = steps * each + added + outputs * (5 * lanes + 4) + 150
    # Loads of parts of sectors occupy L1 for longer.
    parts = steps * rows * columns * 12 * (moved / (config.vectors * lanes * problem.item) - 1)
    registers = min(255, outputs * lanes + columns * lanes // 2 + 48)
    resident = min(max(1, config.blocks, 65536 // (registers * config.threads)), 2048 // config.threads)
    waves = blocks / (device.multiprocessors * resident)
    together = min(resident, max(1.0, blocks / device.multiprocessors))
    whole = math.ceil(waves) if waves < 4 else waves
    compute = 2.3 * whole * together * config.threads * (work + parts) / 128 / CLOCK
    pixels = problem.frames * math.prod(reach(problem, config.tile)) + math.prod(config.tile)
    second = finish_seconds(problem, squeeze_mode(problem, config))
    return 0.8e-6 + max(problem.bytes / 2.96e12, blocks * pixels * moved / L2, compute, whole * work * 2e-9) + second


def finish_seconds(problem: Problem, mode: int) -> float:
    """Predicted seconds of the launch that adds up the sums of tiles; 0 without one."""
    return FINISH if mode == 1 and not problem.summed else 0.0


def sectors(problem: Problem, config: Strips) -> float:
    """Mean number of L2 sectors that a pixel's channels of one block touch. Pixels begin at multiples of their pitch, slabs
    at multiples of their size."""
    size = config.vectors * config.lanes * problem.item
    offset = math.gcd(SECTOR, size, problem.pitch[0] * problem.item)
    return (size + SECTOR - offset) / SECTOR


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
                        for sharers in {1, *(-(-problem.frames // n) for n in (1, 2, 3))}:
                            config = Config(tile_h, tile_w, v, strips_x, strips_y, lanes, sharers=sharers)
                            if refuse(problem, config, shared=device.shared_per_block) is None:
                                found.append((estimate(problem, config, device), config))
    return varied(set(found), lambda c: (c.tile_h, c.tile_w, c.lanes, c.sharers), limit)
