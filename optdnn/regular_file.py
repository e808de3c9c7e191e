"""Opening files with names from others: never a pipe or a device, which would block or never end."""

from __future__ import annotations

import errno
import os
import stat


class NotRegularFile(OSError):
    """A folder, a pipe or a device, where a regular file is wanted."""

    def __init__(self, path: str):
        super().__init__(errno.EINVAL, "it is not a regular file", path)

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: str, flags: int) -> int:
    """An ``opener`` for :func:`open`. Raises NotRegularFile, and other OSErrors."""
    fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularFile(path)
    return fd


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError for a file that a library could not open, or that could block it for ever."""
    os.close(open_regular(os.fspath(path), os.O_RDONLY))


def read_small(path: str | os.PathLike[str], limit: int) -> bytes:
    """The contents of a file of at most ``limit`` bytes. Raises OSError, and ValueError for a larger one."""
    with open(path, "rb", opener=open_regular) as f:
        data = f.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return data
