"""Rates of an H200, waves of blocks, and instructions of stages: the cost models of the convolution kernels share them."""

from __future__ import annotations

import math
from functools import lru_cache

from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.launch import SECTOR
from optdnn.runtime.cuda.compile.render import Stage
from optdnn.runtime.cuda.gpu_facts import GpuFacts

CLOCK = 1.75e9  # Hz under load
MEMORY = 4.2e12  # bytes/s, read + written
L2_PER_CLOCK = 56.0  # bytes per cycle and multiprocessor that TMA loads from L2
LATENCY = 1.5e-6  # s: launch, wait, first load, last store of a dependent kernel
MOST_SUMS = 320  # largest ``mt * bn``, twice the accumulators per thread, of proposed tiles; the kernel takes up to 320
STAGE_ISSUE = {
    "relu": 0.5,
    "gelu": 10.0,
    "gelu_tanh": 8.0,
    "tanh": 8.0,
    "silu": 6.0,
    "rounded_silu": 10.0,
    "rounded_hard_swish": 6.0,
    "swish": 7.0,
    "sigmoid": 6.0,
    "softplus": 16.0,
    "mish": 9.0,
    "selu": 7.0,
    "celu": 10.0,
    "softsign": 4.0,
    "sqrt": 8.0,
    "reciprocal": 8.0,
    "sin": 6.0,
    "cos": 6.0,
    "elu": 6.0,
    "prelu": 2.0,
    "snake": 8.0,
}
EXPONENTIAL = frozenset({"silu", "swish", "sigmoid", "elu", "softplus", "mish", "selu", "celu", "sin", "cos", "snake"})


def waves_of(tiles: int, split: int, device: GpuFacts, room: int = 1) -> int:
    """Waves of blocks on a multiprocessor when a cluster of ``split`` blocks shares each tile. ``room``: resident
    blocks per multiprocessor."""
    waves = -(-tiles * split // device.multiprocessors)
    if split == 1:
        return waves
    return max(waves, -(-tiles // (device.clusters_at_once(split) * room)))


def room_for(shared: int, threads: int, sums: int, device: GpuFacts) -> int:
    """About how many blocks fit a multiprocessor, by shared memory and by registers with ``sums`` accumulators per thread."""
    return max(1, min(device.shared_per_multiprocessor // (shared + 1024), 65536 // (threads * (sums + 64))))


def sector_bytes(size: int, pitch: int) -> float:
    """Mean bytes of the sectors that a block's ``size`` bytes of a pixel touch. Pixels begin at multiples of ``pitch`` bytes, slabs of
    channels at multiples of their size."""
    return size + SECTOR - math.gcd(SECTOR, size, pitch)


def most_sums(problem: Problem) -> int:
    """Largest ``mt * bn`` (twice the accumulators per thread) of proposed tiles: with an exponential, the widest spill."""
    stages = (*problem.epilogue, *(problem.beside or ()))
    return 256 if any(name in EXPONENTIAL for name, *_ in stages) else MOST_SUMS


def issue(problem: Problem) -> float:
    """Epilogue instructions per accumulator."""
    norm, own = 0.0 if problem.norm is None else 2.0, stages_issue(problem.epilogue)
    if problem.beside is not None:  # half as many results are packed and stored
        return norm + 2.0 + (own + stages_issue(problem.beside)) / 2
    return norm + 3.0 + own


@lru_cache(maxsize=256)
def stages_issue(stages: tuple[Stage, ...]) -> float:
    """Instructions of these stages for an element, the bias aside. Cached: hundreds of configurations are estimated for one problem."""
    return sum(STAGE_ISSUE.get(str(name), 1.0) for name, *_ in stages if name != "bias")
