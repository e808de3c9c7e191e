"""Writing a file so that nobody ever sees half of it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable

from optdnn.errors import OutputError


def write_atomic(path: str | os.PathLike[str], pieces: Iterable[bytes | memoryview]) -> None:
    """Write ``pieces`` to a temporary file beside ``path``, flush it to the disk, and rename it over ``path``.

    A symbolic link is followed: its target is what is replaced. Raises OutputError where that fails; the temporary file is
    then removed and the old file, if any, is untouched.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    shown = os.fspath(path)
    try:
        mode = os.stat(target).st_mode
    except OSError:
        mode = None  # absent: the usual case; anything worse shows when the temporary file is made
    if mode is not None and not stat.S_ISREG(mode):
        raise OutputError(f"{shown} cannot be written: it exists and is not a regular file")
    if mode is not None and not os.access(target, os.W_OK):
        raise OutputError(f"{shown} cannot be written: it is read-only")
    temporary = os.path.join(folder, f".optdnn-{os.urandom(8).hex()}.tmp")
    try:
        # os.open rather than tempfile: the file gets the user's own umask, not 0600.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with open(fd, "wb") as f:
                for piece in pieces:
                    f.write(piece)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, target)
        except BaseException:
            _remove(temporary)
            raise
    except OSError as e:
        raise OutputError(
            f"{shown} cannot be written: {e.strerror or e}", hint="check the folder, its permissions and the free space"
        ) from e
    _sync_folder(folder)


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
