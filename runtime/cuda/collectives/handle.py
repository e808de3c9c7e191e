"""NCCL's communicator in its own thread, and the end of a process that has one."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

LEAVE_S = 5.0
"""Seconds that the end of the process waits for NCCL."""


class Handle:
    """NCCL's communicator, as created by ``make``. It is created and freed in a daemon thread, because both wait in NCCL, for other
    ranks or for graphs that contain its calls.

    When the interpreter ends, work in NCCL ends before the driver and NCCL's own library are unloaded: a thread that still works in
    them would crash. Graphs that were created later are destroyed earlier, by their own finalizers. The wait is bounded.
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
        )  # no reference that keeps the owner alive
        thread = threading.Thread(target=_live, args=arguments, name="optdnn-nccl", daemon=True)
        weakref.finalize(self, self._end.set)
        weakref.finalize(thread, _leave, self._end, self._done)  # when it has ended, or with the interpreter
        thread.start()

    @property
    def value(self) -> Any:
        """The communicator, or the exception that ``make`` raised; None until it has returned."""
        return self._found[0] if self.made.is_set() else None

    def free(self) -> None:
        """Begin to free the communicator; at most once, from any thread."""
        self._end.set()


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
    with contextlib.suppress(Exception):  # NCCL reports here why its work ended
        if not isinstance(found[0], Exception):
            free(found[0])
    done.set()


def _leave(end: threading.Event, done: threading.Event) -> None:
    end.set()
    if not done.wait(LEAVE_S):
        _end_without_destructors()


def _end_without_destructors() -> None:
    """End this process with its exit status, but without the exit handlers of C libraries: a thread still works in them."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # not everywhere
        libc.fflush(None)
        libc.on_exit(libc._exit, None)
