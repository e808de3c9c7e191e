"""Runs of a worker on a GPU. The memory that the server shares with it is page-locked: inputs are copied from there to the GPU, and
outputs back, without another copy on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from optdnn.runtime.contexts.base import BaseContext
from optdnn.serving.refusals import Refusal
from optdnn.serving.tensors import Content, DeviceSlice, DeviceTarget, RegionSlice
from optdnn.serving.workers.arenas import LockedArenas
from optdnn.serving.workers.device_memory import cuda_regions
from optdnn.serving.workers.memory import SharedMemory
from optdnn.types import BOOL, DType

DevicePart: TypeAlias = tuple[str, int, DeviceSlice | RegionSlice]
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
        self.opened = cuda_regions()
        self._arenas = LockedArenas(cupy)

    def run(
        self, feeds: Mapping[str, np.ndarray[Any, Any]], parts: Sequence[DevicePart] = (), rows: int | None = None
    ) -> Mapping[str, Any]:
        """The results of a run, which may still be under way: arrays on the GPU, or NumPy arrays.

        ``parts``: input, first row and content of rows that replace those in ``feeds``. They lie in memory of clients on the GPU,
        or in arenas that the GPU :meth:`reads`. ``rows`` are filled; the rest repeats the last one. Raises Refusal
        as :meth:`DeviceRegions.at`."""
        self._locked[0].update()
        places = [(name, row, self._source(part), part.nbytes) for name, row, part in parts]
        key = tuple(a.shape for a in feeds.values())
        if key not in self._feeds:
            self._feeds[key] = {n: self._cupy.empty(a.shape, a.dtype) for n, a in feeds.items()}
        here = self._feeds[key]
        on_gpu = Counter[str]()
        for name, _, _, nbytes in places:
            on_gpu[name] += nbytes
        for name, a in feeds.items():
            if on_gpu[name] < (a if rows is None else a[:rows]).nbytes:
                here[name].data.copy_from_host_async(a.ctypes.data, a.nbytes, self._stream)
        for name, row, pointer, nbytes in places:
            to = here[name].data + row * feeds[name][:1].nbytes if row else here[name].data
            copy = to.copy_from_host_async if isinstance(pointer, int) else to.copy_from_device_async
            copy(pointer, nbytes, self._stream)
        for name in on_gpu:
            if rows is not None and rows < len(feeds[name]):
                with self._stream:
                    here[name][rows:] = here[name][rows - 1 : rows]
        results = self._context.run(here, out=self._results.get(key), stream=self._stream)
        self._results[key] = {n: a for n, a in results.items() if not isinstance(a, np.ndarray)}
        if len(self._feeds) > KEPT:
            for kept in (self._feeds, self._results):
                del kept[next(iter(kept))]
        return results

    def reads(self, part: Content, dtype: DType) -> bool:
        """Whether the GPU reads a part where it lies. Bools are looked at first."""
        return isinstance(part, RegionSlice) and dtype != BOOL and self._arenas.address(part) is not None

    def _source(self, part: DeviceSlice | RegionSlice) -> Any:
        """The address of a part: on the host, or as an array's ``data`` on the GPU."""
        return self._arenas.address(part) if isinstance(part, RegionSlice) else self.opened.at(part)

    def copy_out(
        self,
        results: Mapping[str, Any],
        targets: Mapping[str, np.ndarray[Any, Any]],
        wanted: Sequence[DeviceTarget] = (),
        rows: int | None = None,
    ) -> None:
        """Copy the results of :meth:`run` into arrays of the output memory and to where they are wanted on the GPU, and wait.

        An output whose ``rows`` are all wanted there does not reach the output memory. Raises Refusal where one does not fit."""
        self._locked[1].update()
        on_gpu = Counter[str]()
        for w in wanted:
            on_gpu[w.name] += w.rows
        for name, target in targets.items():
            result = results[name]
            if isinstance(result, np.ndarray):
                target[...] = result
            elif target.nbytes and on_gpu[name] < (1 if rows is None else rows):
                result.data.copy_to_host_async(target.ctypes.data, target.nbytes, self._stream)
        try:
            for w in wanted:
                self._hand_over(w, results[w.name], targets[w.name], batched=rows is not None)
        finally:
            self._stream.synchronize()

    def _hand_over(self, wanted: DeviceTarget, result: Any, copy: np.ndarray[Any, Any], batched: bool) -> None:
        """Copy rows of an output to where they are wanted. ``copy``: where an output lies that is a NumPy array."""
        row = copy[:1].nbytes if batched else copy.nbytes
        first, nbytes, before = wanted.row * row, wanted.rows * row, wanted.before * row
        if before + nbytes > wanted.memory.nbytes:
            raise Refusal(f"an output has {before + nbytes} bytes; its region has {wanted.memory.nbytes}")
        to = self.opened.at(wanted.memory) + before
        if isinstance(result, np.ndarray):
            to.copy_from_host_async(copy.ctypes.data + first, nbytes, self._stream)
        elif nbytes:
            to.copy_from_device_async(result.data + first, nbytes, self._stream)


def usable(context: BaseContext, dtypes: set[DType]) -> bool:
    """Whether runs can go this way: on a GPU, with CuPy, and with element types that it has."""
    if not context.takes_device_arrays or any(t.kind not in "biuf" for t in dtypes):
        return False
    try:
        import cupy  # noqa: F401
    except ImportError:
        return False
    return True
