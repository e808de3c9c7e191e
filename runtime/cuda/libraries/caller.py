"""Makes the library calls of a program ready: handles, chosen algorithms, and scratch memory that all calls of a context share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from optdnn.runtime.cuda.libraries import cublaslt, cudnn
from optdnn.runtime.cuda.libraries.calls import Called, Operation
from optdnn.runtime.cuda.memory.allocator import DeviceMemory


def handle_of(library: str) -> Any:
    """A new handle of a library. Raises MissingDependency."""
    return cudnn.Handle() if library == "cudnn" else cublaslt.Handle()


class Caller:
    """Everything that one context needs for its library calls. ``calls`` are pairs of an operation and the lane it runs in. The
    calls of one lane run one after the other, so they share one scratch memory.

    Raises MissingDependency for an absent library, RunError where one refuses an operation.
    """

    def __init__(self, calls: Iterable[tuple[Operation, int]]):
        handles: dict[str, Any] = {}
        self._prepared: dict[Operation, cudnn.Prepared | cublaslt.PreparedMatMul] = {}
        sizes: dict[int, int] = {}
        for operation, lane in calls:
            if operation.library not in handles:
                handles[operation.library] = handle_of(operation.library)
            if operation not in self._prepared:
                self._prepared[operation] = handles[operation.library].prepare(operation)
            sizes[lane] = max(sizes.get(lane, 0), self._prepared[operation].workspace)
        self.scratch = {lane: DeviceMemory(size, "libraries' scratch") for lane, size in sizes.items()}

    def call(self, operation: Operation, addresses: Mapping[str, int], lane: int = 0) -> Called:
        """One of the operations of this lane, on these addresses."""
        return self._prepared[operation].bind(addresses, self.scratch[lane].pointer)
