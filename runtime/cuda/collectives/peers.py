"""The kernel over peer memory (``all_reduce.cu``): inboxes of all ranks of a host, and its launches."""

from __future__ import annotations

import struct

from optdnn.runtime.cuda.allocator import DeviceMemory
from optdnn.runtime.cuda.compile.nvrtc import KernelCache, Recipe
from optdnn.runtime.cuda.device import Function, Launch, check, driver
from optdnn.runtime.cuda.libraries.calls import Collective

BLOCKS, THREADS = 64, 256
CHUNK = THREADS * 16
"""Bytes of a block."""
ONE_SHOT = BLOCKS * CHUNK
"""Bytes up to which sums may take this kernel."""
WORLDS = range(2, 9)
"""How many ranks it is for."""
FLAGS = 1 << 16
"""Bytes of flags before the inboxes."""
LIMIT_NS = 60_000_000_000
"""How long a block waits for another GPU. A rank that ends or fails is noticed at once, by its connection: this is for one that
hangs, and longer than a busy machine needs to launch a graph."""
ELEMENTS = {"float16": (0, 2), "bfloat16": (1, 2), "float32": (2, 4)}
"""Element type -> its number in the kernel, and its size in bytes."""


class Peers:
    """The inboxes of all ranks of a host, as this one addresses them."""

    def __init__(self, own: DeviceMemory, handles: list[bytes], rank: int, arch: str, word: int):
        """``handles`` are of the other ranks' memory; ``word`` is the address of the host's word to waiting kernels."""
        cu = driver()
        self._own, self._rank, self._arch, self._word = own, rank, arch, word
        self._functions: dict[str, Function] = {}
        self.epochs = DeviceMemory((BLOCKS + 1) * 4, "epochs of collectives")
        self.epochs.clear()
        self._memory: list[int] = []
        for other, shared in enumerate(handles):
            if other == rank:
                self._memory.append(own.pointer)
                continue
            handle = cu.CUipcMemHandle()
            handle.reserved = shared
            lazy = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            self._memory.append(int(check("cuIpcOpenMemHandle", cu.cuIpcOpenMemHandle(handle, lazy))))

    @staticmethod
    def size(world: int) -> int:
        """Bytes of flags and inboxes; whole pages of 2 MiB, so that no other allocation shares them."""
        return -(-(FLAGS + world * 2 * ONE_SHOT) >> 21 << 21)

    def function(self, dtype: str) -> Function:
        if dtype not in self._functions:
            recipe = recipe_for(len(self._memory), dtype, self._arch)
            self._functions[dtype] = Function(KernelCache().get(recipe), "all_reduce")
        return self._functions[dtype]

    def launch(self, function: Function, operation: Collective, x: int, y: int, dependent: bool) -> Launch:
        world = len(self._memory)
        values = (x, y, *self._memory, self.epochs.pointer, self._word, operation.count, self._rank)
        block = struct.pack(f"<{world + 4}Q2I", *values)
        size = operation.count * ELEMENTS[operation.dtype][1]
        grid = (-(-size // CHUNK), 1, 1)
        return Launch(function, grid, THREADS, [block], dependent=dependent, label="all_reduce")


def recipe_for(world: int, dtype: str, arch: str) -> Recipe:
    """The kernel of sums of ``world`` ranks."""
    defines = {"WORLD": world, "ELEMENT": ELEMENTS[dtype][0], "BLOCKS": BLOCKS, "LIMIT": f"{LIMIT_NS}ull"}
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return Recipe("all_reduce.cu", arch, {"generated.cuh": text}, ("--std=c++17",))
