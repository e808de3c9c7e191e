"""Plans of the depthwise convolution with TMA loads (``depthwise_sm90.cu``): for large batches on Hopper.

Problems and operands are as of :mod:`optdnn.kernels.conv.depthwise_kernel`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv.depthwise_cost import CLOCK, MEMORY, finish_seconds
from optdnn.kernels.conv.depthwise_problem import Problem, Strips, squeeze_mode, tiles
from optdnn.kernels.conv.parameters import put_requantize
from optdnn.kernels.launch import BLOCK_SHARED, Launch, Parameters, at_once, no_room, tensor_map
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.ranking import varied
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts

_HEAD_BYTES = 128
RESIDUAL_REGISTERS = 12
"""Registers of a thread for the addresses of a residual."""
PLACE_REGISTERS = 6, 28
"""Registers of a thread for the place of its inputs in the image, where padding is not 0: with filters of up to 9 taps, of more."""
TILES = ((1, 4), (2, 2), (2, 3), (2, 4), (4, 2), (4, 4), (2, 7), (1, 7), (2, 8))
"""Rows and columns of a thread's results."""


@dataclass(frozen=True, order=True)
class Config(Strips):
    """``stages`` patches in flight; ``blocks`` per multiprocessor that registers must allow."""

    stages: int = 2
    blocks: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block: the convolving warps and the loading warp."""
        return -(-self.vectors * self.strips_x * self.strips_y // 32) * 32 + 32

    def __str__(self) -> str:
        strips = f"{self.strips_x}x{self.strips_y}"
        return f"dwt{self.tile_h}x{self.tile_w}l{self.lanes}v{self.vectors}s{strips}r{self.stages}b{self.blocks}"


def patch(problem: Problem, config: Config) -> tuple[int, int]:
    """Rows and columns of a tile's input patch."""
    return problem.source.patch(config.tile)


