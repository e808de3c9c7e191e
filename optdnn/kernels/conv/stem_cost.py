"""Predicted times of launches of ``conv_stem.cu``, and the configurations that are worth timing."""

from __future__ import annotations

import math
from itertools import product

from optdnn.kernels.conv import cost_terms
from optdnn.kernels.conv.stem_kernel import KINDS, Config, Problem, halo, keeps, refuse, resident, tiles
from optdnn.kernels.ranking import joint, varied
from optdnn.runtime.cuda.gpu_facts import GpuFacts

CLOCK, MEMORY, L2 = 1.7e9, 6.3e12, 5.5e12
MMA, WAVE, ISSUE = 1.41, 0.71, 1.35
"""Cycles of a multiprocessor: of its tensor cores for an m16n8k16, of its shared memory for 128 bytes, and of its four
schedulers for four instructions."""
WAIT, AHEAD, STEP, START, LAUNCH, POWER = 2080, 290, 58, 570, 1.23e-6, 2.31
"""WAIT: cycles until pixels arrive; AHEAD: the same if they were requested one tile ahead; STEP: least cycles of a K
step; START: cycles of a block's start; LAUNCH: seconds of a launch; POWER: exponent of the norm that combines
overlapping times. With this norm, the fitted rates of memory and L2 are higher than the real ones. All are fitted to
570 timings on an H200 (docs/internals/kernels-convolutions.md)."""
STAGE_ISSUE = {**cost_terms.STAGE_ISSUE, "gelu": 12.0, "gelu_tanh": 20.0, "tanh": 16.0}
"""Instructions of an epilogue stage per result; other stages have 1."""


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    across, down = tiles(problem, config)
    count = problem.batch * across * down * -(-problem.channels // (config.columns * 8))
    at_once = resident(problem, config, device)
    blocks = min(count, device.multiprocessors * at_once)
    turns = math.ceil(count / blocks) if count < 3 * blocks else count / blocks
    return seconds(problem, config, device, at_once, (count, turns, 1), problem.bytes)


def seconds(
    problem: Problem, config: Config, device: GpuFacts, at_once: int, work: tuple[int, float, int], moved: int
) -> float:
    """Predicted seconds of a launch with ``at_once`` blocks on a multiprocessor. ``work``: all tiles; tiles that a
    resident slot of a multiprocessor runs in turn; blocks that it runs in turn. ``moved``: bytes of global memory."""
    s, layout, warps, sms = problem.source, problem.layout, math.prod(config.warps), device.multiprocessors
    (count, turns, starts), (rows, columns) = work, halo(problem, config)
    sets, pixels = (1 if layout.planes else s.channels), rows * columns * s.channels
    # Instructions of a warp per tile: its share of the pixels, fragments and products, results.
    kept = keeps(problem, config)
    rounds = -(-pixels // problem.vector // sets // config.threads)
    staged = rounds * (20 + 8 * sets + problem.vector * sets * (0.6 if problem.image == problem.dtype else 2.0))
    each = sum(STAGE_ISSUE.get(str(name), 1.0) for name, *_ in problem.epilogue if name not in ("bias", "relu"))
    stored = config.m * config.n * (6 + 4 * each) + config.m * (16 + config.n) + 80
    products = layout.steps * config.m * config.n * (3 if problem.dtype == "float32" else 1)
    issued = staged + products + layout.steps * (4 * config.m + (0 if kept else config.n / 2)) + stored
    fragments = layout.steps * (4 * config.m + (0 if kept else 2 * config.n))
    busy = joint(
        POWER,
        products * warps * MMA,
        (fragments * warps + pixels * problem.item / 64) * WAVE,
        issued * warps / 4 * ISSUE,
    )
    # Cycles of a tile in a block that has a multiprocessor alone: loads, barriers and K steps wait.
    crowd = max(1.0, warps / 4)
    mma, load = config.m * config.n * 4 * MMA * crowd, fragments / layout.steps * warps * WAVE
    step = max(STEP, mma, load) + min(mma, load) / math.ceil(warps / 4)  # a single warp does not overlap them
    alone = (AHEAD if config.ahead else WAIT) + layout.steps * step + (staged + stored) * crowd * ISSUE + 465
    tile = joint(POWER, alone, min(at_once, math.ceil(count / sms)) * busy)
    weights = config.columns * 8 * layout.steps * 2  # chunks of 16 bytes
    beside = min(at_once, max(1.0, count / sms))
    start = START + max(weights / config.threads * 10, beside * weights * 1.25)
    compute = start * starts + turns * tile
    # The image with halos is read from L2, and the result is written there too.
    blocks = min(count, sms * at_once) * starts
    l2 = count * pixels * KINDS[problem.image][1] + moved + blocks * weights * 16
    return LAUNCH + joint(POWER, compute / CLOCK, moved / MEMORY, l2 / L2)


def layout_seconds(problem: Problem) -> float:
    """Seconds to add to the prediction of Hopper's own kernel.

    That kernel needs a launch before it, which writes blocks of pixels with channels padded to a multiple of 8. It also
    takes longer than predicted with so few channels. 30 pairs of launches on an H200 took 1.7 to 4 us more than the
    kernel's prediction at batch 1, and 41 to 83 us at batch 128."""
    s = problem.source
    lanes = -(-s.channels * math.prod(s.stride) // 8) * 8
    read = problem.batch * s.channels * s.height * s.width * KINDS[problem.image][1]
    written = (
        problem.batch
        * lanes
        * problem.item
        * math.prod(-(-n // k) for n, k in zip((s.height, s.width), s.stride, strict=True))
    )
    return 1.5e-6 + (read + written) / 1.6e12


def candidates(problem: Problem, device: GpuFacts, limit: int = 16) -> list[Config]:
    """The configurations to time, best predicted first; at most two per tile."""
    out_h, out_w = problem.out_size
    eights = problem.channels // 8
    columns = sorted(
        {eights // k for k in range(1, eights + 1) if eights % k == 0 and eights // k <= 12} | {min(eights, 8)}
    )[-3:]
    widths = sorted({min(256, -(-out_w // k // 8) * 8) for k in (1, 2, 3, 4, 7)})
    found: list[tuple[float, Config]] = []
    for tile_w, tile_h, m, wide in product(widths, (1, 2, 4, 8, 16), (1, 2, 3, 4, 7), columns):
        if tile_h > 1 and tile_h >= 2 * out_h:
            continue
        for n in {wide // k for k in (1, 2, 3, 4) if wide % k == 0}:
            for ahead in (False, True):
                config = Config(tile_h, tile_w, m, n, wide, ahead)
                if refuse(problem, config) is None:
                    found.append((estimate(problem, config, device), config))
    return varied(found, lambda c: (c.tile_h, c.tile_w), limit)
