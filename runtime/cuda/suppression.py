"""Boxes that overlap better ones are found on the GPU (``suppress.cu``), for steps on the host.

A context keeps one object: memory on the GPU and pinned memory, which grow with the number of boxes.
"""

from __future__ import annotations

import struct

import numpy as np

from optdnn.runtime.cuda.allocator import DeviceMemory, PinnedMemory
from optdnn.runtime.cuda.device import Function, Launch, check, driver
from optdnn.types import Array

TEMPLATE = "suppress.cu"
"""The kernel's template. A program whose steps on the host suppress boxes has the kernel, though no step launches it."""
THREADS, TILE = 1024, 1024
"""Threads of a block, and boxes that are chosen together; as in the kernel."""
OVERLAPS = 2 * TILE * TILE // 8
"""Bytes for the compared pairs of two tiles."""
ROUNDS = 16
"""Bytes of the grid barrier."""
BOXES_OF_BLOCK = 256
"""Fewer boxes than this do not need one more block."""


class Suppression:
    """A kernel that suppresses boxes, with its memory. Only for the thread that runs the context.

    ``stream``: the handle of a stream; ``multiprocessors``: the most blocks.
    """

    def __init__(self, function: Function, stream: int, multiprocessors: int):
        self._function, self._stream, self._most = function, stream, multiprocessors
        self._room = 0

    def __call__(self, corners: Array, group: Array, threshold: float) -> Array:
        """Whether each box is kept: bool [n].

        ``corners``: fp32 [n, 4], low and high corners (y, x), the best box of a group first. ``group``: int32 [n], rising. A box
        is kept if it overlaps no kept box of its group by more than ``threshold`` of their union.
        """
        n = len(corners)
        words = -(-n // 32)
        self._reserve(n)
        bits, boxes, groups = 4 * words, 16 * n, 4 * n
        staged = self._pinned.bytes
        staged[:boxes] = np.ascontiguousarray(corners, np.float32).reshape(-1).view(np.uint8)
        staged[boxes : boxes + groups] = np.ascontiguousarray(group, np.int32).view(np.uint8)
        kept = staged[boxes + groups : boxes + groups + bits].view(np.uint32)
        kept[:] = 0xFFFFFFFF
        if n % 32:
            kept[-1] = (1 << n % 32) - 1
        at, cu, stream = self._memory.pointer, driver(), self._stream
        overlaps, rounds = self._scratch.pointer, self._scratch.pointer + OVERLAPS
        check("cuMemcpyHtoDAsync", cu.cuMemcpyHtoDAsync(at, self._pinned.pointer, boxes + groups + bits, stream))
        parameters = struct.pack("<5Qif", at, at + boxes, at + boxes + groups, overlaps, rounds, n, threshold)
        blocks = max(1, min(self._most, -(-n // BOXES_OF_BLOCK)))
        Launch(
            self._function,
            (blocks, 1, 1),
            THREADS,
            [parameters],
            dependent=False,
            cooperative=True,
            label="suppression of boxes",
        ).enqueue(stream)
        back = self._pinned.pointer + boxes + groups
        check("cuMemcpyDtoHAsync", cu.cuMemcpyDtoHAsync(back, at + boxes + groups, bits, stream))
        check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
        return np.unpackbits(kept.view(np.uint8), count=n, bitorder="little").view(np.bool_)

    def _reserve(self, n: int) -> None:
        """Make room for ``n`` boxes."""
        if not self._room:
            self._scratch = DeviceMemory(OVERLAPS + ROUNDS, "comparing boxes")
            self._scratch.clear()
        if n > self._room:
            self._room = max(n, 2 * self._room, TILE)
            size = 20 * self._room + 4 * (self._room // 32 + 1)
            self._memory, self._pinned = DeviceMemory(size, "boxes to be suppressed"), PinnedMemory(size)
