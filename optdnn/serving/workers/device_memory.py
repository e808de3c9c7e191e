"""Memory of clients on a worker's GPU: opened by its handle when a job first names it, and closed when its region is forgotten."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any

from optdnn.serving.refusals import Refusal
from optdnn.serving.tensors import DeviceSlice

Opened = tuple[Any, int]
"""The first address of an allocation, as an array's ``data``, and the bytes that there are."""
_LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess: the memory may be on another GPU of this process."""


class DeviceRegions:
    """The memory that one instance has opened. ``opener`` and ``closer``: CUDA's, or a stand-in's."""

    def __init__(self, opener: Callable[[bytes], Opened], closer: Callable[[Any], None]):
        self._open, self._close = opener, closer
        self._found: dict[str, Opened] = {}

    def at(self, part: DeviceSlice) -> Any:
        """The address of a part, as an array's ``data``. Raises Refusal for a handle of nothing, and for a size that lies."""
        found = self._found.get(part.handle)
        if found is None:
            found = self._found[part.handle] = self._open(base64.b64decode(part.handle))
        pointer, nbytes = found
        if part.offset + part.nbytes > nbytes:
            raise Refusal(f"the CUDA memory of a region has {nbytes} bytes, not {part.offset + part.nbytes}")
        return pointer + part.offset

    def close(self, handles: Iterable[str]) -> None:
        """Close what these handles opened."""
        for handle in handles:
            found = self._found.pop(handle, None)
            if found is not None:
                self._close(found[0])


def cuda_regions() -> DeviceRegions:
    """Those that CUDA opens, on the GPU of this process."""
    import cupy

    runtime = cupy.cuda.runtime

    def opened(handle: bytes) -> Opened:
        from cuda.bindings import driver

        try:
            address = runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
        except runtime.CUDARuntimeError as error:
            raise Refusal(f"the CUDA memory of a region cannot be opened: {error}") from error
        status, base, size = driver.cuMemGetAddressRange(address)
        if status:
            runtime.ipcCloseMemHandle(address)
            raise Refusal(f"the size of a region's CUDA memory is not known: {status.name}")
        left = int(base) + int(size) - address
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, left, None), 0), left

    return DeviceRegions(opened, lambda pointer: runtime.ipcCloseMemHandle(pointer.ptr))
