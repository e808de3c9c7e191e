"""Ranks configurations of the separable convolution without a GPU: work of the units per tile, waves, and latency."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from optdnn.kernels.conv.cost_terms import CLOCK, MEMORY, stages_issue
from optdnn.kernels.conv.separable_kernel import (
    Config,
    Problem,
    batch,
    no_kernel,
    patch,
    refuse,
    shared_bytes,
    stage_bytes,
    steps,
    tiles,
)
from optdnn.kernels.launch import at_once
from optdnn.kernels.ranking import varied
from optdnn.runtime.cuda.gpu_facts import GpuFacts

LAUNCH = 0.55e-6  # s
RESULT = 1100.0  # cycles from requesting a patch to its first byte
HALO = 2.2  # cycles in which TMA loads a pixel's row of any width
L2 = 90.0  # bytes per cycle and multiprocessor that TMA loads; patches of neighbors overlap
MEMORY_SHARE = 0.88  # fraction of the bandwidth of copies
CHAIN = 520.0  # cycles of 16 channels in a warp by itself, from their loads to the operand of wgmma
ALONE = 9.5  # further cycles per product of two taps
BATCHED = 1.6  # factor on the throughput if two groups of 16 channels are filtered together
BUSY, PRODUCT = 53.0, 11.0  # cycles of a scheduler for 16 channels, and for each of their products of two taps
BANK = 1.65  # cycles of shared memory per wavefront
STORE = 3.0  # cycles per channel of a strip in the epilogue
EXCHANGE = 24.0  # bytes of partial sums per cycle between the blocks of a cluster
CROWD = 3.0  # further exchange time, as a factor, if every multiprocessor sends


@lru_cache(maxsize=4096)
def _wavefronts(strip_w: int, stride: tuple[int, int], patch_w: int, span: int) -> float:
    """Wavefronts of an ldmatrix of four 8 x 8 matrices: the mean over the positions at which a strip begins."""
    total = 0
    for start, half in product(range(8), (0, 8)):
        banks = [0] * 8
        for pixel in range(half, half + 8):
            index = start + pixel // strip_w * stride[0] * patch_w + pixel % strip_w * stride[1]
            swizzle = (index & 7) if span == 128 else (index >> 1 & 3) if span == 64 else (index >> 2 & 1)
            banks[(index * span // 16 ^ swizzle) % 8] += 1
        total += 2 * max(banks)
    return total / 8


def _loads(problem: Problem, config: Config) -> int:
    """Loads of a warp per 16 channels."""
    s, down = problem.source, 16 // config.strip_w * problem.source.stride[0]
    rows = len({m * down + r * s.dilation[0] for m in range(config.strips) for r in range(s.kernel[0])})
    return rows * s.kernel[1]


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch. Fitted to 450 timings on an H200: within 10 % for the present kernel,
    within 15 % for an earlier one."""
    s, (patch_h, patch_w) = problem.source, patch(problem, config)
    jobs = math.prod(tiles(problem, config)) * problem.batch * config.split
    blocks = max(
        1, min(at_once(shared_bytes(problem, config), config.blocks), -(-jobs // device.multiprocessors))
    )  # that share a multiprocessor
    chunks, sixteens = -(-steps(problem, config) // config.split), config.block / 16
    warps = config.warpgroups * 4 * blocks
    # Cycles of 16 channels: of a scheduler per warp, of shared memory per warp, and of one warp by itself.
    products = config.strips * 2 * s.kernel[0] * -(-s.kernel[1] // 2)
    busy = BUSY + PRODUCT * products + config.strips * (0.56 * config.width + 4 * stages_issue(problem.between))
    shared = BANK * _loads(problem, config) * _wavefronts(config.strip_w, s.stride, patch_w, config.block * 2)
    alone = (CHAIN + ALONE * products + 41 * config.strips) / (1 if batch(problem, config) == 1 else BATCHED)
    moved = patch_h * patch_w * config.block * 2 + config.width * config.block * 2
    load = max(HALO * patch_h * patch_w, moved / L2)
    work = sixteens * max(warps / 4 * busy, warps * shared)  # of a chunk in all resident blocks
    refill = chunks > config.stages or jobs > device.multiprocessors * blocks
    wait = (RESULT + load) / blocks / max(1, config.stages - 1) if refill else 0.0
    chunk = max(work / blocks, sixteens * alone / blocks, load, wait)
    epilogue = 500 + STORE * config.strips * config.width * (stages_issue(problem.epilogue) + 2)
    if config.split > 1:
        sent = config.warpgroups * config.strips * 64 * config.width * 4
        epilogue += 100 + sent * (1 + CROWD * min(2.0, jobs / device.multiprocessors)) / EXCHANGE
    waves = jobs / (device.multiprocessors * at_once(shared_bytes(problem, config), config.blocks))
    waves = math.ceil(waves) if waves < 4 else waves + 0.3
    first = (
        RESULT + load * blocks + chunks * max(work, sixteens * alone, load * blocks) + epilogue * max(1.0, 0.5 * blocks)
    )
    later = blocks * chunks * chunk + 1.5 * epilogue
    compute = (first + max(0.0, waves - 1) * later) / CLOCK
    memory = problem.bytes / (MEMORY * MEMORY_SHARE)
    return LAUNCH + max(compute, memory) + 0.1 * min(compute, memory)


def _widths(problem: Problem) -> Iterator[tuple[int, int]]:
    """Parts and columns of a tile's output channels."""
    n = problem.channels
    for tiles_ in range(-(-n // 320), -(-n // 320) + 2):
        each = -(-n // tiles_ // 8) * 8
        if each <= 256:
            yield 1, each
        else:
            yield 2, -(-each // 16) * 8


def in_one_order(config: Config) -> bool:
    """Whether the order of summation is the same for all sizes: one block sums a result, with one strip per warp."""
    return config.split == 1 and config.strips == 1


def candidates(problem: Problem, device: GpuFacts, limit: int = 12, *, ordered: bool = False) -> list[Config]:
    """The configurations to time, best predicted first; at most two per tile. Empty if the kernel cannot run the problem.
    ``ordered``: only those that are :func:`in_one_order`."""
    if no_kernel(problem) is not None:
        return []
    out_h, out_w = problem.out_size
    found: list[tuple[float, Config]] = []
    for parts, columns in _widths(problem):
        for warpgroups in (1, 2):
            for strips in (1, 2, 4) if not ordered else (1,):
                for strip_w in (16, 8, 4):
                    for grid_x in (1, 2, 4, 8):
                        if warpgroups * 4 % grid_x or (grid_x > 1 and (grid_x - 1) * strip_w >= out_w):
                            continue
                        for block in (64, 32, 16):
                            if block > 16 and block - 16 >= problem.inner:
                                continue
                            tile = Config(warpgroups, strips, strip_w, grid_x, parts, columns, block, 1)
                            if tile.tile[0] >= 2 * out_h and tile.tile[0] > 4:
                                continue
                            rings = _rings(problem, tile, device, ordered)
                            found += [(estimate(problem, c, device), c) for c in rings]
    return varied(found, lambda c: (*c.tile, c.strips, c.width, c.split, c.block), limit)


def _rings(problem: Problem, tile: Config, device: GpuFacts, ordered: bool) -> Iterator[Config]:
    """Splits (``ordered``: none), stages and blocks per multiprocessor of a tile."""
    count, whole = math.prod(tiles(problem, tile)) * problem.batch, steps(problem, tile)
    chunk = stage_bytes(problem, tile)
    splits = [
        k
        for k in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16)
        if k <= whole and (k == 1 or (not ordered and count * k <= 2 * device.multiprocessors))
    ]
    for split in splits:
        for blocks in (1, 2, 3, 4):
            if blocks > 1 and (split > 1 and blocks > 2):
                continue
            room = min(device.shared_per_block, device.shared_per_multiprocessor // blocks - 1024)
            bare = replace(tile, split=split, blocks=blocks)
            room -= shared_bytes(problem, bare) - chunk
            most = -(-whole // split) if count <= device.multiprocessors or split > 1 else 8
            stages = min(8, room // chunk, most)
            config = replace(bare, stages=max(1, stages))
            if (stages >= 2 or whole <= split) and refuse(problem, config, shared=device.shared_per_block) is None:
                yield config
