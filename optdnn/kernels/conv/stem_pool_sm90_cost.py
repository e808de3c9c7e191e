"""Predicted times of launches of ``conv_stem_pool_sm90.cu``, and the configurations that are worth timing."""

from __future__ import annotations

from optdnn.kernels.conv import stem_pool_sm90_kernel as sm90
from optdnn.kernels.conv.stem_cost import CLOCK, L2, LAUNCH, MEMORY, STAGE_ISSUE
from optdnn.kernels.conv.stem_kernel import KINDS
from optdnn.kernels.conv.stem_pool_kernel import Problem
from optdnn.kernels.conv.stem_pool_sm90_kernel import CHANNELS, THREADS, Config
from optdnn.kernels.ranking import joint, varied
from optdnn.runtime.cuda.gpu_facts import GpuFacts

POWER, ISSUE, ALONE, START = 1.63, 1.12, 900, 2330
"""POWER: exponent of the norm that combines overlapping times; ISSUE: cycles of a scheduler for an instruction; ALONE:
cycles that a pair of rows waits; START: cycles of a block's start. Fitted to 147 timings of 20 problems on an H200: 8 %
off on average, and the first choice was the fastest for each problem."""


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    conv, (x, y, _), sms = problem.conv, sm90.grid(problem, config), device.multiprocessors
    s, blocks, at_once, tile_w = conv.source, x * y, sm90.resident(problem, device), sm90.tile_w(problem)
    turns, beside = -(-blocks // (sms * at_once)), min(at_once, -(-blocks // sms))
    pairs = config.band + (problem.window == 3 and config.band < problem.size[0])
    # A pair of rows: its products, and a warp's instructions for its pixels, windows and results.
    products = conv.layout.steps * tile_w
    each = 2 + sum(STAGE_ISSUE.get(str(name), 1.0) for name, *_ in conv.epilogue if name not in ("bias", "relu"))
    planes, wide = 2 * s.stride[0] * s.channels, sm90.columns(problem)
    staged = sm90.rounds(problem) * (38 + conv.vector * (0.6 if conv.image == conv.dtype else 2.0))
    staged += 9 * -(-planes * tile_w // THREADS)
    issued = (tile_w // 8 * (8 * each + 14) + staged + 150) * ISSUE
    pair = joint(POWER, beside * products, beside * issued, products / 2 + issued + ALONE)
    compute = turns * (START + pairs * pair)
    l2 = blocks * (pairs + sm90.lead(problem) - 1) * planes * wide * KINDS[conv.image][1] + problem.bytes
    return LAUNCH + joint(POWER, compute / CLOCK, problem.bytes / MEMORY, l2 / L2)


def candidates(problem: Problem, device: GpuFacts, limit: int = 4) -> list[Config]:
    """The configurations to time, best predicted first."""
    if sm90.refuse(problem, Config(1), device.arch) is not None:
        return []
    slots = device.multiprocessors * sm90.resident(problem, device)
    blocks = problem.conv.batch * -(-problem.conv.channels // CHANNELS)
    bands = {min(problem.size[0], max(1, slots * turns // blocks)) for turns in (1, 2, 3, 4, 6)}
    found = [Config(band) for band in {-(-problem.size[0] // n) for n in bands}]
    return varied([(estimate(problem, c, device), c) for c in found], lambda c: c, limit)
