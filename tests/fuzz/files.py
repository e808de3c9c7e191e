"""A file for one input, in memory if the system has such a folder."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


def in_file(data: bytes, name: str = "input") -> Path:
    """A file of this process with these contents; the next call replaces it."""
    path = _folder(os.getpid()) / name
    path.write_bytes(data)
    return path


@cache
def _folder(process: int) -> Path:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made = Path(tempfile.mkdtemp(prefix="optdnn-fuzz-", dir=base))
    atexit.register(shutil.rmtree, made, True)
    return made
