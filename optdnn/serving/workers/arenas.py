"""Page-locked mappings of front ends' arenas in a worker, so that the GPU reads tensors where a front end has put them."""

from __future__ import annotations

import logging
import mmap
from typing import Any

import numpy as np

from optdnn.serving.tensors import ARENA_KEPT, RegionSlice

log = logging.getLogger("optdnn.serve")


class LockedArenas:
    """The mappings of one instance. Each is made when a request first lies there, and shows the first ARENA_KEPT bytes of an arena:
    their pages are never given back."""

    def __init__(self, cupy: Any):
        self._cupy = cupy
        self._mapped: dict[int, tuple[mmap.mmap, int]] = {}

    def address(self, part: RegionSlice) -> int | None:
        """Where the GPU can read a part; None for one that lies elsewhere, or further back."""
        if not isinstance(part.key, int) or part.offset + part.nbytes > ARENA_KEPT:
            return None
        if part.key not in self._mapped:
            self._mapped[part.key] = self._locked(part.key)
        start = self._mapped[part.key][1]
        return start + part.offset if start else None

    def _locked(self, descriptor: int) -> tuple[mmap.mmap, int]:
        mapped = mmap.mmap(descriptor, ARENA_KEPT)
        start = int(np.frombuffer(mapped, np.uint8, 1).ctypes.data)
        try:
            self._cupy.cuda.runtime.hostRegister(start, ARENA_KEPT, 0)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            log.warning(
                "requests of a front end are copied once more, since its memory cannot be page-locked: %s", error
            )
            start = 0
        return mapped, start