def unbanded(problem: Problem) -> Problem:
    """The problem with all rows of the filter added at a time, as this kernel does. Other kernels take a large fp32 filter in bands."""
    return replace(problem, band=0) if problem.band else problem


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: barriers, the ring, weights of large filters, the squeeze's sums. The kernel asserts it."""
    channels, taps = config.vectors * config.lanes, math.prod(problem.source.kernel)
    patch_bytes = -(-math.prod(patch(problem, config)) * channels * problem.item // 128) * 128
    ring = config.stages * problem.matrices * patch_bytes
    weights = problem.matrices * taps * channels * depthwise.weight_item(problem)
    sums = config.strips_x * config.strips_y * channels * 4 if problem.squeeze else 0
    return _HEAD_BYTES + ring + (weights if unbanded(problem).weights_in_shared else 0) + sums


def refuse(
    problem: Problem, config: Config, *, shared: int = BLOCK_SHARED, capability: tuple[int, int] = (9, 0)
) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    return _refuse_problem(problem, capability) or _refuse_config(problem, config, shared)


def _refuse_problem(problem: Problem, capability: tuple[int, int]) -> str | None:
    """Why no configuration can run the problem, or None."""
    s = problem.source
    if capability < (9, 0):
        return f"it loads by TMA, which GPUs of capability {capability[0]}.{capability[1]} do not have"
    if problem.channels % 8:
        return f"{problem.channels} channels are not a multiple of 8"
    if problem.channels * problem.item % 16:
        return f"a TMA box cannot have {problem.channels} channels"
    if problem.source.depth is not None or problem.grown:
        return "it is for images, and not transposed"
    if problem.unit < 8:
        return "TMA reads pixels that begin at multiples of 16 bytes"
    if (why := depthwise.no_kernel(problem)) is not None:
        return why
    if math.prod(s.kernel) > depthwise.MAX_TAPS or min(problem.out_size) < 1:
        return "too many taps, or an empty output"
    return None


def _refuse_config(problem: Problem, config: Config, shared: int) -> str | None:
    s, channels = problem.source, config.vectors * config.lanes
    if config.lanes not in (4, 8) or config.lanes * problem.item > 16:
        return f"{config.lanes} elements are no access of this kernel"
    if channels * problem.item % 16 or channels > 256:
        return f"a TMA box cannot have {channels} channels"
    sums = config.tile_h * config.tile_w * config.lanes
    if not 64 <= config.threads <= 288 or sums > 64 or sums * math.prod(s.kernel) > depthwise.MOST_PRODUCTS:
        return "not a tile of this kernel"
    _, columns = s.patch((config.tile_h, config.tile_w))
    if columns * config.lanes > 128:
        return f"a row of {columns} input vectors does not fit the registers"
    if max(patch(problem, config)) > 256:
        return "the patch exceeds a TMA box"
    if not 2 <= config.stages <= 8:
        return f"{config.stages} stages"
    if (why := no_room(shared_bytes(problem, config), shared, config.blocks)) is not None:
        return why
    limit = min(255, 512 // -(-(config.threads // 32) * config.blocks // 4) // 8 * 8)
    if registers(problem, config) > limit:
        return f"about {registers(problem, config)} registers per thread exceed {limit}"
    if math.prod(tiles(problem, config)) * problem.batch >= 1 << 31:
        return "more tiles than the kernel can count"
    return None


def padded_zero(problem: Problem) -> bool:
    """Whether the image is padded with a zero point other than 0. TMA fills with zeros, and threads replace them."""
    return problem.outside != 0 and any(problem.source.padding)


def registers(problem: Problem, config: Config) -> int:
    """Estimated registers of a thread: accumulators, weights of small filters, a row of input vectors, addresses, constants and the
    squeeze's sums. Fitted to the spills that ptxas reports."""
    taps, (_, columns) = math.prod(problem.source.kernel), problem.source.patch((config.tile_h, config.tile_w))
    sums, filters = config.tile_h * config.tile_w * config.lanes * problem.matrices, problem.matrices
    # An input row that contributes to many output rows needs the weights of several taps at once.
    more = 12 * max(0, config.tile_h - 2) if taps > 9 else 0
    if problem.residual:  # loaded before the filter
        more += config.tile_h * config.tile_w * config.lanes * problem.out_item // 4 + RESIDUAL_REGISTERS
    if problem.item == 1:  # 8-bit values as floats; scales besides the biases
        weights = taps * config.lanes // 2 if taps <= 9 else 8
        found = sums + weights + 30 + (columns + 1) * config.lanes + more
        found += PLACE_REGISTERS[taps > 9] * padded_zero(problem)
        return math.ceil(found * (0.9 if config.lanes == 4 else 1.0))
    if problem.item == 4:
        weights = filters * taps * config.lanes if taps <= 9 else 8
        return sums + weights + columns * config.lanes + (28 if problem.squeeze else 18) + 2 * config.tile_h + more
    weights = filters * taps * config.lanes // 2 if taps <= 9 else 8 if sums < 64 else 16
    rest = (
        (24 if problem.squeeze else 14) + 2 * (config.tile_h + config.lanes) + (30 if filters > 1 and taps <= 9 else 0)
    )
    return sums + weights + columns * config.lanes // 2 + rest + more


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes of tensors are parameters."""
    s = problem.source
    defines = {
        "LANES": config.lanes, "KERNEL_H": s.kernel[0], "KERNEL_W": s.kernel[1], "STRIDE_H": s.stride[0],
        "STRIDE_W": s.stride[1], "DILATION_H": s.dilation[0], "DILATION_W": s.dilation[1], "TILE_H": config.tile_h,
        "TILE_W": config.tile_w, "VECTORS": config.vectors, "STRIPS_X": config.strips_x, "STRIPS_Y": config.strips_y,
        "STAGES": config.stages, "MIN_BLOCKS": config.blocks, "SQUEEZE": squeeze_mode(problem, config),
        "SHARED_BYTES": shared_bytes(problem, config), "PADDED_ZERO": int(padded_zero(problem)),
    }  # fmt: skip
    text = depthwise.generated(unbanded(problem), defines)
    return Recipe("depthwise_sm90.cu", arch, {"generated.cuh": text}, depthwise.options(problem))


def launch(
    problem: Problem,
    config: Config,
    gpu: GpuFacts,
    requantize: Requantize | None = None,
    mean: QuantizedStore | None = None,
) -> Launch:
    """The launch: a grid that fills ``gpu``. Operands as of :func:`optdnn.kernels.conv.depthwise_kernel.launch`."""
    s, (out_h, out_w), mode = problem.source, problem.out_size, squeeze_mode(problem, config)
    slabs, tiles_x, tiles_y = tiles(problem, config)
    count = tiles_x * tiles_y * problem.batch
    pitch, apart = ([n * problem.item for n in of] for of in (problem.pitch, problem.apart))
    box_h, box_w = patch(problem, config)
    shape = (problem.channels, s.width, s.height, problem.batch)
    box = (config.vectors * config.lanes, box_w, box_h, 1)
    parameters = Parameters().tensor_map(
        tensor_map("input", problem.dtype, shape, (pitch[0], s.width * pitch[0], apart[0]), box, swizzle=0)
    )
    if problem.beside is not None:
        item, image = (n * problem.item for n in problem.second)
        parameters.tensor_map(tensor_map("second", problem.dtype, shape, (item, s.width * item, image), box, swizzle=0))
    parameters.pointer("output", "weights", "bias", "residual" if problem.residual else None)
    parameters.pointer("sums" if mode == 1 else None, "means" if mode == 2 else None)
    parameters.i32(problem.channels // config.lanes, out_h, out_w, s.padding[0], s.padding[1])
    parameters.i32(*itertools.chain(*zip(problem.pitch[1:], problem.apart[1:], strict=True)))
    parameters.i32(slabs, tiles_x, tiles_x * tiles_y, count)
    (mean or QuantizedStore(1.0 / (out_h * out_w))).put(parameters)
    put_requantize(parameters, problem.epilogue, requantize)
    if problem.beside is not None:
        parameters.pointer("second_weights", "second_bias")
    if padded_zero(problem):
        parameters.i32(s.height, s.width, depthwise.four_bytes(problem.outside))
    shared = shared_bytes(problem, config)
    per_slab = max(1, min(count, gpu.multiprocessors * at_once(shared_bytes(problem, config), config.blocks) // slabs))
    blocks = per_slab * slabs
    return parameters.launch(recipe(problem, config, gpu.arch), "depthwise_sm90", blocks, config.threads, shared=shared)


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    s = problem.source
    slabs, tiles_x, tiles_y = tiles(problem, config)
    together = at_once(shared_bytes(problem, config), config.blocks)
    count, blocks = tiles_x * tiles_y * problem.batch, device.multiprocessors * together
    outputs, taps, lanes = config.tile_h * config.tile_w, math.prod(s.kernel), config.lanes
    rows, columns = s.patch((config.tile_h, config.tile_w))
    # Instructions of a thread and tile: multiply-adds, conversions, shared loads, the epilogue with its store.
    # An 8-bit value takes two instructions to become a float, and a result three times as many.
    convert, finish = {1: (2.2 * lanes + 1, 15), 2: (1.3 * (lanes + 1), 6), 4: (1.3, 5)}[problem.item]
    convert += (2 + lanes // 4) * padded_zero(problem)  # compares a place, and selects
    work = problem.matrices * (outputs * taps * lanes + rows * columns * convert + config.tile_h * taps * (lanes + 1))
    work += outputs * (finish * lanes + 6) + 60
    per_block = -(-count // max(1, blocks // slabs))
    warps = (config.threads // 32 - 1) * together  # few warps leave issue slots empty
    tile = config.threads * work / 128 / min(0.8, 0.35 + 0.03 * warps)
    compute = (per_block * tile * together + 1500) / CLOCK
    box = problem.matrices * math.prod(patch(problem, config)) * config.vectors * lanes * problem.item
    l2 = slabs * count * (box + config.threads * outputs * lanes * max(2, problem.out_item)) / 5.0e12
    in_flight = min(1.0, (config.stages - 1) * box * together / 40000)
    second = finish_seconds(problem, squeeze_mode(problem, config))
    return 1.0e-6 + max(compute, l2, problem.bytes / MEMORY / (0.6 + 0.35 * in_flight)) + second


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first; at most two per thread tile."""
    if _refuse_problem(problem, device.capability) is not None:
        return []
    out_h, out_w = problem.out_size
    found: list[tuple[float, Config]] = []
    for lanes in (8, 4):
        vectors = problem.channels // lanes
        widths = [v for v in range(32 // lanes, 256 // lanes + 1) if vectors % v == 0] or [min(vectors, 64 // lanes)]
        for tile_h, tile_w in depthwise.TALL[1:] if out_w == 1 else TILES:
            wide, high = -(-out_w // tile_w), -(-out_h // tile_h)
            for v in widths:
                for strips_x in sorted({min(wide, 32), -(-wide // 2), -(-wide // 4)}):
                    for strips_y in sorted({min(high, n) for n in (1, 2, 4, 7, 8, 16)}):
                        if not 32 < v * strips_x * strips_y <= 256:
                            continue  # blocks have 96 to 288 threads; this rules out most, so it comes first
                        for stages, blocks in ((2, 2), (3, 2), (3, 1), (4, 1), (2, 3), (3, 3)):
                            config = Config(tile_h, tile_w, v, strips_x, strips_y, lanes, stages, blocks)
                            if _refuse_config(problem, config, device.shared_per_block) is None:
                                found.append((estimate(problem, config, device), config))
    return varied(found, lambda c: (c.tile_h, c.tile_w, c.lanes), limit)
