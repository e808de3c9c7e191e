"""Ranks configurations of the Hopper convolution kernel without a GPU: a roofline with waves, operand traffic and latency.

The figures are those of an H200. The ranking only has to keep the fastest configuration among the
first dozens, which are then timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from optdnn.kernels.conv.implicit_gemm import (
    SHARES,
    TWO_SETS,
    Config,
    deepest,
    grid_blocks,
    late,
    refuse,
    shared_bytes,
)
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.ranking import varied_pairs
from optdnn.runtime.cuda.compile.render import Stage
from optdnn.runtime.cuda.gpu_facts import GpuFacts

CLOCK = 1.75e9  # Hz under load
MEMORY = 4.2e12  # bytes/s, read + written
L2_PER_CLOCK = 56.0  # bytes per cycle and multiprocessor that TMA loads from L2
LATENCY = 1.5e-6  # s: launch, wait, first load, last store of a dependent kernel
IM2COL_ROW = 4.6  # cycles in which TMA loads 128 bytes of a pixel in im2col mode
SHORT_PIXEL, CUT_PIXEL = 2.1, 2.0
"""Least cycles of a pixel's row, and a factor on them if pixels do not begin at multiples of 32 bytes, the sectors of L2. Both are for
16-bit elements, and fitted to 2,000 timings of 54 convolutions of 8 to 80 channels."""
RING_LATENCY = 1200  # cycles from requesting a stage to its arrival; with S stages, S - 1 steps pass meanwhile
FULL_RING_LATENCY = 1800  # the same when all multiprocessors load (:func:`fills`)
NARROW_TILE, NARROW = 64, 10  # extra cycles for each pixel that a tile has less than 64
MOST_SUMS = 320  # largest ``mt * bn``, twice the accumulators per thread, of proposed tiles; the kernel takes up to 320
DIVIDE, DIVIDE_BYTE = 200, 0.03  # cycles in which a stage of fp32 is split into parts: fixed, and per byte
LATE = 1500  # cycles after the last product to compute addresses of results, and again to load a residual
IMAGE_FACTOR = 1500  # cycles in which a tile reduces the moments of its image
TURN = 800  # cycles between a tile's last product and the first product of the warpgroup's next tile
STAGE_ISSUE = {
    "relu": 0.5,
    "gelu": 10.0,
    "gelu_tanh": 8.0,
    "tanh": 8.0,
    "silu": 6.0,
    "rounded_silu": 10.0,
    "rounded_hard_swish": 6.0,
    "swish": 7.0,
    "sigmoid": 6.0,
    "softplus": 16.0,
    "mish": 9.0,
    "selu": 7.0,
    "celu": 10.0,
    "softsign": 4.0,
    "sqrt": 8.0,
    "reciprocal": 8.0,
    "sin": 6.0,
    "cos": 6.0,
    "elu": 6.0,
    "prelu": 2.0,
    "snake": 8.0,
}
CHANGE_ISSUE = 2  # instructions of the stages of a plain prologue
CHANGE_SLOW = 16.0  # cycles of a warp for each further one, for eight elements of each lane
RESIDUAL_BESIDE = (0.55, 0.3)
"""Fraction of the shorter of compute time and memory time that is not hidden, without and with alternating warpgroups.
It applies when the residual comes from memory and waits for the only output buffer, from which the previous tile is
stored. Fitted to 50 configurations of three convolutions."""
ROUNDING, SHORT_ROW = 9.0, 2.8
"""Cycles of 8-bit operands: for 64 results, and for a row of less than 128 bytes. Fitted to 443 launches of 12 networks."""
EXCHANGE = 2500  # cycles from a block's last product until another block receives its first partial sums
SEND, RECEIVE = 24.0, 56.0  # bytes of partial sums per cycle that a stream-K block sends to L2, and reads from it
EXPONENTIAL = frozenset({"silu", "swish", "sigmoid", "elu", "softplus", "mish", "selu", "celu", "sin", "cos", "snake"})
HALF_SHARED = 113 * 1024  # two blocks, or a block and its successor, fit a multiprocessor
# Products: fitted to 649 timings of 37 products, in chains on an H200 (``docs/internals/kernels-hopper.md``).
PRODUCT_CLOCK = 1.7e9  # Hz
STORED = 0.081  # fraction of the ring's stores to shared memory that reads of the ring do not hide
BESIDE = 3.3  # exponent of the norm that combines the cycles of tensor cores, shared memory and loads
PRODUCT_RING = 1310.0  # cycles from requesting a stage to its arrival
FINISH, FEW_WARPS = 0.82, 0.6  # cycles per epilogue instruction; factor on them with one warpgroup
TOGETHER = 0.13  # fraction of a second resident block's epilogue that the first block's products do not hide
PRODUCT_L2, FILL = 85.0, 20.0  # bytes per cycle that a block loads: in the steady state, and for the first stage
# Factors on a K step: two sets of accumulators; one warpgroup with more than 128 columns.
TWO_SETS_COST, LONE_COST = 1.12, 1.06
MEETING, SUMS_SENT = 1500.0, 17.0  # blocks that share K: cycles of the exchange; bytes of partial sums per cycle
PRODUCT_LATENCY = 1.1e-6  # s
# Products of few rows: few tiles share the weights, and all blocks together wait for them. Fitted to 165 timings of 14
# products, and to 572 timings of whole networks with one product in another configuration.
FEW_ROWS = range(128, 401)
FEW_ROWS_TWO_SETS = 56  # columns above which two sets of accumulators cost nothing
FEW_ROWS_RING, FEW_ROWS_MEETING = 1440.0, 780.0
TOGETHER_PER_CLOCK = 6500.0  # bytes of weights per cycle that all multiprocessors load together
SHARING_TILES = 11  # tiles of pixels that load the same weights from memory; with more tiles, L2 holds the weights
PIXELS_PART = 0.2  # fraction of the pixels' bytes that counts like weights
FULL, FULL_POWER = 0.462e-6, 5.5  # s that a launch adds if it fills all multiprocessors; exponent of the busy fraction
# In networks, a last wave that fills all multiprocessors makes a product longer by this fraction (204 timings in turns
# of 16 products of 580 to 4112 rows, with all other choices fixed). Products with 384 columns or features did not get
# longer.
FULL_WAVE, FULL_WAVE_POWER, FULL_WAVE_LEAST = 0.2, 16.0, 512
SHARED_LOADS, WEIGHTS_ONCE = 1.045, 0.15
# Factor where two blocks fit a multiprocessor, and there are fewer blocks than multiprocessors but more than half as many:
# the multiprocessors that become free first get two.
LOPSIDED = 1.3
WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 104, 112, 128, 144, 160, 176, 192, 200, 208, 224, 240, 256)
BETWEEN = (88, 120, 136, 152, 168, 184, 216, 232, 248)  # widths for whole tiles that nearly fill the machine
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)


def waves_of(tiles: int, split: int, device: GpuFacts, room: int = 1) -> int:
    """Waves of blocks on a multiprocessor when a cluster of ``split`` blocks shares each tile. ``room``: resident
    blocks per multiprocessor."""
    waves = -(-tiles * split // device.multiprocessors)
    if split == 1:
        return waves
    return max(waves, -(-tiles // (device.clusters_at_once(split) * room)))


def room_for(shared: int, threads: int, sums: int, device: GpuFacts) -> int:
    """About how many blocks fit a multiprocessor, by shared memory and by registers with ``sums`` accumulators per thread."""
    return max(1, min(device.shared_per_multiprocessor // (shared + 1024), 65536 // (threads * (sums + 64))))


def most_sums(problem: Problem) -> int:
    """Largest ``mt * bn`` (twice the accumulators per thread) of proposed tiles: with an exponential, the widest spill."""
    stages = (*problem.epilogue, *(problem.beside or ()))
    return 256 if any(name in EXPONENTIAL for name, *_ in stages) else MOST_SUMS


def issue(problem: Problem) -> float:
    """Epilogue instructions per accumulator."""
    norm, own = 0.0 if problem.norm is None else 2.0, stages_issue(problem.epilogue)
    if problem.beside is not None:  # half as many results are packed and stored
        return norm + 2.0 + (own + stages_issue(problem.beside)) / 2
    return norm + 3.0 + own


@lru_cache(maxsize=256)
def stages_issue(stages: tuple[Stage, ...]) -> float:
    """Instructions of these stages for an element, the bias aside. Cached: hundreds of configurations are estimated for one problem."""
    return sum(STAGE_ISSUE.get(str(name), 1.0) for name, *_ in stages if name != "bias")


INTENSITY, FEW_ROWS_INTENSITY, MOST_WORK = 100, 88, 1.2e10
"""Range in which the model of products made networks faster: least operations per byte (in general, and with few rows),
and most operations. Larger products run at the power limit (``docs/internals/kernels-hopper.md``)."""


def row_cycles(problem: Problem) -> float:
    """Cycles in which TMA loads a row of a K step: a pixel's block of channels."""
    cycles = IM2COL_ROW * problem.span / 128
    if problem.item != 2:
        return cycles
    cut = any(-(-source.channels // 8) % 2 for source in problem.sources)
    return max(SHORT_PIXEL, cycles) * (CUT_PIXEL if cut else 1.0)


def mid_size_product(problem: Problem) -> bool:
    """Whether :func:`_product_seconds` models the problem: a product of 16-bit rows with one matrix, of middle size."""
    plain = problem.rows_alone and problem.out_size == (1, 1) and problem.beside is None and problem.item == 2
    least = FEW_ROWS_INTENSITY if problem.pixels in FEW_ROWS else INTENSITY
    return plain and least * problem.bytes <= problem.flops <= MOST_WORK


def _together(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Cycles in which all multiprocessors load the operands of a K step, for products of few rows; 0 for others."""
    if problem.pixels not in FEW_ROWS:
        return 0.0
    blocks = min(device.multiprocessors, config.joint_tiles(problem)[1] * config.sharers * config.split)
    tiles = -(-problem.pixels // config.tile[1])
    weights = 0 if config.stationary else config.tile[0] * problem.span / config.share[1]
    pixels = config.tile[1] * problem.span / config.share[0]
    fresh = min(1.0, (SHARING_TILES / tiles) ** 2)
    return fresh * blocks * (weights + PIXELS_PART * pixels) / TOGETHER_PER_CLOCK


def _step(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Cycles of a K step in the steady state: tensor cores, shared memory and loads overlap, but not fully."""
    products = config.wgm * config.wgn * config.mt * (problem.span // 32)
    multiply = products * max(config.bn / 2, 16 + config.bn / 4)
    shared = products * (2048 + config.bn * 32) / 128 + STORED * _streamed_bytes(problem, config) / 128
    load = _streamed_bytes(problem, config) / PRODUCT_L2
    sums = config.mt * config.bn
    two = sums <= (FEW_ROWS_TWO_SETS if problem.pixels in FEW_ROWS else TWO_SETS)
    cost = TWO_SETS_COST if two else LONE_COST if config.tile[0] == 64 and sums > 128 else 1.0
    parts = (multiply, shared, load, _together(problem, config, device))
    return cost * math.pow(sum(part**BESIDE for part in parts), 1 / BESIDE)


def _streamed_bytes(problem: Problem, config: Config) -> int:
    """Bytes that a block loads per K step."""
    return (config.tile[1] + (0 if config.stationary else config.tile[0])) * problem.span


def _finish(problem: Problem, config: Config) -> float:
    """Cycles from a tile's last product to its last store, with the exchange between blocks that share K."""
    alone = 1.0 if config.wgm * config.wgn > 1 else FEW_WARPS
    cycles = 64 + FINISH * alone * config.mt * config.bn * issue(problem)
    if config.split == 1:
        return cycles
    sent = math.prod(config.tile) * 4 * (config.split - 1) / config.split
    meeting = FEW_ROWS_MEETING if problem.pixels in FEW_ROWS else MEETING
    return cycles + meeting + sent / SUMS_SENT


def _last_wave(blocks: int, at_once: int) -> float:
    """Fraction of the slots for blocks that are filled, over all waves."""
    return blocks / at_once / -(-blocks // at_once)


def _product_seconds(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of a product for which :func:`mid_size_product` holds."""
    tiles, shared = config.joint_tiles(problem)[1] * config.sharers, shared_bytes(problem, config)
    resident = max(1, min(config.blocks, device.shared_per_multiprocessor // (shared + 1024)))
    steps, step, finish = -(-problem.k_steps // config.split), _step(problem, config, device), _finish(problem, config)
    ring = FEW_ROWS_RING if problem.pixels in FEW_ROWS else PRODUCT_RING
    first = steps * max(step, ring / max(1, config.stages - 1))  # cycles of a block that is alone on its multiprocessor
    waves = -(-tiles // (device.multiprocessors // config.sharers * config.sharers))
    if config.split > 1:
        sums = config.mt * config.bn // 2 * (2 if config.mt * config.bn <= TWO_SETS else 1)
        waves = waves_of(tiles, config.split, device, room_for(shared, config.threads + problem.helpers, sums, device))
        cycles = waves * (first + finish) + (waves - 1) * 1500
        if waves == 1 < waves_of(tiles, config.split, device):
            cycles += steps * step / 2
    elif resident > 1:
        rounds, rest = divmod(waves, resident)
        together = max(resident * steps * step, first) + finish * (1 + TOGETHER * (resident - 1))
        cycles = rounds * together + (first + finish if rest == 1 else together if rest else 0.0)
    elif config.alternate:
        cycles = waves * first + finish
    else:
        cycles = first + finish + (waves - 1) * (steps * step + finish)
    kept = problem.k_steps * config.tile[0] * problem.span if config.stationary else 0
    compute = (cycles + _streamed_bytes(problem, config) / FILL + kept / PRODUCT_L2) / PRODUCT_CLOCK
    memory = problem.bytes / MEMORY
    # Multiprocessors without a block, or with room for another one, take blocks of the next launch meanwhile.
    beside = resident > 1 and tiles * config.split <= device.multiprocessors
    busy = min(1.0, tiles * config.split / device.multiprocessors / (resident if beside else 1))
    latency = PRODUCT_LATENCY + FULL * math.pow(busy, FULL_POWER)
    whole = latency + max(compute, memory) + 0.2 * min(compute, memory)
    wide = min(problem.channels, problem.k_steps * problem.block) >= FULL_WAVE_LEAST
    if wide and problem.pixels not in FEW_ROWS:
        filled = _last_wave(tiles * config.split, device.multiprocessors * resident)
        whole += FULL_WAVE * math.pow(filled, FULL_WAVE_POWER) * compute
    if beside and 2 * tiles * config.split > device.multiprocessors and problem.pixels not in FEW_ROWS:
        whole *= LOPSIDED
    if config.sharers > 1:
        once = config.share[1] > 1 and problem.pixels <= config.tile[1] * config.share[1]  # each weight is loaded once
        whole *= SHARED_LOADS - once * WEIGHTS_ONCE * min(1.0, memory / compute)
    return whole


def fills(problem: Problem, device: GpuFacts) -> bool:
    """Whether there is a tile of 64 channels x 64 pixels for each multiprocessor, with 16-bit operands (others were not
    measured)."""
    tiles = problem.count * problem.pixels * problem.channels / (64 * 64)
    return problem.item == 2 and tiles >= device.multiprocessors


def _ring_cycles(problem: Problem, config: Config, device: GpuFacts, load: float, resident: int) -> float:
    """Least cycles per K step that the ring's depth allows. ``load``: cycles of a load.

    Resident blocks hide one another's latency, unless all multiprocessors load. With few blocks each one has a multiprocessor
    to itself, and a ring that goes round more than twice exposes the latency.
    """
    if fills(problem, device):
        return (FULL_RING_LATENCY + load) / max(1, config.stages - 1)
    steps, blocks = -(-problem.k_steps // config.split), config.joint_tiles(problem)[1] * config.cluster
    beside = 1 if steps > 2 * config.stages and blocks <= device.multiprocessors else resident
    return (RING_LATENCY + load) / beside / max(1, config.stages - 1)


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    if mid_size_product(problem):
        return _product_seconds(problem, config, device)
    tile_channels, tile_pixels = config.tile
    tiles = config.joint_tiles(problem)[1] * config.sharers
    groups, span = config.wgm * config.wgn, problem.span
    steps = -(-problem.k_steps // config.split)
    shared = shared_bytes(problem, config)
    resident = max(1, min(config.blocks, device.shared_per_multiprocessor // (shared + 1024)))
    multiply = groups * config.mt * (span // 32) * max(config.bn / 2, 16 + config.bn / 4)
    weight_bytes, pixel_bytes = tile_channels * span, tile_pixels * span
    streamed = pixel_bytes + (0 if config.stationary else weight_bytes)
    read = groups * config.mt * (span // 32) * (2048 + config.bn * 32) / 128
    if problem.parts:  # three products; a warpgroup reads each loaded stage and stores two parts of it
        multiply = max(3 * multiply, 3 * read + 4 * streamed / 128)
    multiply = max(multiply, read + streamed / 128)
    load = streamed / L2_PER_CLOCK
    load = max(load, problem.gathered * row_cycles(problem) * tile_pixels)
    divide = DIVIDE + streamed * DIVIDE_BYTE if problem.parts else 0.0
    load = max(load, _ring_cycles(problem, config, device, load + divide, resident))
    step = max(multiply, load)
    at_once = device.multiprocessors // config.sharers * config.sharers
    waves = -(-tiles // at_once)
    if config.split > 1:
        sums = config.mt * config.bn // 2 * (2 if config.mt * config.bn <= TWO_SETS else 1)
        room = room_for(shared, config.threads + problem.helpers, sums, device)
        waves = waves_of(tiles, config.split, device, room)
    epilogue = 350 + config.mt * config.bn * (issue(problem) if groups > 1 else 0.8 * issue(problem))
    if config.direct:
        epilogue -= 250
    if late(problem, config) and not problem.parts:
        epilogue += LATE * (2 if problem.residual else 1)
    if problem.norm is not None and problem.norm.image:
        epilogue += IMAGE_FACTOR
    if problem.prologue:  # one warp per stage, 16 bytes per lane at a time; as many warps as stages, up to four
        slow = CHANGE_SLOW * max(0.0, stages_issue(problem.prologue) - CHANGE_ISSUE)
        change = 250 + pixel_bytes / 16 / 32 * (45 + slow)
        load = max(load, change / min(4, config.stages))
        step = max(step, load)
        epilogue += change
    if config.split > 1:
        # Partial sums go to their owner through the network between multiprocessors: about 12 bytes per cycle.
        epilogue += 700 + tile_channels * tile_pixels * 4 * (config.split - 1) / config.split / 12
    first = steps * step + epilogue
    if config.split > 1 and waves == 1 < waves_of(
        tiles, config.split, device
    ):  # some multiprocessors have two blocks at a time
        first += steps * multiply / 2
    if resident > 1:
        narrow = NARROW * max(0, NARROW_TILE - tile_pixels) if fills(problem, device) else 0
        later = max(steps * step, epilogue) + narrow
    elif config.alternate:  # one tile's products beside the other's epilogue
        later = max(steps * step, (steps * multiply + epilogue + TURN) / 2)
    else:  # the epilogue overlaps with as many loads as the ring holds
        later = max(steps * multiply + epilogue + TURN, steps * load + max(0.0, epilogue - config.stages * load))
    if config.split > 1:  # not persistent: a wave is launched, loaded and reduced anew, or runs beside the previous one
        later = first + 1500 if resident == 1 else first
    compute = (first + (waves - 1) * later) / CLOCK
    if config.stream:
        compute = _streamed(problem, config, device, step, later, epilogue) / CLOCK
    extra = tiles * config.split * steps * weight_bytes / 12e12 if not config.stationary else 0.0
    in_flight = resident * (
        config.stages * streamed + (config.out_buffers - 1) * tile_channels * tile_pixels * problem.out_item
    )
    memory = problem.bytes / min(MEMORY, device.multiprocessors * max(in_flight, 4096) / 0.9e-6) + extra * 0.1
    beside = 0.15
    if problem.residual and resident == 1 and config.out_buffers == 1 and problem.bytes > device.l2_bytes:
        beside = RESIDUAL_BESIDE[config.alternate]
    whole = LATENCY + max(compute, memory) + beside * min(compute, memory)
    # Shared loads sped up no measured product: such a configuration ranks just after the same tile without sharing.
    return whole * 1.01 if config.sharers > 1 else whole


def with_rounding(problem: Problem, seconds: float, device: GpuFacts) -> float:
    """``seconds`` of :func:`estimate`, and what 8-bit operands take beyond it: to round results, and to load short rows of pixels.

    Loads and stores hide a part of it: the fraction of ``seconds`` that memory takes. It is nearly the same for all tiles, so it is
    no part of their ranking (it chose worse ones: ResNet-50 at batch 8 to 128 was 1.5 to 4 % slower)."""
    if problem.item != 1:
        return seconds
    pixels = problem.count * problem.pixels / device.multiprocessors
    rows = pixels * problem.k_steps * -(-problem.channels // 128) if problem.span < 128 else 0.0
    more = (ROUNDING * pixels * problem.channels / 64 + SHORT_ROW * problem.gathered * rows) / CLOCK
    return seconds + max(0.0, 1.0 - problem.bytes / MEMORY / seconds) * more


def _streamed(problem: Problem, config: Config, device: GpuFacts, step: float, later: float, epilogue: float) -> float:
    """Cycles of a stream-K block: its span of the tiles, and the partial sums that it sends and adds up."""
    tiles, blocks = config.joint_tiles(problem)[1], grid_blocks(problem, config, device)
    share, resident = tiles / blocks, -(-blocks // device.multiprocessors)
    sums = math.prod(config.tile) * 4
    exchange = 0.0
    if tiles % blocks:
        senders = max(1, math.ceil(1 / share) - 1)
        exchange = EXCHANGE + sums / SEND + senders * (300 + sums / RECEIVE)
    steps = -(-tiles * problem.k_steps // blocks)
    return resident * (max(steps * step, share * later) + exchange) + epilogue


def streams(problem: Problem, tile: tuple[int, int, int, int], device: GpuFacts) -> Iterator[Config]:
    """Stream-K configurations of one tile, for stacks of products whose tiles leave half of the multiprocessors idle.

    Elsewhere other tiles fill the machine, and clusters that split K exchange their sums in a third of the time. None of 63
    layers and products was faster with stream-K (``docs/internals/kernels-hopper.md``).
    """
    wgm, wgn, mt, bn = tile
    plain = Config(wgm, wgn, mt, bn, 2, stream=True)
    if not problem.stack or problem.k_steps < 8 or 2 * plain.joint_tiles(problem)[1] > device.multiprocessors:
        return
    room = device.shared_per_block - shared_bytes(problem, plain)
    config = replace(plain, stages=min(8, 2 + room // (sum(plain.tile) * problem.span)))
    if refuse(problem, config, shared=device.shared_per_block) is None:
        yield config


def variants(problem: Problem, tile: tuple[int, int, int, int], split: int, device: GpuFacts) -> Iterator[Config]:
    """The stage counts and buffers worth trying for one tile (wgm, wgn, mt, bn) and split."""
    wgm, wgn, mt, bn = tile
    steps = -(-problem.k_steps // split)
    channel_tiles = -(-problem.channels // (wgm * mt * 64))
    tiles = problem.count * channel_tiles * -(-problem.pixels // (wgn * bn))
    many = tiles > 2 * device.multiprocessors
    small = split == 1 and tiles <= 2 * device.multiprocessors and mt * bn <= 128
    for blocks, limit in ((2, HALF_SHARED), (1, device.shared_per_block)):
        if blocks == 1 and tiles * split <= device.multiprocessors and steps <= 4:
            continue
        for stationary in (False, True) if many and split == 1 and steps <= 12 and channel_tiles <= 16 else (False,):
            wide = problem.from_registers  # whatever the number of tiles
            for buffers in ((1, 2) if blocks == 2 else (1, 2, 3)) if many and split == 1 and not wide else (1,):
                most = max(2, min(12, steps if not many else 12))
                shallow = Config(wgm, wgn, mt, bn, 1, split, buffers, stationary, blocks, wide and split == 1)
                stages = min(most, deepest(problem, shallow, min(limit, device.shared_per_block)))
                if stages < 1 or (stages == 1 and steps > 1):
                    continue
                # Fewer stages take less shared memory, and this has room: a refusal now holds for any number of stages.
                config = Config(wgm, wgn, mt, bn, stages, split, buffers, stationary, blocks, shallow.direct)
                if refuse(problem, config, shared=device.shared_per_block) is not None:
                    continue
                yield config
                if small and not stationary and not wide:
                    direct = replace(config, direct=True)
                    if refuse(problem, direct, shared=device.shared_per_block) is None:
                        yield direct


def large(problem: Problem, tile: tuple[int, int, int, int], device: GpuFacts) -> Iterator[Config]:
    """Configurations with multicast clusters or alternating warpgroups, for tiles that fill the machine."""
    wgm, wgn, mt, bn = tile
    least, filled = (80, 0.7) if mid_size_product(problem) else (128, 0.8)
    for alternate in (False, True) if mt * bn >= min(96, least) else ():
        # With 8-bit operands, alternating warpgroups were faster only for results with a scale per row.
        if alternate and (wgm * wgn > 1 or (problem.item == 1 and not problem.row_scale)):
            continue
        for share in SHARES if mt * bn >= least else SHARES[:1]:
            plain = Config(wgm, wgn, mt, bn, 2, alternate=alternate, share=share)
            if not alternate and plain.sharers == 1:
                continue
            if plain.joint_tiles(problem)[1] * plain.sharers < filled * device.multiprocessors:
                continue
            room = device.shared_per_block - shared_bytes(problem, plain)
            config = replace(plain, stages=min(8, 2 * problem.k_steps, 2 + room // (sum(plain.tile) * problem.span)))
            if config.stages >= 2 and refuse(problem, config, shared=device.shared_per_block) is None:
                yield config


def candidates(problem: Problem, device: GpuFacts, limit: int = 12, *, direct: bool = True) -> list[Config]:
    """The configurations of :func:`estimated`."""
    return [config for _, config in estimated(problem, device, limit, direct=direct)]


def estimated(
    problem: Problem, device: GpuFacts, limit: int = 12, *, direct: bool = True
) -> list[tuple[float, Config]]:
    """The configurations to time with their predicted seconds, best first; at most two per tile shape, split and mode.

    ``direct`` False leaves out configurations that store from registers."""
    found: list[tuple[float, Config]] = []
    for wgm, wgn, mt in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)):
        if wgm * mt * 64 > max(64, math.ceil(problem.channels / 64) * 64):
            continue
        for bn in sorted((*WIDTHS, *BETWEEN)):
            if mt * bn > most_sums(problem) or (wgn > 1 and bn < 32) or (bn > 8 and wgn * bn - 8 >= problem.pixels + 8):
                continue
            tiles = problem.count * -(-problem.channels // (wgm * mt * 64)) * -(-problem.pixels // (wgn * bn))
            if bn in BETWEEN and (tiles < 0.7 * device.multiprocessors or not mid_size_product(problem)):
                continue
            for config in large(problem, (wgm, wgn, mt, bn), device):
                found.append((estimate(problem, config, device), config))
            for config in streams(problem, (wgm, wgn, mt, bn), device):
                found.append((estimate(problem, config, device), config))
            for split in SPLITS if bn in WIDTHS else SPLITS[:1]:
                if split > 1 and (split > problem.k_steps or tiles * split > 4 * device.multiprocessors):
                    continue
                for config in variants(problem, (wgm, wgn, mt, bn), split, device):
                    if direct or not config.stores_directly:
                        found.append((estimate(problem, config, device), config))
    return varied_pairs(found, lambda c: (*c.tile, c.split, c.stationary, c.alternate, c.stream), limit)
