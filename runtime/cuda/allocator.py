"""Device and pinned host memory, allocated by driver calls only and freed with the last reference."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from functools import cached_property
from typing import Any

import numpy as np

from optdnn.errors import RunError
from optdnn.runtime.cuda.device import CudaError, check, driver
from optdnn.types import Array


def free(name: str, handle: Any) -> None:
    """Call the driver's function ``name`` that frees what ``handle`` stands for; errors are ignored."""
    with contextlib.suppress(Exception):  # the driver may be gone when the interpreter ends
        getattr(driver(), name)(handle)


class DeviceMemory:
    """``size`` bytes on the current device; ``pointer`` is their address (0 for none). ``hint`` is the advice if there is no
    room."""

    def __init__(self, size: int, what: str, hint: str = "use a smaller batch, or fewer contexts"):
        self.size, self.pointer = size, 0
        if size:
            try:
                handle = check("cuMemAlloc", driver().cuMemAlloc(size))
            except CudaError as error:
                if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                    raise
                raise RunError(
                    f"the GPU has no room for {what}: {size / 1e6:.1f} MB",
                    hint=hint,
                ) from error
            self.pointer = int(handle)
            weakref.finalize(self, free, "cuMemFree", handle)

    def clear(self) -> None:
        """Fill the memory with zeros, and wait until that is done."""
        if self.size:
            fill(self.pointer, 0, self.size)

    def upload(self, data: Array, offset: int = 0) -> None:
        """Copy a C-contiguous host array in, and wait for it."""
        upload(self.pointer + offset, data)


def fill(pointer: int, byte: int, size: int) -> None:
    """Set ``size`` bytes on the device, and wait for it: the driver call returns immediately, and our streams do not wait for the
    null stream that it runs on."""
    check("cuMemsetD8", driver().cuMemsetD8(pointer, byte, size))
    check("cuStreamSynchronize", driver().cuStreamSynchronize(0))


def upload(pointer: int, data: Array) -> None:
    """Copy a C-contiguous host array to the device, and wait until it has arrived.

    A copy from pageable memory returns once it is staged; it is ordered with the null stream, but not with our streams.
    """
    if data.nbytes:
        cu = driver()
        check("cuMemcpyHtoD", cu.cuMemcpyHtoD(pointer, data.ctypes.data, data.nbytes))
        check("cuStreamSynchronize", cu.cuStreamSynchronize(0))


def download(pointer: int, data: Array) -> Array:
    """Fill a C-contiguous host array from the device; returns it."""
    if data.nbytes:
        check("cuMemcpyDtoH", driver().cuMemcpyDtoH(data.ctypes.data, pointer, data.nbytes))
    return data


class PinnedMemory:
    """Page-locked host memory as a NumPy array of bytes: copies from and to it overlap with the host. It is allocated on first
    use: locking pages is slow, and runs on device arrays need none."""

    def __init__(self, size: int):
        self._size = size

    @cached_property
    def pointer(self) -> int:
        pointer = check("cuMemAllocHost", driver().cuMemAllocHost(max(self._size, 1)))
        weakref.finalize(self, free, "cuMemFreeHost", pointer)
        return int(pointer)

    @cached_property
    def bytes(self) -> Array:
        view = memoryview((ctypes.c_ubyte * max(self._size, 1)).from_address(self.pointer))
        return np.frombuffer(view, np.uint8)[: self._size]
