"""Device buffers for tests of single kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.runtime.cuda.allocator import upload
from optdnn.runtime.cuda.device import Device, Launch, check, driver
from optdnn.runtime.cuda.launches import graphs


class Memory:
    """Device buffers, allocated by driver calls only."""

    def __init__(self) -> None:
        self.device = Device.open()
        self.stream = graphs.Stream()
        self.held: list[Any] = []

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        pointer = check("cuMemAlloc", driver().cuMemAlloc(max(array.nbytes, 256)))
        self.held.append(pointer)
        upload(pointer, array)
        return int(pointer)

    def get(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = np.empty(shape, dtype)
        check("cuMemcpyDtoH", driver().cuMemcpyDtoH(array.ctypes.data, pointer, array.nbytes))
        return array

    def run(self, launch: Launch) -> None:
        launch.enqueue(self.stream.handle)
        self.stream.synchronize()

    def free(self) -> None:
        for pointer in self.held:
            driver().cuMemFree(pointer)
        self.held.clear()
