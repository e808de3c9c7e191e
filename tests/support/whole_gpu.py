"""Tests that fill the memory of a GPU. Tests of parallel processes (pytest -n) wait for one another."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def gpu_taken(whole: bool, folder: Path | None = None) -> Iterator[None]:
    """The time of a test on the GPU. Many tests share the GPU; a test that needs the ``whole`` GPU has it alone. A test that
    waits for the whole GPU goes before later ones."""
    import fcntl  # Windows lacks it, and no test gets here on Windows

    folder = folder or Path(tempfile.gettempdir())
    gate, place = (folder / f"optdnn-tests-{os.getuid()}-{name}.lock" for name in ("gate", "gpu"))
    with place.open("a") as held:
        with gate.open("a") as passing:  # closing a file releases its lock
            fcntl.flock(passing, fcntl.LOCK_EX)
            fcntl.flock(held, fcntl.LOCK_EX if whole else fcntl.LOCK_SH)
        yield


@contextmanager
def full_gpu(cupy: Any) -> Iterator[None]:
    """A GPU with almost no free memory. For tests marked ``whole_gpu``."""
    cupy.get_default_memory_pool().free_all_blocks()
    hog, size = [], cupy.cuda.runtime.memGetInfo()[0]
    while size >= 1 << 16:
        try:
            hog.append(cupy.cuda.Memory(size))
        except cupy.cuda.runtime.CUDARuntimeError:
            size //= 2
    try:
        yield
    finally:
        hog.clear()
