"""The predicted time of a launch of ``attention_sm90.cu``. Launches of few items have a model of their own
(:mod:`optdnn.kernels.attention.few_items`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from optdnn.kernels.attention import few_items
from optdnn.kernels.attention.hopper_config import (
    Config,
    at_once,
    factor_form,
    live_warps,
    query_places,
    row_items,
    shared_bytes,
    threads,
)
from optdnn.kernels.attention.problem import Problem, mask_rows
from optdnn.runtime.cuda.gpu_facts import GpuFacts

MEMORY = 4.2e12
CLOCK = 1.75e9
ENDS, WAVE, BETWEEN = 2200, 4200, 1400
"""Cycles of a block's first loads and last store; the same in a further wave; of a persistent block between two items (its loads
run ahead). With one buffer of queries, they wait for the store as in a further block."""


@dataclass(frozen=True)
class Tile:
    """Cycles of a warpgroup's tile. ``score``: per score. ``scores``: per tile of scores. ``product``: of the products, per key and
    feature. ``alone``: for a single warpgroup, factors of the cycles of scores and of products, and further cycles. ``turns``: by
    number of warpgroups, the share of cycles that is left with turns (warpgroups issue their products one after the other)."""

    score: float
    scores: float
    product: float
    alone: tuple[float, float, float]
    turns: Mapping[int, float]


PLAIN = Tile(0.0833, 150, 0.07, (0.97, 1.55, 580), {2: 0.94, 3: 0.95, 4: 0.86})
MASKED = Tile(0.1172, 150, 0.125, (2.0, 1.0, 300), {2: 1.0, 3: 1.0, 4: 1.0})
"""A tile with a mask: it waits for memory."""
IDLE_TURNS = 1.02
"""Cycles of a tile with turns over its cycles without, if turns do not help."""
FEW_SCORE = 1 / 16 + 7 / 128
"""Cycles of a score without a mask, for launches of few items: their model takes the work of a mask as a ratio to it."""
CAPPED = 2 / 16 + 4 / 128
"""Cycles of a score's softcap: an exponential and a reciprocal, and their arithmetic."""
ROUNDED = 12 / 128
"""Cycles of the roundings of a score and of its weight."""
TILED, TILED_TWO, TILED_MORE = 5 / 128, 1.22, 1.1
"""Cycles of a score's mask that is read from shared memory; factors on the cycles of a block with two stages, and with others."""
SAMPLED = 64
"""Number of a head's items for which the model counts tiles."""


def has_few_items(problem: Problem, device: GpuFacts) -> bool:
    """Whether there are at most as many blocks of 64 queries as multiprocessors."""
    return row_items(problem, Config(1, 16, 1)) * problem.heads * problem.batch <= device.multiprocessors


def tiles_seen(problem: Problem, config: Config) -> float:
    """Average number of key tiles that an item's queries see if all keys are filled."""
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
    again = (
        2 if problem.grids[1] is not None and tiles > 1 else 1
    )  # a row's scores are computed for its sum, then for its weights
    seen = tiles_seen(problem, config) * again
    items = row_items(problem, config) * problem.heads * problem.batch
    by_shared = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    registers = min(255, (config.keys + problem.head) // 2 + 60)
    warps = 4 * (512 // registers)
    resident = max(1, min(by_shared, max(config.blocks, warps // (threads(problem, config) // 32))))
    if config.persistent:
        resident = at_once(problem, config, device)
    # Cycles per warpgroup and tile: both products, then the exponentials and arithmetic of the scores.
    unit = PLAIN if problem.mask is None or config.tiled else MASKED
    multiply = config.keys * problem.head * unit.product
    added = 0 if problem.mask is None else TILED if config.tiled else 10 / 128 if problem.mask[2] else 3 / 128
    added += (0, 2, 36)[factor_form(problem, config)] / 128 + (CAPPED if problem.softcap else 0)
    added += ROUNDED / 2 * sum(grid is not None for grid in problem.grids)
    if has_few_items(problem, device):
        busiest = math.ceil(seen) if problem.reach >= 0 else tiles  # in one wave, the item with the most tiles decides
        own, work = again * max(1, config.own_tiles(busiest)), (FEW_SCORE + added) / FEW_SCORE
        groups, split = (1, config.warpgroups) if config.split else (config.warpgroups, 1)
        alone = few_items.seconds(config.keys, own, groups, problem.head, work, split, ahead=config.stages > split)
        return max(alone, 0.8e-6 + problem.bytes / MEMORY) + few_items.shared(
            config.sharers, live_warps(problem), problem.head
        )
    scores = 64 * config.keys * (unit.score + added) + unit.scores
    alone = unit.alone[0] * scores + unit.alone[1] * multiply + unit.alone[2]
    if config.stages == 1 and tiles > 1:  # nothing is loaded while the warpgroup multiplies
        alone += 1000
    slack = 1.03 if config.stages == 2 and tiles > 32 else 1.0
    if config.tiled:
        slack = TILED_TWO if config.stages == 2 < tiles else TILED_MORE
    elif config.stages == 2 < min(tiles, config.warpgroups):  # a stage is free only when the last warpgroup has read it
        slack = 1.05
    groups = config.warpgroups * min(resident, -(-items // device.multiprocessors))
    tile = max(groups * max(multiply, scores), alone) / groups * _turns(config, resident, unit)
    waves = items / (device.multiprocessors * resident)
    waves = math.ceil(waves) if waves < 3 else waves + 0.5
    block = groups * seen * tile * slack
    further = WAVE if resident == 1 else ENDS  # other blocks of the multiprocessor multiply meanwhile
    between = BETWEEN if query_places(problem, config) == 2 else ENDS
    cycles = waves * (block + between) + ENDS if config.persistent else waves * (block + further) + ENDS - further
    traffic = items * (2 * config.keys * seen + 2 * config.queries) * problem.head * 2
    traffic += items * config.queries * config.keys * seen * 2 if mask_rows(problem) == 2 else 0
    compute, share = cycles / CLOCK, sector_share(problem)
    loads = traffic * share / 5.5e12
    besides = 0.25 * min(compute, loads) if share > 1 or problem.reach >= 0 else 0.0
    return 0.8e-6 + max(compute, problem.bytes / MEMORY, loads) + besides


def _turns(config: Config, resident: int, unit: Tile) -> float:
    """Cycles of a tile in this configuration over its cycles without turns.

    Turns do not help if other blocks share the multiprocessor."""
    if not config.turns:
        return 1.0
    return unit.turns[config.warpgroups] if resident == 1 else IDLE_TURNS


def sector_share(problem: Problem) -> float:
    """L2 sectors (32 bytes) that the rows of keys and values touch, over the sectors that they fill. A row of a subtile that does not
    begin at a sector touches one more."""
    starts = (x for view in (problem.k, problem.v) for x in (view.batch, view.head, view.position, view.offset))
    return 1.0 if all(x % 16 == 0 for x in starts) else 1.0 + 32 / problem.span
