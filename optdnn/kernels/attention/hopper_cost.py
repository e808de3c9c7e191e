"""The predicted time of a launch of ``attention_sm90.cu``. Launches of few items have a model of their own
(:mod:`optdnn.kernels.attention.few_items`)."""

from __future__ import annotations

import math

from optdnn.kernels.attention import few_items
from optdnn.kernels.attention.hopper_config import Config, at_once, factor_form, row_items, shared_bytes, threads
from optdnn.kernels.attention.problem import Problem
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MEMORY = 4.2e12
CLOCK = 1.75e9
ENDS = 2200
"""Cycles of a block's first loads and last store."""
TURNS, IDLE_TURNS = 0.96, 1.02
"""A tile's cycles with turns (warpgroups issue their products one after the other), over its cycles without: where turns help, and
where they do not."""
SAMPLED = 64
"""Items of a head whose tiles the model counts."""


def has_few_items(problem: Problem, device: GpuFacts) -> bool:
    """Whether blocks of 64 queries leave multiprocessors idle, or just occupy them."""
    return row_items(problem, Config(1, 16, 1)) * problem.heads * problem.batch <= device.multiprocessors


def tiles_seen(problem: Problem, config: Config) -> float:
    """Tiles of keys that an item's queries see, on average, where all keys are filled."""
    tiles = -(-problem.keys // config.keys)
    if problem.reach < 0:
        square = problem.causal and problem.queries == problem.keys
        return tiles * (min(1.0, 0.5 + 0.5 * config.keys / problem.keys) if square else 1.0)
    ahead = problem.causal_offset + (problem.keys - problem.queries if problem.from_end else 0)
    rows, count = config.queries, row_items(problem, config)
    seen, sampled = 0, range(0, count, -(-count // SAMPLED))
    for item in sampled:
        end = min(problem.keys, max(0, (item + 1) * rows + ahead)) if problem.causal else problem.keys
        last = -(-end // config.keys)
        seen += last - min(last, max(0, item * rows + ahead - problem.reach) // config.keys)
    return seen / len(sampled)


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    tiles = -(-problem.keys // config.keys)
    seen = tiles_seen(problem, config)
    items = row_items(problem, config) * problem.heads * problem.batch
    by_shared = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    registers = min(255, (config.keys + problem.head) // 2 + 60)
    warps = 4 * (512 // registers)
    resident = max(1, min(by_shared, max(config.blocks, warps // (threads(problem, config) // 32))))
    if config.persistent:
        resident = at_once(problem, config, device)
    # Of one warpgroup and tile, in cycles: both products, then the scores' exponentials and their arithmetic.
    multiply = config.keys * problem.head / 16 * 2
    plain = 1 / 16 + 7 / 128
    added = 0 if problem.mask is None else 10 / 128 if problem.mask[2] else 3 / 128
    added += (0, 1, 5)[factor_form(problem, config)] / 128
    if has_few_items(problem, device):
        busiest = math.ceil(seen) if problem.reach >= 0 else tiles  # of one wave, the item with the most tiles decides
        own, work = max(1, config.own_tiles(busiest)), (plain + added) / plain
        groups, split = (1, config.warpgroups) if config.split else (config.warpgroups, 1)
        return few_items.seconds(config.keys, own, groups, problem.head, work, split, ahead=config.stages > split)
    scores = 64 * config.keys * (plain + added) + 150
    alone = 4 * scores * 0.5 + multiply + 300  # one warpgroup uses a quarter of each unit's issue slots well
    if config.stages == 1 and tiles > 1:  # nothing is loaded while it multiplies
        alone += 1000
    slack = 1.03 if config.stages == 2 and tiles > 32 else 1.0
    if config.stages == 2 < min(tiles, config.warpgroups):  # a stage is free when the last one of many has read it
        slack = 1.05
    groups = config.warpgroups * min(resident, -(-items // device.multiprocessors))
    tile = max(groups * max(multiply, scores), alone) / groups * _turns(problem, config, resident)
    waves = items / (device.multiprocessors * resident)
    waves = math.ceil(waves) if waves < 3 else waves + 0.5
    block = groups * seen * tile * slack
    # Loads of persistent blocks run ahead: between items, a block waits only for its last products.
    cycles = waves * (block + 500) + ENDS if config.persistent else waves * (block + ENDS)
    loaded = tiles if problem.reach < 0 else seen
    traffic = items * (2 * config.keys * loaded + 2 * config.queries) * problem.head * 2
    compute, share = cycles / CLOCK, sector_share(problem)
    loads = traffic * share / 5.5e12
    besides = 0.25 * min(compute, loads) if share > 1 or problem.reach >= 0 else 0.0
    return 0.8e-6 + max(compute, problem.bytes / MEMORY, loads) + besides


def _turns(problem: Problem, config: Config, resident: int) -> float:
    """A tile's cycles in this configuration, over its cycles without turns.

    Turns do not help where other blocks share the multiprocessor, where the warpgroups of a causal problem have different tiles, or
    where a bias of factors leaves little time between products."""
    if not config.turns:
        return 1.0
    even = not problem.causal or problem.reach >= 0
    return TURNS if resident == 1 and even and problem.factors is None else IDLE_TURNS


def sector_share(problem: Problem) -> float:
    """Sectors of L2 (32 bytes) that the rows of keys and values touch, over those that they fill: rows of a subtile that do not begin at
    one touch one more."""
    starts = (x for view in (problem.k, problem.v) for x in (view.batch, view.head, view.position, view.offset))
    return 1.0 if all(x % 16 == 0 for x in starts) else 1.0 + 32 / problem.span
