"""Runs blocks of a launch that wait for one another in parallel: one process per block.

The processes are forked from a small process without NumPy. Forking the process of the tests takes tens of milliseconds, since
it holds gigabytes. Called with the arguments of :func:`run_blocks` as JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from collections.abc import Sequence

SECONDS = 60
"""After this time, a block counts as waiting for ever."""


def load(library: str) -> ctypes.CDLL:
    """A library that was linked without the libraries of C++ and C."""
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(library)


def run_blocks(
    library: str,
    entry: str,
    parameters: str,
    pointers: Sequence[tuple[int, int]],
    threads: Sequence[int],
    memory: int,
    size: int,
) -> bool:
    """Run each block of ``entry`` in a process; returns whether all ended without a fault.

    ``parameters``: the parameter block in hexadecimal. ``pointers``: (place in the block, place in the memory). ``threads``:
    the grid and the block. ``memory``: the file of ``size`` bytes that all processes share.
    """
    loaded, shared = load(library), mmap.mmap(memory, size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    block = bytearray.fromhex(parameters)
    for at, place in pointers:
        block[at : at + 8] = (base + place).to_bytes(8, "little")
    raw = (ctypes.c_char * len(block)).from_buffer(block)
    only, children = ctypes.c_int.in_dll(loaded, "only_block"), []
    for number in range(threads[0]):
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            only.value = number
            getattr(loaded, entry)(raw, *map(ctypes.c_uint, threads))
            os._exit(0)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children] == [0] * threads[0]


if __name__ == "__main__":
    os._exit(0 if run_blocks(*json.loads(sys.argv[1])) else 1)
