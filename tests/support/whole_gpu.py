"""Tests that fill the memory of a GPU, beside others in parallel processes (pytest -n): they wait for one another."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def gpu_taken(whole: bool, folder: Path | None = None) -> Iterator[None]:
    """A test's time on the GPU: many tests share it; a test that needs the ``whole`` GPU has it alone. A test that waits for the
    whole GPU goes before later ones."""
    import fcntl  # not on Windows, where no test gets here

    folder = folder or Path(tempfile.gettempdir())
    gate, place = (folder / f"optdnn-tests-{os.getuid()}-{name}.lock" for name in ("gate", "gpu"))
    with place.open("a") as held:
        with gate.open("a") as passing:  # closing a file gives its lock back
            fcntl.flock(passing, fcntl.LOCK_EX)
            fcntl.flock(held, fcntl.LOCK_EX if whole else fcntl.LOCK_SH)
        yield


@contextmanager
def full_gpu(cupy: Any) -> Iterator[None]:
    """A GPU with hardly any memory left. For tests marked ``whole_gpu``."""
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
