"""The configurations of the Hopper convolution kernel that are worth trying, the best predicted first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from optdnn.kernels.conv.cost import estimate
from optdnn.kernels.conv.cost_terms import most_sums
from optdnn.kernels.conv.implicit_gemm import SHARES, Config, deepest, refuse, shared_bytes
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.conv.product_cost import mid_size_product
from optdnn.kernels.ranking import varied_pairs
from optdnn.runtime.cuda.gpu_facts import GpuFacts

HALF_SHARED = 113 * 1024  # two blocks, or a block and its successor, fit a multiprocessor
WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 104, 112, 128, 144, 160, 176, 192, 200, 208, 224, 240, 256)
BETWEEN = (88, 120, 136, 152, 168, 184, 216, 232, 248)  # widths for whole tiles that nearly fill the machine
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)


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


def estimated(problem: Problem, device: GpuFacts, limit: int, *, direct: bool) -> list[tuple[float, Config]]:
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
