"""Atomic writing of files, and reading and writing a shared file without losing other writers' changes.

A file is written under a temporary name next to its target, then renamed. A process that is killed meanwhile leaves the temporary
file. The next write into that folder removes it: a writer holds a lock on its temporary file, so a file that can be locked has no
writer any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from types import ModuleType

from optdnn.errors import OutputError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: open files cannot be removed there, so leftovers are tried without a lock
    fcntl = None

_TEMPORARY = re.compile(r"\.optdnn-[0-9a-f]{16}\.tmp")
_swept: set[str] = set()


def write_atomic(path: str | os.PathLike[str], pieces: Iterable[bytes | memoryview]) -> None:
    """Write ``pieces`` to a temporary file next to ``path``, flush it to the disk, and rename it over ``path``.

    A symbolic link is followed: its target is replaced. Temporary files of writers that were killed are removed. Raises OutputError
    if writing fails; the temporary file is then removed and the old file, if any, is unchanged.
    """
    target = _target(path)
    sweep(os.path.dirname(target))
    try:
        replace_file(target, pieces)
    except OSError as e:
        raise _failure(os.fspath(path), e) from e
    _sync_folder(os.path.dirname(target))


def replace_file(target: str, pieces: Iterable[bytes | memoryview], *, flush: bool = True) -> None:
    """Write ``pieces`` next to the file ``target`` and rename the result over it; ``flush`` writes them to the disk first.

    Raises OSError; the old file, if any, is then unchanged. A folder is swept once per process: caches write many files.
    """
    folder = os.path.dirname(target)
    if folder not in _swept:
        _swept.add(folder)
        sweep(folder)
    temporary, fd = _temporary(folder)
    try:
        with open(fd, "wb") as f:
            for piece in pieces:
                f.write(piece)
            f.flush()
            if flush:
                os.fsync(f.fileno())
            if fcntl is not None:
                os.replace(temporary, target)  # before closing: closing unlocks it
        if fcntl is None:
            os.replace(temporary, target)  # Windows does not rename open files
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


def sweep(folder: str) -> None:
    """Remove the temporary files of dead writers from a folder. A file that cannot be inspected is left unchanged."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in [e.path for e in entries if _TEMPORARY.fullmatch(e.name)]:
            _remove_leftover(entry)


@contextlib.contextmanager
def shared_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a lock on a folder while a file in it is read, changed and written: others who do so wait. If folders cannot be
    locked, the block runs without the lock: the file is complete in any case."""
    fd = None
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _target(path: str | os.PathLike[str]) -> str:
    """The path of the real file, with links followed. Raises OutputError if it exists and cannot be replaced."""
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
    """A new file in ``folder``, open for writing and locked. os.open rather than tempfile: it gets the user's own umask, not
    0600."""
    while True:
        path = os.path.join(folder, f".optdnn-{os.urandom(8).hex()}.tmp")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            if _lock(fd) and not _is_at(fd, path):  # swept between the two calls
                os.close(fd)
                continue
        except BaseException:
            os.close(fd)
            _remove(path)
            raise
        return path, fd


def _remove_leftover(path: str) -> None:
    """Remove a temporary file unless its writer lives."""
    if fcntl is None:
        _remove(path)
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # renamed meanwhile, or owned by another user
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(fd, path):
            _remove(path)
    except OSError:  # it has a writer, or files cannot be locked here
        pass
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Lock our own file. False if files cannot be locked here; then no file is taken for a leftover, either."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _is_at(fd: int, path: str) -> bool:
    """Whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _failure(shown: str, error: OSError) -> OutputError:
    return OutputError(
        f"{shown} cannot be written: {error.strerror or error}",
        hint="check the folder, its permissions and the free space",
    )


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # already renamed, or the folder is gone: nothing of ours is left
        os.unlink(path)


def _sync_folder(folder: str) -> None:
    """Make the rename itself durable, if folders can be opened (POSIX)."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):  # some file systems do not sync folders
            os.fsync(fd)
    finally:
        os.close(fd)
