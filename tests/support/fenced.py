"""Runs a single launch on a GPU, with fences around its results: bytes that no kernel may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.allocator import fill
from optdnn.runtime.cuda.compile.nvrtc import KernelCache
from optdnn.types import Array
from support.bound import bound
from support.device_memory import Memory

FENCE = 4096


def run_fenced(
    made: Launch, operands: Mapping[str, Array], results: Mapping[str, Array], folder: Path
) -> dict[str, Array]:
    """All operands and results after the launch. Three runs over results that are full of 0xFF (NaN) give the same bits.

    ``results`` say the types and shapes. Kernels are compiled into ``folder``.
    """
    memory = Memory()
    sizes = {key: a.nbytes + 2 * FENCE for key, a in results.items()}
    raw = {key: memory.put(np.full(size, 0xFF, np.uint8)) for key, size in sizes.items()}
    at = {key: memory.put(a) for key, a in operands.items()} | {key: place + FENCE for key, place in raw.items()}
    ready = bound(made, at, KernelCache(folder))
    found: list[dict[str, Array]] = []
    for _ in range(3):
        for key, size in sizes.items():
            fill(raw[key], 0xFF, size)
        memory.run(ready)
        found.append({})
        for key, a in results.items():
            around = memory.get(raw[key], (sizes[key],), np.dtype(np.uint8))
            assert (around[:FENCE] == 0xFF).all(), f"{key}: bytes before it were written"
            assert (around[-FENCE:] == 0xFF).all(), f"{key}: bytes after it were written"
            found[-1][key] = around[FENCE:-FENCE].view(a.dtype).reshape(a.shape)
    left = {key: memory.get(at[key], a.shape, a.dtype) for key, a in operands.items()}
    memory.free()
    assert all(run[key].tobytes() == found[0][key].tobytes() for run in found for key in results)
    return {**left, **found[0]}
