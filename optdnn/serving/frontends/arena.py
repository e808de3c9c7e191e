"""Memory for tensors on their way between the server's process, its front ends and its workers.

One process takes parts of it; the others read them. The file is larger than all that is ever taken, but only pages that were
written to are memory.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import insort
from collections import deque

import numpy as np

from optdnn.serving.refusals import Unavailable
from optdnn.serving.tensors import ARENA_KEPT

NBYTES = 1 << 36
"""The length of the file."""
_PAGE = mmap.PAGESIZE


def new_arena() -> int:
    """The descriptor of a new arena."""
    made = os.memfd_create("optdnn-arena")
    os.ftruncate(made, NBYTES)
    return made


class Arena:
    """One process's view of an arena. One process takes parts of it."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._mapped = mmap.mmap(descriptor, NBYTES)
        self._base: int = np.frombuffer(self._mapped, np.uint8, 1).ctypes.data
        self._used: list[tuple[int, int]] = []
        self._freed: deque[tuple[int, int]] = deque()
        self._reached = 0

    def take(self, nbytes: int) -> memoryview:
        """Memory of ``nbytes``. It is free again when no view of it is left. Raises Unavailable if there is not enough."""
        self._collect()
        size = -(-max(nbytes, 1) // _PAGE) * _PAGE
        start = 0
        for first, end in self._used:
            if first - start >= size:
                break
            start = end
        if start + size > NBYTES:
            raise Unavailable("there is no memory for this request")
        insort(self._used, (start, start + size))
        self._reached = max(self._reached, start + size)
        part = np.frombuffer(self._mapped, np.uint8, nbytes, start)
        weakref.finalize(part, self._freed.append, (start, start + size)).atexit = False
        return memoryview(part.data)

    def place(self, view: memoryview) -> int | None:
        """The offset of bytes in the arena; None for bytes outside of it."""
        if not view.nbytes:
            return 0
        offset = int(np.frombuffer(view, np.uint8).ctypes.data) - self._base
        return offset if 0 <= offset < NBYTES else None

    def put(self, data: memoryview) -> memoryview:
        """A copy of bytes in the arena."""
        part = self.take(data.nbytes)
        part[:] = data
        return part

    def show(self, offset: int, nbytes: int) -> memoryview:
        """A view of bytes that the other process has put there."""
        return memoryview(np.frombuffer(self._mapped, np.uint8, nbytes, offset).data)

    def _collect(self) -> None:
        """Free the parts without views. If the arena is empty then, pages go back to the system."""
        while self._freed:
            self._used.remove(self._freed.popleft())
        if not self._used and self._reached > ARENA_KEPT:
            self._mapped.madvise(mmap.MADV_REMOVE, ARENA_KEPT, self._reached - ARENA_KEPT)
            self._reached = ARENA_KEPT
