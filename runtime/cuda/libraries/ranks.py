"""The communicator for the library calls of a process that is one rank of several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from optdnn.errors import RunError

_here: ContextVar[Any] = ContextVar("communicator", default=None)


@contextmanager
def using(communicator: Any) -> Iterator[None]:
    """Make collectives that are prepared in a ``with`` block use ``communicator`` (its ``prepare``): a process may hold
    several engines, each with its own."""
    before = _here.set(communicator)
    try:
        yield
    finally:
        _here.reset(before)


def handle() -> Any:
    """The communicator of the running engine. Raises RunError if it is not one rank of several."""
    if _here.get() is None:
        raise RunError(
            "the engine is one rank of several, and runs only together with the others",
            hint="load the engine of all ranks, or start one process per rank by a launcher",
        )
    return _here.get()
