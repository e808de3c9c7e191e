"""Runs of a worker on a GPU. The memory that the server shares with it is page-locked: inputs are copied from there to the GPU, and
outputs back, without another copy on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from optdnn.runtime.contexts.base import BaseContext
from optdnn.serving.workers.memory import SharedMemory
from optdnn.types import DType

KEPT = 16
"""Shapes of batches whose memory on the GPU is kept."""


class PageLocked:
    """Keeps the mapping of a shared file page-locked, wherever it moves to."""

    def __init__(self, memory: SharedMemory, cupy: Any):
        self._memory, self._runtime = memory, cupy.cuda.runtime
        self._at = (0, 0)

    def update(self) -> None:
        """Lock the mapping if it has moved since the last call."""
        found = self._memory.mapping()
        if found == self._at:
            return
        if self._at[1]:
            self._runtime.hostUnregister(self._at[0])
            self._at = (0, 0)
        self._runtime.hostRegister(*found, 0)
        self._at = found


class GpuRuns:
    """Runs of a context on arrays in memory that is shared with the server."""

    def __init__(self, context: BaseContext, inputs: SharedMemory, outputs: SharedMemory):
        import cupy

        self._cupy, self._context = cupy, context
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._locked = [PageLocked(memory, cupy) for memory in (inputs, outputs)]
        self._feeds: dict[object, Mapping[str, Any]] = {}
        self._results: dict[object, Mapping[str, Any]] = {}

    def run(self, feeds: Mapping[str, np.ndarray[Any, Any]]) -> Mapping[str, Any]:
        """The results of a run, which may still be under way: arrays on the GPU, or NumPy arrays."""
        self._locked[0].update()
        key = tuple(a.shape for a in feeds.values())
        if key not in self._feeds:
            self._feeds[key] = {n: self._cupy.empty(a.shape, a.dtype) for n, a in feeds.items()}
        here = self._feeds[key]
        for name, a in feeds.items():
            if a.nbytes:
                here[name].data.copy_from_host_async(a.ctypes.data, a.nbytes, self._stream)
        results = self._context.run(here, out=self._results.get(key), stream=self._stream)
        self._results[key] = {n: a for n, a in results.items() if not isinstance(a, np.ndarray)}
        if len(self._feeds) > KEPT:
            for kept in (self._feeds, self._results):
                del kept[next(iter(kept))]
        return results

    def copy_out(self, results: Mapping[str, Any], targets: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Copy the results of :meth:`run` into arrays of the output memory, and wait for them."""
        self._locked[1].update()
        for name, target in targets.items():
            result = results[name]
            if isinstance(result, np.ndarray):
                target[...] = result
            elif target.nbytes:
                result.data.copy_to_host_async(target.ctypes.data, target.nbytes, self._stream)
        self._stream.synchronize()


def usable(context: BaseContext, dtypes: set[DType]) -> bool:
    """Whether runs can go this way: on a GPU, with CuPy, and with element types that it has."""
    if not context.takes_device_arrays or any(t.kind not in "biuf" for t in dtypes):
        return False
    try:
        import cupy  # noqa: F401
    except ImportError:
        return False
    return True
