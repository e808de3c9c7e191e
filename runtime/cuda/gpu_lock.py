"""A lock, so that only one process at a time measures on a GPU. Two concurrent tunings would time each other's kernels."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optdnn.runtime.cuda.compile.nvrtc import default_folder


def lock_path(place: str) -> Path:
    """The path of the lock file, in the user's cache folder, of the GPU with this PCI bus id."""
    return default_folder().parent / f"gpu-{re.sub(r'[^0-9a-z]+', '-', place.lower())}.lock"


@contextmanager
def alone(place: str, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Hold the GPU's lock while the block runs. Waits if another process of this user holds it.

    If files cannot be locked (no such system call, a cache folder that is not writable), ``say`` gets the reason and the block
    runs without the lock.
    """
    try:
        import fcntl

        path = lock_path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except (ImportError, OSError) as error:
        say(f"cannot lock the GPU against others that measure on it: {error}")
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process measures on GPU {place}: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            os.close(handle)  # this unlocks it
