"""Memory of the test processes: freed memory stays with the process, since arrays are allocated and freed by the thousand."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_BLOCK = 32 << 20
"""The largest threshold that glibc accepts."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: returning pages and getting new ones costs 5 % of a run. Other systems stay unchanged."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
