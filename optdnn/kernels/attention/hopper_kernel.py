"""Plans of the fused attention kernel (``attention_sm90.cu``): ``softmax(scale * q k^T + mask) v`` per batch and head.

It uses the online softmax of FlashAttention (Dao et al., 2022). Operands are strided: q, k and v may be parts of one joint
projection's output, and the result may be in [batch, position, head, feature] order, without a transposition.
"""

from __future__ import annotations

import math
from dataclasses import replace

from optdnn.kernels.attention.hopper_config import (
    Config,
    at_once,
    factor_form,
    live_warps,
    loader,
    mask_span,
    query_places,
    refuse,
    refuse_config,
    register_limit,
    row_items,
    shared_bytes,
    threads,
    unfit,
)
from optdnn.kernels.attention.hopper_cost import estimate, has_few_items
from optdnn.kernels.attention.problem import Problem, mask_rows, mask_width
from optdnn.kernels.launch import Launch, Parameters, template_options, tensor_map
from optdnn.kernels.quantized.quantized_store import QuantizedStore, narrow_kind
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.compile.render import values_instruction
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import TensorMap

TILED_MASK = 8
"""The kernel's constant for masks that TMA loads."""
LONG = 4
"""Least tiles of keys that several blocks share. One query has a kernel of its own (``one_query.py``)."""
__all__ = ["Config", "Problem", "candidates", "estimate", "launch", "order_of_sums", "recipe", "refuse"]


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """The kernel's recipe. Lengths, strides and counts are parameters."""
    defines = {
        "WARPGROUPS": config.warpgroups, "BLOCK_KEYS": config.keys, "STAGES": config.stages,
        "LOADER": loader(problem, config), "ONE_TILE": int(config.own_tiles(-(-problem.keys // config.keys)) == 1),
        "PERSISTENT": int(config.persistent), "QUERY_PLACES": query_places(problem, config), "TURNS": int(config.turns), "SPLIT": int(config.split), "SHARERS": config.sharers, "LIVE_WARPS": live_warps(problem) if config.sharers > 1 else 4, "REGISTERS": register_limit(problem, config),
        "HEAD": problem.head, "SPAN": problem.span, "MIN_BLOCKS": config.blocks, "CAUSAL": int(problem.causal), "REACH": int(problem.reach >= 0), "FROM_END": int(problem.from_end), "HAS_LENGTHS": int(problem.lengths),
        "MASK": TILED_MASK if config.tiled else mask_width(problem), "MASK_ROWS": mask_rows(problem),
        "NARROW": narrow_kind(problem.narrow), "FACTORS": factor_form(problem, config), "SOFTCAP": int(problem.softcap > 0),
        "ROUNDED": sum(grid is not None for grid in problem.grids), "SHARED_BYTES": shared_bytes(problem, config),
    }  # fmt: skip
    if problem.sinks:
        defines["SINKS"] = 1
    if problem.factors is not None:
        defines["KEY_WIDTH"] = problem.factors.key_width
    scores = render.wgmma(config.keys, problem.dtype).replace("wgmma_step", "wgmma_scores")
    text = "\n".join([render.constants(defines), scores, values_instruction(problem.head, problem.dtype), ""])
    return Recipe("attention_sm90.cu", arch, {"generated.cuh": text}, template_options(problem.dtype))


def launch(problem: Problem, config: Config, gpu: GpuFacts, narrow: QuantizedStore | None = None) -> Launch:
    """The launch. Operands: ``q``, ``k``, ``v``, ``out``, ``mask``, ``lengths`` (int32 [batch]), ``rows``, ``columns``, ``sinks``. Views carry their offsets, so q,
    k and v may be given the same address."""
    key_heads = problem.key_heads or problem.heads
    parameters = Parameters()
    for name, view, features, heads, positions, rows in (
        ("q", problem.q, problem.features, problem.heads, problem.queries, 64),
        ("k", problem.k, problem.features, key_heads, problem.keys, config.keys),
        ("v", problem.v, problem.values, key_heads, problem.keys, config.keys),
        ("out", problem.out, problem.values, problem.heads, problem.queries, 64),
    ):
        shape = (features, positions, heads, problem.batch)
        # An 8-bit result is stored as plain rows, everything else in swizzled subtiles.
        own = name == "out" and problem.narrow
        item, width, span = (1, problem.head, 0) if own else (2, problem.span // 2, problem.span)
        strides = (view.position * item, view.head * item, view.batch * item)
        dtype = problem.narrow if own else problem.dtype
        box = (width, rows, 1, 1)
        parameters.tensor_map(tensor_map(name, dtype, shape, strides, box, span, offset=view.offset * item))
    if config.tiled:
        parameters.tensor_map(_mask_map(problem, config))
    parameters.pointer(
        "mask" if problem.mask is not None and not config.tiled else None, "lengths" if problem.lengths else None
    )
    parameters.i64(*(problem.mask or (0, 0, 0)))
    parameters.i32(problem.queries, problem.keys, problem.heads, problem.heads // key_heads, problem.causal_offset)
    rows = row_items(problem, config)
    items = rows * problem.heads * problem.batch
    parameters.i32(max(0, problem.reach))
    parameters.i32(problem.mask_period or problem.batch, items, rows)
    parameters.f32(problem.scale * math.log2(math.e))
    (narrow or QuantizedStore()).put(parameters)
    if (f := problem.factors) is not None:
        parameters.pointer("rows", "columns").i64(*f.rows, *f.columns).i32(f.query_width)
    if problem.softcap:
        parameters.f32(*problem.cap)
    parameters.pointer(*(("sinks",) if problem.sinks else ()))
    scores, weights = problem.grids
    if weights is not None:
        parameters.f32(weights.inverse, weights.high, weights.scale)
    if scores is not None:
        parameters.f32(problem.scale * scores.inverse, scores.low, scores.high, scores.scale * math.log2(math.e))
    grid = (rows * config.sharers, problem.heads, problem.batch)
    if config.persistent:
        grid = (min(items, gpu.multiprocessors * at_once(problem, config, gpu)), 1, 1)
    return parameters.launch(
        recipe(problem, config, gpu.arch),
        "attention_sm90",
        grid,
        threads(problem, config),
        shared=shared_bytes(problem, config),
        cluster=config.sharers,
    )


def _mask_map(problem: Problem, config: Config) -> TensorMap[str]:
    """The tiles of a mask: 64 queries times 64 (or 32) keys."""
    assert problem.mask is not None
    batch, head, query = problem.mask
    masks = problem.mask_period or problem.batch
    shape = (problem.keys, problem.queries, problem.heads if head else 1, masks if batch else 1)
    strides = (query * 2, (head or query) * 2, (batch or query) * 2)
    span = mask_span(config)
    return tensor_map("mask", problem.dtype, shape, strides, (span // 2, 64, 1, 1), span)


def order_of_sums(config: Config) -> tuple[int, ...]:
    """Key of the order in which a row is summed: equal keys, equal order."""
    return (config.keys, config.warpgroups if config.split else 1, config.sharers)


def candidates(problem: Problem, device: GpuFacts, limit: int = 6) -> list[Config]:
    """The configurations to time, best predicted first. Empty when the kernel cannot run the problem."""
    if unfit(problem) is not None:
        return []
    found: list[tuple[float, Config]] = []
    for warpgroups in (1, 2, 3, 4):
        for keys in (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256):
            if keys - 16 >= problem.keys and keys > 32:
                continue
            tiles = -(-problem.keys // keys)
            for form in _forms(problem, warpgroups, keys, device):
                for blocks in (
                    4,
                    3,
                    2,
                    1,
                ):  # the most that the registers allow: fewer blocks would not change the kernel
                    config = replace(form, blocks=blocks)
                    if refuse_config(problem, config, device.shared_per_block) is None:
                        found += [
                            (estimate(problem, c, device), c) for c in (config, *_in_turn(problem, config, tiles))
                        ]
                        break
    return varied(found, lambda c: (c.warpgroups, c.keys, c.persistent, c.turns, c.split, c.sharers, c.tiled), limit)


def _forms(problem: Problem, warpgroups: int, keys: int, device: GpuFacts) -> list[Config]:
    """Configurations with rings of several sizes; persistent ones for many items, split ones for few."""
    tiles, found = -(-problem.keys // keys), []
    if 64 * (warpgroups - 1) < problem.queries:
        found += [Config(warpgroups, keys, n) for n in sorted({1, min(2, tiles), min(3, tiles), min(4, tiles)})]
        if row_items(problem, found[0]) * problem.heads * problem.batch > device.multiprocessors:
            found += [Config(warpgroups, keys, n, persistent=True) for n in (2, 3)]
    if warpgroups > 1 and has_few_items(problem, device):
        shared = Config(warpgroups, keys, min(tiles, 2 * warpgroups), split=True)
        items = row_items(problem, shared) * problem.heads * problem.batch
        most = device.multiprocessors // items if tiles >= LONG and problem.queries > 1 else 1
        sharing = [replace(shared, sharers=n) for n in (1, 2, 4, 8) if n <= most]
        found += [replace(c, stages=min(c.block_tiles(tiles), c.stages)) for c in sharing]
    return found if mask_rows(problem) < 2 else [*found, *(replace(c, tiled=True) for c in found)]


def _in_turn(problem: Problem, config: Config, tiles: int) -> list[Config]:
    """The configuration whose warpgroups issue their products in turn, if it has several warpgroups and several tiles."""
    several = config.warpgroups > 1 and tiles > 1 and not config.split
    return [replace(config, turns=True)] if several and problem.grids[1] is None else []
