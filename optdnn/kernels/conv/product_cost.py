"""The cost model of products of middle size on the Hopper convolution kernel: 16-bit rows with one matrix."""

from __future__ import annotations

import math

from optdnn.kernels.conv.cost_terms import MEMORY, issue, room_for, waves_of
from optdnn.kernels.conv.implicit_gemm import TWO_SETS, Config, shared_bytes
from optdnn.kernels.conv.problem import Problem
from optdnn.runtime.cuda.gpu_facts import GpuFacts

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
INTENSITY, FEW_ROWS_INTENSITY, MOST_WORK = 100, 88, 1.2e10
"""Range in which the model of products made networks faster: least operations per byte (in general, and with few rows),
and most operations. Larger products run at the power limit (``docs/internals/kernels-hopper.md``)."""


def mid_size_product(problem: Problem) -> bool:
    """Whether :func:`product_seconds` models the problem: a product of 16-bit rows with one matrix, of middle size."""
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


def product_seconds(problem: Problem, config: Config, device: GpuFacts) -> float:
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
