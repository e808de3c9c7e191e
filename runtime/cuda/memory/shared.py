"""Memory that the plans of one engine share on a GPU: constants, once per array; kernels; and one arena per context."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from optdnn.runtime.cuda.allocator import DeviceMemory
from optdnn.runtime.cuda.device import Function
from optdnn.types import Array


class Arena:
    """Scratch memory for the plans of one context, which run in sequence."""

    def __init__(self, size: int):
        self._size = size
        self._memory: DeviceMemory | None = None

    def at_least(self, size: int) -> DeviceMemory:
        """Memory of at least ``size`` bytes, initially of the arena's own size: graphs contain its address, so it should not grow.

        If it must grow, existing contexts keep the memory that they have.
        """
        if self._memory is None or size > self._memory.size:
            self._memory = DeviceMemory(max(size, self._size), "the arena of activations")
        return self._memory

    def own(self, size: int, what: str) -> DeviceMemory:
        """Memory for a buffer of the context outside of the arena."""
        return DeviceMemory(size, what)


class Constant:
    """An array on the GPU; it lives as long as a plan references this object."""

    def __init__(self, array: Array):
        self.array = array  # kept: its identity is its name in the pool
        self._memory = DeviceMemory(array.nbytes, "the network's weights")
        self._memory.upload(np.ascontiguousarray(array))

    @property
    def pointer(self) -> int:
        return self._memory.pointer


class Pool:
    """The constants and kernels of an engine on the GPU. The pool keeps none alive: they are freed with the last plan that uses
    them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._constants: weakref.WeakValueDictionary[int, Constant] = weakref.WeakValueDictionary()
        self._functions: weakref.WeakValueDictionary[tuple[bytes, str], Function] = weakref.WeakValueDictionary()

    def constant(self, array: Array) -> Constant:
        """The array on the GPU; uploaded on first use. Plans share arrays with equal contents."""
        with self._lock:
            constant = self._constants.get(id(array))
            if constant is None:
                constant = self._constants[id(array)] = Constant(array)
            return constant

    def function(self, cubin: bytes, name: str, *, shared: int = 0, wide_cluster: bool = False) -> Function:
        """The kernel of this name in the code, loaded on first use, for launches with at least this much shared memory and such
        clusters."""
        with self._lock:
            function = self._functions.get((cubin, name))
            if function is None:
                function = Function(cubin, name, shared=shared, wide_cluster=wide_cluster)
                self._functions[cubin, name] = function
            else:
                function.allow(shared, wide_cluster)
            return function

    def arena(self, size: int) -> Arena:
        return Arena(size)
