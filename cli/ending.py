"""Signals that end a command: Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_received: set[int] = set()


class Ended(BaseException):
    """A signal asks the process to end. Temporary folders and workers are cleaned up while the exception propagates.

    It is not a KeyboardInterrupt: on Ctrl-C, tuning ends early and keeps its best result.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def watch() -> None:
    """Handle the signals that by default end the process at once, and leave its temporary folders behind."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _ended)


def was_interrupted(error: Exception) -> bool:
    """Whether an import failed because of Ctrl-C: NumPy turns a KeyboardInterrupt during its import into an ImportError."""
    return isinstance(error, ImportError) and signal.SIGINT in _received


def _interrupted(number: int, frame: FrameType | None) -> None:
    _received.add(number)
    signal.default_int_handler(number, frame)


def _ended(number: int, frame: FrameType | None) -> None:
    raise Ended(number)
