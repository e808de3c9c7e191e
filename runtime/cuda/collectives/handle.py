"""NCCL's communicator in a thread of its own, and the end of a process that has one."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

LEAVE_S = 5.0
"""How long the end of the process waits for NCCL."""


class Handle:
    """NCCL's communicator, as ``make`` gives it. It is made and freed in a daemon thread: both wait in NCCL, for other ranks or for
    graphs that hold its calls.

    When the interpreter ends, NCCL is left before the driver and NCCL's own library are taken down: a thread that works in them
    meanwhile would crash. Graphs that were made later are destroyed before, by their own finalizers. The wait is bounded.
    """

    def __init__(self, make: Callable[[], Any], free: Callable[[Any], object]):
        self._found: list[Any] = []
        self.made = threading.Event()
        self._end, self._done = threading.Event(), threading.Event()
        arguments = (
            [make],
            free,
            self._found,
            self.made,
            self._end,
            self._done,
        )  # nothing that keeps what owns this alive
        thread = threading.Thread(target=_live, args=arguments, name="optdnn-nccl", daemon=True)
        weakref.finalize(self, self._end.set)
        weakref.finalize(thread, _leave, self._end, self._done)  # when it has ended, or with the interpreter
        thread.start()

    @property
    def value(self) -> Any:
        """The communicator; the exception that ``make`` raised; None before it has returned."""
        return self._found[0] if self.made.is_set() else None

    def free(self) -> None:
        """Begin to free it; at most once, from any thread."""
        self._end.set()

    def wait_freed(self, limit: float) -> bool:
        """Wait until it is freed; False where that takes longer than ``limit`` seconds."""
        return self._done.wait(limit)


def _live(
    to_make: list[Callable[[], Any]],
    free: Callable[[Any], object],
    found: list[Any],
    made: threading.Event,
    end: threading.Event,
    done: threading.Event,
) -> None:
    try:
        found.append(to_make.pop()())
    except Exception as error:
        found.append(error)
    made.set()
    end.wait()
    with contextlib.suppress(Exception):  # NCCL reports here what ended its work
        if not isinstance(found[0], Exception):
            free(found[0])
    done.set()


def _leave(end: threading.Event, done: threading.Event) -> None:
    end.set()
    if not done.wait(LEAVE_S):
        _end_without_destructors()


def _end_without_destructors() -> None:
    """Let this process end, with its exit status, without what C libraries do at their end: a thread still works in them."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # not everywhere
        libc.fflush(None)
        libc.on_exit(libc._exit, None)
