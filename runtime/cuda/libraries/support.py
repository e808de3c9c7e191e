"""Asks a vendor's library, where it and a GPU are at hand, whether it can run an operation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from optdnn.errors import MissingDependency, RunError
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.libraries import find as libraries
from optdnn.runtime.cuda.libraries.caller import handle_of
from optdnn.runtime.cuda.libraries.calls import Convolution, MatMul, Operation
from optdnn.runtime.cuda.usable import why_not


@cache
def _handle(library: str) -> Any:
    """A handle of the library on GPU 0, or None where there is no GPU, or no library."""
    if why_not() is not None or not libraries.present(library):
        return None
    Device.open()
    return handle_of(library)


def version_of(library: str) -> str | None:
    """The library's version, where there is a GPU for it."""
    return libraries.version_of(library) if why_not() is None and libraries.installed(library) else None


def ranked(operation: Operation) -> int | None:
    """How many algorithms the library ranks for the operation (0: it cannot run it); None where it cannot be asked."""
    return _ranked(_first(operation))


def _first(operation: Operation) -> Operation:
    """The operation with the library's first choice: all ranks share an answer."""
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
