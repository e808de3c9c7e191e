"""Predicted times of the depthwise convolution with loads by threads (``depthwise.cu``)."""

from __future__ import annotations

import math

from optdnn.kernels.conv.cost_terms import sector_bytes, stages_issue
from optdnn.kernels.conv.depthwise_problem import (
    FEW_TAPS,
    Config,
    Problem,
    met,
    reach,
    squeeze_mode,
    tiles,
)
from optdnn.runtime.cuda.gpu_facts import GpuFacts

CLOCK = 1.75e9
MEMORY = 4.2e12
L2 = 3.2e12
FINISH = 1.2e-6
"""Seconds of the launch that adds up the sums of tiles."""
WIDE_STEPS = 1.3
"""Factor on the time of fp32 in several steps."""
FEW_TAPS_S, LOAD_S = 1.0e-6, 10e-9
"""Seconds of a launch on filters of few taps, and of a thread's load of an input vector: 144 timings of 17 problems in fp16 on an H200."""
SHARED = 1.35
"""Factor on volumes whose frames threads share, over those whose frames one thread adds (64 timings of 8 problems on an H200)."""
RUNTIME_STAGES, SLOWER_BYTES = 8.0, 1.35
"""Factors of 8-bit launches: on the instructions of their stages, and on their compute time (42 timings of two networks)."""


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    s = problem.source
    if s.depth is not None or problem.grown or problem.band:
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
    work = problem.matrices * (outputs * taps * lanes + rows * columns * (convert * lanes + 6) + taps * lanes)
    work += outputs * (finish * lanes + 4) + 150
    registers = min(255, problem.matrices * (outputs * lanes + taps * lanes) + 2 * columns * lanes // 2 + 40)
    resident = max(1, config.blocks, 65536 // (registers * config.threads))
    resident = min(resident, 2048 // config.threads)
    waves = blocks / (device.multiprocessors * resident)
    whole = math.ceil(waves) if waves < 4 else waves
    compute = whole * min(resident, max(1.0, blocks / device.multiprocessors)) * config.threads * work / 128 / CLOCK
    # A block reads its tile and the halo around it through L2.
    tile_h, tile_w = config.tile
    patch = (tile_h * s.stride[0] + s.kernel[0] - s.stride[0]) * (tile_w * s.stride[1] + s.kernel[1] - s.stride[1])
    size = config.vectors * lanes * problem.item
    pixels = blocks * (problem.matrices * patch + tile_h * tile_w)
    moved = sector_bytes(size, problem.pitch[0] * problem.item)
    l2 = pixels * moved / L2
    unread = pixels * (moved - size) / L2  # parts of sectors that only other blocks use delay each of a thread's loads
    # Fitted to 150 timings on an H200 (within 22 %). Loads wait for one another, so neither memory nor issue slots are full.
    slower = (1.36 if taps > FEW_TAPS else 2.1) * (SLOWER_BYTES if problem.item == 1 else 1.0)
    thread = work * (3.4e-9 if taps > FEW_TAPS else 2.5e-9)  # a wave takes at least as long as one of its threads
    memory = problem.bytes / 2.96e12
    second = finish_seconds(problem, squeeze_mode(problem, config))
    start = FEW_TAPS_S + whole * rows * columns * LOAD_S if taps <= FEW_TAPS else 0.57e-6
    return start + max(memory, l2, compute * slower, whole * thread) + unread + second


def _other_seconds(problem: Problem, config: Config, device: GpuFacts) -> float:
    """:func:`estimate` of volumes, of transposed convolutions, and of filters in bands. Fitted to 282 timings of 20 problems on an H100: 21 %
    off on average; first choices are 10 % behind the best. 99 timings of 9 problems of volumes on an H200: 13 % off, 5 % behind."""
    blocks = math.prod(tiles(problem, config)) * problem.batch
    lanes, outputs = config.lanes, config.tile_h * config.tile_w
    rows, columns = reach(problem, (config.tile_h, config.tile_w))
    size, steps = config.vectors * lanes * problem.item, -(-problem.steps // config.sharers)
    moved = sector_bytes(size, problem.pitch[0] * problem.item)
    # Instructions of a thread: multiply-adds; conversions and loads of inputs and weights; sums of other threads, results.
    each = outputs * met(problem) * lanes + rows * columns * (lanes + 6) + math.prod(problem.unrolled) * (lanes + 4)
    added = config.sums * (config.sharers - 1) / config.sharers
    work = steps * each + added + outputs * (5 * lanes + 4) + 150
    # Loads of parts of sectors occupy L1 for longer.
    parts = steps * rows * columns * 12 * (moved / size - 1)
    registers = min(255, outputs * lanes + columns * lanes // 2 + 48)
    resident = min(max(1, config.blocks, 65536 // (registers * config.threads)), 2048 // config.threads)
    waves = blocks / (device.multiprocessors * resident)
    together = min(resident, math.ceil(blocks / device.multiprocessors))
    whole = math.ceil(waves) if waves < 4 else waves
    threads = -(-config.threads // 32) * 32  # whole warps issue
    slower = WIDE_STEPS if problem.item == 4 else 1.0
    compute = 2.3 * slower * whole * together * threads * (work + parts) / 128 / CLOCK
    pixels = problem.steps * math.prod(reach(problem, config.tile)) + math.prod(config.tile)
    second = finish_seconds(problem, squeeze_mode(problem, config))
    thread = slower * whole * work * 2e-9
    found = 0.8e-6 + max(problem.bytes / 2.96e12, blocks * pixels * moved / L2, compute, thread)
    return found * (SHARED if config.sharers > 1 else 1.0) + second


def finish_seconds(problem: Problem, mode: int) -> float:
    """Predicted seconds of the launch that adds up the sums of tiles; 0 without one."""
    return FINISH if mode == 1 and not problem.summed else 0.0
