"""Handles of the vendors' libraries: the operations that a library can run, and the library calls of a context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from optdnn.errors import MissingDependency, RunError
from optdnn.runtime.cuda.allocator import DeviceMemory
from optdnn.runtime.cuda.device import Device, Launch
from optdnn.runtime.cuda.libraries import cublaslt, cudnn, find, ranks
from optdnn.runtime.cuda.libraries.calls import Called, Collective, Convolution, MatMul, Operation
from optdnn.runtime.cuda.usable import why_not


def handle_of(library: str) -> Any:
    """A new handle of a library. Raises MissingDependency."""
    if library == "nccl":
        return ranks.handle()
    return cudnn.Handle() if library == "cudnn" else cublaslt.Handle()


class Caller:
    """The resources for the library calls of one context. ``calls`` are pairs of an operation and its lane. The
    calls of one lane run in sequence, so they share one scratch memory.

    Raises MissingDependency for a missing library, RunError if a library refuses an operation.
    """

    def __init__(self, calls: Iterable[tuple[Operation, int]]):
        handles: dict[str, Any] = {}
        self._prepared: dict[Operation, Any] = {}
        sizes: dict[int, int] = {}
        for operation, lane in calls:
            if operation.library not in handles:
                handles[operation.library] = handle_of(operation.library)
            if operation not in self._prepared:
                self._prepared[operation] = handles[operation.library].prepare(operation)
            sizes[lane] = max(sizes.get(lane, 0), self._prepared[operation].workspace)
        self.scratch = {lane: DeviceMemory(size, "libraries' scratch") for lane, size in sizes.items()}

    def call(
        self, operation: Operation, addresses: Mapping[str, int], lane: int = 0, *, dependent: bool = False
    ) -> Called | Launch:
        """One of the operations of this lane, on these addresses. ``dependent``: our kernel may be launched early."""
        if isinstance(operation, Collective):
            made: Called | Launch = self._prepared[operation].bind(addresses, dependent=dependent)
            return made
        call: Called = self._prepared[operation].bind(addresses, self.scratch[lane].pointer)
        return call


# ---------------------------------------------------------------- what a library can run


@cache
def _handle(library: str) -> Any:
    """A handle of the library on GPU 0, or None without a GPU or the library."""
    if why_not() is not None or not find.present(library):
        return None
    Device.open()
    return handle_of(library)


def version_of(library: str) -> str | None:
    """The library's version, if there is a GPU for it."""
    return find.version_of(library) if why_not() is None and find.installed(library) else None


def ranked(operation: Operation) -> int | None:
    """The number of algorithms that the library ranks for the operation (0: it cannot run it); None if it cannot be asked."""
    return _ranked(_first(operation))


def _first(operation: Operation) -> Operation:
    """The operation with the library's first choice, so that all ranks share an answer."""
    if isinstance(operation, MatMul):
        return replace(operation, algorithm=0)
    return replace(operation, plan=0) if isinstance(operation, Convolution) else operation


@cache
def _ranked(operation: Operation) -> int | None:
    try:
        handle = _handle(operation.library)
    except (MissingDependency, RunError):
        return None
    if handle is None:
        return None
    try:
        return int(handle.prepare(operation).ranked)
    except RunError:
        return 0
