"""The cost model of the Hopper convolution kernel: a roofline with waves, operand traffic and latency.

The figures are those of an H200. It ranks the configurations (:mod:`.configs`), and only has to keep the fastest one among the first
dozens, which are then timed. Products of middle size have a model of their own (:mod:`.product_cost`).
"""

from __future__ import annotations

import math

from optdnn.kernels.conv.cost_terms import CLOCK, L2_PER_CLOCK, LATENCY, MEMORY, issue, room_for, stages_issue, waves_of
from optdnn.kernels.conv.implicit_gemm import (
    TWO_SETS,
    Config,
    grid_blocks,
    late,
    shared_bytes,
)
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.conv.product_cost import mid_size_product, product_seconds
from optdnn.runtime.cuda.gpu_facts import GpuFacts

IM2COL_ROW = 4.6  # cycles in which TMA loads 128 bytes of a pixel in im2col mode
SHORT_PIXEL, CUT_PIXEL = 2.1, 2.0
"""Least cycles of a pixel's row, and a factor on them if pixels do not begin at multiples of 32 bytes, the sectors of L2. Both are for
16-bit elements, and fitted to 2,000 timings of 54 convolutions of 8 to 80 channels."""
RING_LATENCY = 1200  # cycles from requesting a stage to its arrival; with S stages, S - 1 steps pass meanwhile
FULL_RING_LATENCY = 1800  # the same when all multiprocessors load (:func:`fills`)
NARROW_TILE, NARROW = 64, 10  # extra cycles for each pixel that a tile has less than 64
LATE = 1500  # cycles after the last product to compute addresses of results, and again to load a residual
IMAGE_FACTOR = 1500  # cycles in which a tile reduces the moments of its image
TURN = 800  # cycles between a tile's last product and the first product of the warpgroup's next tile
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


def row_cycles(problem: Problem) -> float:
    """Cycles in which TMA loads a row of a K step: a pixel's block of channels."""
    cycles = IM2COL_ROW * problem.span / 128
    if problem.item != 2:
        return cycles
    cut = any(-(-source.channels // 8) % 2 for source in problem.sources)
    return max(SHORT_PIXEL, cycles) * (CUT_PIXEL if cut else 1.0)


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


def _multiply_cycles(problem: Problem, config: Config, streamed: int) -> float:
    """Cycles of a K step in which tensor cores or shared memory work. ``streamed``: bytes that a block loads."""
    products = config.wgm * config.wgn * config.mt * (problem.span // 32)
    multiply = products * max(config.bn / 2, 16 + config.bn / 4)
    read = products * (2048 + config.bn * 32) / 128
    return max(multiply, read + streamed / 128)


def _epilogue_cycles(problem: Problem, config: Config) -> float:
    """Cycles from a tile's last product to its last store, without prologue and exchange of sums."""
    cycles = 350 + config.mt * config.bn * (issue(problem) if config.wgm * config.wgn > 1 else 0.8 * issue(problem))
    if config.direct:
        cycles -= 250
    if late(problem, config):
        cycles += LATE * (2 if problem.residual else 1)
    if problem.norm is not None and problem.norm.image:
        cycles += IMAGE_FACTOR
    return cycles


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    if mid_size_product(problem):
        return product_seconds(problem, config, device)
    tile_channels, tile_pixels = config.tile
    tiles = config.joint_tiles(problem)[1] * config.sharers
    steps, span = -(-problem.k_steps // config.split), problem.span
    shared = shared_bytes(problem, config)
    resident = max(1, min(config.blocks, device.shared_per_multiprocessor // (shared + 1024)))
    weight_bytes, pixel_bytes = tile_channels * span, tile_pixels * span
    streamed = pixel_bytes + (0 if config.stationary else weight_bytes)
    multiply = _multiply_cycles(problem, config, streamed)
    load = streamed / L2_PER_CLOCK
    load = max(load, problem.gathered * row_cycles(problem) * tile_pixels)
    load = max(load, _ring_cycles(problem, config, device, load, resident))
    step = max(multiply, load)
    at_once = device.multiprocessors // config.sharers * config.sharers
    waves = -(-tiles // at_once)
    if config.split > 1:
        sums = config.mt * config.bn // 2 * (2 if config.mt * config.bn <= TWO_SETS else 1)
        room = room_for(shared, config.threads + problem.helpers, sums, device)
        waves = waves_of(tiles, config.split, device, room)
    epilogue = _epilogue_cycles(problem, config)
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
    waits = problem.residual and resident == 1 and config.out_buffers == 1 and problem.bytes > device.l2_bytes
    beside = RESIDUAL_BESIDE[config.alternate] if waits else 0.15
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
