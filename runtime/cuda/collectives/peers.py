"""The kernels over peer memory (``flagged.cu``, ``all_reduce.cu``): inboxes of all ranks of a host, and their launches."""

from __future__ import annotations

import struct

from optdnn.runtime.cuda.allocator import DeviceMemory
from optdnn.runtime.cuda.compile.nvrtc import KernelCache, Recipe
from optdnn.runtime.cuda.device import Function, Launch, check, driver
from optdnn.runtime.cuda.libraries.calls import Collective

BLOCKS, THREADS = 64, 256
CHUNK = THREADS * 16
"""Bytes of a block's inbox: of its part, or (``flagged``) of its packets, which take twice as many bytes."""
ONE_SHOT, FLAGGED = BLOCKS * CHUNK, BLOCKS * CHUNK // 2
"""The most bytes of a rank's part for each kernel."""
WORLDS = range(2, 9)
"""The supported numbers of ranks."""
FLAGS = 1 << 16
"""Bytes of flags before the inboxes of ``one_shot``."""
LIMIT_NS = 60_000_000_000
"""Nanoseconds that a block waits for another GPU. A rank that ends or fails is noticed immediately, by its connection. This limit
is for a rank that hangs; it is longer than a busy machine needs to launch a graph."""
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def ways(operation: Collective) -> list[str]:
    """The kernels that can run an operation, by name: ``flagged`` (packets with their own flags) and, for sums, ``one_shot``
    (a flag after each block)."""
    size = operation.count * ELEMENT_BYTES[operation.dtype]
    found = ["flagged"] if size <= FLAGGED else []
    return [*found, "one_shot"] if operation.kind == "reduce" and size <= ONE_SHOT else found


class Peers:
    """The inboxes of all ranks of a host, with their addresses on this rank."""

    def __init__(self, own: DeviceMemory, handles: list[bytes], rank: int, arch: str, word: int):
        """``handles`` belong to the other ranks' memory; ``word`` is the address of the host's word that waiting kernels read."""
        cu = driver()
        self._own, self._rank, self._arch, self._word = own, rank, arch, word
        self._functions: dict[tuple[str, ...], Function] = {}
        self.epochs = {
            name: DeviceMemory((BLOCKS + 1) * 4, "epochs of collectives") for name in ("one_shot", "flagged")
        }
        for memory in self.epochs.values():
            memory.clear()
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
        return -(-(packets_at(world) + _inboxes(world)) >> 21 << 21)

    def launch(self, way: str, operation: Collective, x: int, y: int, dependent: bool) -> Launch:
        """A launch of the kernel ``way`` on these addresses."""
        world = len(self._memory)
        key = (way, operation.kind, operation.dtype)
        if key not in self._functions:
            self._functions[key] = Function(KernelCache().get(recipe_for(way, operation, self._arch)), _ENTRIES[way])
        values = (x, y, *self._memory, self.epochs[way].pointer, self._word, operation.count, self._rank)
        block = struct.pack(f"<{world + 4}Q2I", *values)
        grid = (blocks_of(way, operation), 1, 1)
        return Launch(self._functions[key], grid, THREADS, [block], dependent=dependent, label=_ENTRIES[way])


_ENTRIES = {"one_shot": "all_reduce", "flagged": "flagged"}


def _inboxes(world: int) -> int:
    return world * 2 * BLOCKS * CHUNK


def packets_at(world: int) -> int:
    """The offset of the packets: after the flags and inboxes of ``one_shot``, whose data could look like flags."""
    return FLAGS + _inboxes(world)


def blocks_of(way: str, operation: Collective) -> int:
    """Blocks of a launch."""
    return -(-operation.count * ELEMENT_BYTES[operation.dtype] // (CHUNK if way == "one_shot" else CHUNK // 2))


def recipe_for(way: str, operation: Collective, arch: str) -> Recipe:
    """The kernel ``way`` of an operation; the number of elements is a parameter."""
    defines = {
        "WORLD": operation.world,
        "WIDE": int(operation.dtype == "float32"),
        "BFLOAT": int(operation.dtype == "bfloat16"),
        "BLOCKS": BLOCKS,
        "LIMIT": f"{LIMIT_NS}ull",
    }
    if way == "flagged":
        defines |= {"GATHER": int(operation.kind == "gather"), "INBOXES": packets_at(operation.world)}
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return Recipe(f"{_ENTRIES[way]}.cu", arch, {"generated.cuh": text}, ("--std=c++17",))
