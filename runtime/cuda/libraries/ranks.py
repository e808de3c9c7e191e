"""Where the library calls of a process that is one rank of several find its communicator."""

from __future__ import annotations

from typing import Any

from optdnn.errors import RunError

_here: Any = None


def use(communicator: Any) -> None:
    """Let collectives of this process go through ``communicator``: its ``prepare`` makes one ready."""
    global _here
    _here = communicator


def handle() -> Any:
    """The communicator of this process. Raises RunError where it is no rank of several."""
    if _here is None:
        raise RunError(
            "the engine is one rank of several, and runs only together with the others",
            hint="load the engine of all ranks, or start one process per rank by a launcher",
        )
    return _here
