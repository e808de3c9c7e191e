"""Device memory that the plans of one engine share: constants, once per array, and per context one arena."""

from __future__ import annotations

import threading

import numpy as np

from optdnn.runtime.cuda.memory import DeviceMemory
from optdnn.types import Array


class Arena:
    """Scratch memory of the plans of one context, which run one after another."""

    def __init__(self, size: int):
        self._size = size
        self._memory: DeviceMemory | None = None

    def at_least(self, size: int) -> DeviceMemory:
        """Memory of ``size`` bytes, and of the arena's own size at first: graphs hold its address, so it should not grow.

        Where it must, contexts that were made before keep the memory that they have.
        """
        if self._memory is None or size > self._memory.size:
            self._memory = DeviceMemory(max(size, self._size), "the arena of activations")
        return self._memory


class Pool:
    """The constants of an engine on the GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._constants: dict[int, tuple[Array, DeviceMemory]] = {}

    def constant(self, array: Array) -> DeviceMemory:
        """The array on the GPU; uploaded on first use. Plans hold the very same arrays where their contents agree."""
        with self._lock:
            found = self._constants.get(id(array))
            if found is None:
                memory = DeviceMemory(array.nbytes, "the network's weights")
                memory.upload(np.ascontiguousarray(array))
                found = self._constants[id(array)] = (array, memory)
            return found[1]

    def arena(self, size: int) -> Arena:
        """A context's arena."""
        return Arena(size)
