"""Opening files with names from others: never a pipe or a device, which would block or never end."""

from __future__ import annotations

import os
import stat


def open_regular(path: str, flags: int) -> int:
    """An ``opener`` for :func:`open`. Raises ValueError for anything but a regular file."""
    fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it is not a regular file")
    return fd


def read_small(path: str | os.PathLike[str], limit: int) -> bytes:
    """The contents of a file of at most ``limit`` bytes. Raises OSError, and ValueError for another kind of file."""
    with open(path, "rb", opener=open_regular) as f:
        data = f.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return data
