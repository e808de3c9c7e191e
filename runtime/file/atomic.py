"""Writing a file so that nobody ever sees half of it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable

from optdnn.errors import OutputError


def write_atomic(path: str | os.PathLike[str], pieces: Iterable[bytes | memoryview]) -> None:
    """Write ``pieces`` to a temporary file beside ``path``, flush it to the disk, and rename it over ``path``.

    A symbolic link is followed: its target is replaced. Raises OutputError where that fails; the temporary file is
    then removed and the old file, if any, is untouched.
    """
    target = _target(path)
    try:
        replace_file(target, pieces)
    except OSError as e:
        raise _failure(os.fspath(path), e) from e
    _sync_folder(os.path.dirname(target))


def replace_file(target: str, pieces: Iterable[bytes | memoryview], *, flush: bool = True) -> None:
    """Write ``pieces`` beside the file ``target`` and rename that over it; ``flush`` brings them to the disk first.

    Raises OSError; the old file, if any, is then untouched.
    """
    temporary, fd = _temporary(os.path.dirname(target))
    try:
        with open(fd, "wb") as f:
            for piece in pieces:
                f.write(piece)
            if flush:
                f.flush()
                os.fsync(f.fileno())
        os.replace(temporary, target)
    except BaseException:
        _remove(temporary)
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OutputError that :func:`write_atomic` would raise, as far as it can be foreseen; leaves nothing behind.

    For commands that work long before they write.
    """
    folder = os.path.dirname(_target(path))
    try:
        temporary, fd = _temporary(folder)
    except OSError as e:
        raise _failure(os.fspath(path), e) from e
    os.close(fd)
    _remove(temporary)


def _target(path: str | os.PathLike[str]) -> str:
    """The file that is meant, links followed. Raises OutputError where it exists and cannot be replaced."""
    target, shown = os.path.realpath(path), os.fspath(path)
    try:
        mode = os.stat(target).st_mode
    except OSError:
        return target  # absent: the usual case; anything worse shows when the temporary file is made
    if not stat.S_ISREG(mode):
        raise OutputError(f"{shown} cannot be written: it exists and is not a regular file")
    if not os.access(target, os.W_OK):
        raise OutputError(f"{shown} cannot be written: it is read-only")
    return target


def _temporary(folder: str) -> tuple[str, int]:
    """A new file in ``folder``, open for writing. os.open rather than tempfile: it gets the user's own umask, not 0600."""
    path = os.path.join(folder, f".optdnn-{os.urandom(8).hex()}.tmp")
    return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)


def _failure(shown: str, error: OSError) -> OutputError:
    return OutputError(
        f"{shown} cannot be written: {error.strerror or error}",
        hint="check the folder, its permissions and the free space",
    )


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # already renamed, or the folder is gone: nothing of ours is left
        os.unlink(path)


def _sync_folder(folder: str) -> None:
    """Make the rename itself durable, where folders can be opened (POSIX)."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):  # some file systems do not sync folders
            os.fsync(fd)
    finally:
        os.close(fd)
