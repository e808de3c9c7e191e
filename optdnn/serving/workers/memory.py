"""Memory that the server shares with a worker: a file without a name, which both map and either may lengthen."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np

from optdnn.errors import UsageError
from optdnn.types import Array, DType

ALIGNMENT = 64
"""Bytes that each tensor's offset is a multiple of."""
_STEP = 1 << 16


def new_file() -> int:
    """The descriptor of a new empty file in memory. It is gone with the last process that holds it."""
    if not hasattr(os, "memfd_create"):
        raise UsageError(
            "worker processes need Linux: they share files in memory", hint="--workers 0 runs engines in threads"
        )
    return os.memfd_create("optdnn-serve")


class SharedMemory:
    """One end's view of such a file."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    def arrays(self, layout: Sequence[tuple[str, DType, tuple[int, ...], int]]) -> dict[str, Array]:
        """Arrays in the memory, by name, dtype, shape and offset. The file is lengthened where it must be."""
        whole = self._reaching(max((offset + _bytes(dtype, shape) for _, dtype, shape, offset in layout), default=0))
        return {
            name: np.frombuffer(whole, dtype, math.prod(shape), offset).reshape(shape)
            for name, dtype, shape, offset in layout
        }

    def _reaching(self, nbytes: int) -> mmap.mmap:
        if self._mapped is None or len(self._mapped) < nbytes:
            wanted = -(-max(nbytes, 1) // _STEP) * _STEP
            if os.fstat(self.descriptor).st_size < wanted:
                os.ftruncate(self.descriptor, wanted)
            self._mapped = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return self._mapped

    def mapping(self) -> tuple[int, int]:
        """The address and the bytes of the present mapping."""
        assert self._mapped is not None
        whole = np.frombuffer(self._mapped, np.uint8)
        return int(whole.ctypes.data), whole.nbytes

    def close(self) -> None:
        """Close the descriptor. Memory that arrays still show stays mapped as long as they."""
        self._mapped = None
        os.close(self.descriptor)


def layout_of(shapes: Mapping[str, tuple[DType, tuple[int, ...]]]) -> list[tuple[str, DType, tuple[int, ...], int]]:
    """Where tensors lie in the memory, one behind the other."""
    found, offset = [], 0
    for name, (dtype, shape) in shapes.items():
        found.append((name, dtype, shape, offset))
        offset += -(-_bytes(dtype, shape) // ALIGNMENT) * ALIGNMENT
    return found


def _bytes(dtype: DType, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize
