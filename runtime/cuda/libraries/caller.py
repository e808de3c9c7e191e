"""Makes the library calls of a program ready: handles, chosen algorithms, and scratch memory that all calls of a context share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from optdnn.runtime.cuda.libraries.calls import Operation
from optdnn.runtime.cuda.memory.allocator import DeviceMemory


class _Prepared(Protocol):
    workspace: int
    ranked: int

    def bind(self, addresses: Mapping[str, int], workspace: int) -> Any: ...


class Called:
    """One call on fixed addresses; enqueued (or captured) like a launch."""

    def __init__(self, bound: Any, label: str):
        self._bound, self.label = bound, label

    def enqueue(self, stream: int) -> None:
        """Enqueue on the stream with this handle. Raises RunError."""
        self._bound.enqueue(stream)


class Caller:
    """Everything that one context needs to make its calls: ``calls`` are pairs of an operation and the lane it runs in. Those of
    one lane run one after the other, so one scratch memory serves all of them.

    Raises MissingDependency for an absent library, RunError where one refuses an operation.
    """

    def __init__(self, calls: Iterable[tuple[Operation, int]]):
        self._handles: dict[str, Any] = {}
        self._prepared: dict[Operation, _Prepared] = {}
        sizes: dict[int, int] = {}
        for operation, lane in calls:
            if operation not in self._prepared:
                self._prepared[operation] = self._handle(operation.library).prepare(operation)
            sizes[lane] = max(sizes.get(lane, 0), self._prepared[operation].workspace)
        self.scratch = {lane: DeviceMemory(size, "libraries' scratch") for lane, size in sizes.items()}

    def _handle(self, library: str) -> Any:
        if library not in self._handles:
            if library == "cudnn":
                from optdnn.runtime.cuda.libraries import cudnn as module
            else:
                from optdnn.runtime.cuda.libraries import cublaslt as module  # type: ignore[no-redef]
            self._handles[library] = module.Handle()
        return self._handles[library]

    @property
    def versions(self) -> dict[str, int]:
        """Library -> its version, of those that are called."""
        return {name: handle.version for name, handle in self._handles.items()}

    def call(self, operation: Operation, addresses: Mapping[str, int], label: str, lane: int = 0) -> Called:
        """An operation of those given at the beginning (for this lane), on these addresses."""
        return Called(self._prepared[operation].bind(addresses, self.scratch[lane].pointer), label)
