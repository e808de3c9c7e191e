"""One launch of a kernel on addresses in a GPU's memory, from its record."""

from __future__ import annotations

from collections.abc import Mapping

from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda import device
from optdnn.runtime.cuda.compile.nvrtc import KernelCache
from optdnn.runtime.cuda.launches.plan import TensorMap
from optdnn.runtime.cuda.memory.loaded import encode


def bound(made: Launch, addresses: Mapping[str, int], cache: KernelCache) -> device.Launch:
    """The launch on these addresses, by operand name."""
    function = device.Function(cache.get(made.recipe), made.function, shared=made.shared, wide_cluster=made.cluster > 8)
    block = bytearray(made.parameters)
    for r in made.relocations:
        pointer = addresses[r.operand] + r.offset
        value = encode(r, pointer) if isinstance(r, TensorMap) else pointer.to_bytes(8, "little")
        block[r.at : r.at + len(value)] = value
    return device.Launch(
        function, made.grid, made.block, [bytes(block)], shared=made.shared, cluster=made.cluster, label=made.function
    )
