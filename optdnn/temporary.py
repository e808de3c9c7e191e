"""Temporary folders and files, with one error for a machine that has no room for them."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from optdnn.errors import OutputError


def temporary_folder(prefix: str = "optdnn-") -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the object ends. Raises OutputError if it cannot be made."""
    try:
        with _signals_later():
            return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise _failure(error) from error


def temporary_file(prefix: str = "optdnn-") -> IO[bytes]:
    """An open file without a name. Raises OutputError if it cannot be made."""
    try:
        return tempfile.TemporaryFile(prefix=prefix)
    except OSError as error:
        raise _failure(error) from error


@contextmanager
def _signals_later() -> Iterator[None]:
    """Signals that raise an exception are handled at the end: between making and keeping a folder, they would leave it behind."""
    received: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # no other thread runs handlers, or may set them
        handlers = {n: h for n in signal.valid_signals() if callable(h := signal.getsignal(n))}
    for number in handlers:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in received:  # also if no folder was made
            signal.raise_signal(late)


def _failure(error: OSError) -> OutputError:
    return OutputError(
        f"no temporary file can be made: {error.strerror or error}", hint="set TMPDIR to a folder that can be written"
    )
