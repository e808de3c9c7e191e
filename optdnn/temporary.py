"""Temporary folders and files, with one error for a machine that has no room for them.

A process that is killed leaves its folders. The next process that makes one removes them: an owner holds a lock on its folder, so a
folder that can be locked has no owner any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import IO

from optdnn.errors import OutputError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no locks on folders: leftovers stay
    fcntl = None

_LOCKED = re.compile(r"optdnn-([a-z]+-)?[a-z0-9_]{8}\.locked")
"""Names of the folders that their owners lock."""


def temporary_folder(prefix: str = "optdnn-") -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the object ends. Raises OutputError if it cannot be made."""
    try:
        _remove_leftovers(tempfile.gettempdir())
        while True:
            with _signals_later():
                folder = tempfile.TemporaryDirectory(prefix=prefix, suffix=".locked")
                _lock(folder)
            if os.path.isdir(folder.name):  # not taken for a leftover before it was locked
                return folder
    except OSError as error:
        raise _failure(error) from error


def _lock(folder: tempfile.TemporaryDirectory[str]) -> None:
    """Lock a folder as long as the object lives. A folder that cannot be locked here is not taken for a leftover, either."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        fd = os.open(folder.name, os.O_RDONLY)
        weakref.finalize(folder, os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX)


@cache
def _remove_leftovers(place: str) -> None:
    """Remove this user's folders in ``place`` whose owners were killed; once per process."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        for name in filter(_LOCKED.fullmatch, os.listdir(place)):
            with contextlib.suppress(OSError):  # it has an owner, or is gone
                _remove_leftover(os.path.join(place, name))


def _remove_leftover(path: str) -> None:
    assert fcntl is not None
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid == os.getuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)


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
