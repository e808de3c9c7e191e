"""Memory of the test processes: what is freed stays with the process, since arrays come and go by the thousand."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_BLOCK = 32 << 20
"""glibc takes no larger threshold."""


def keep_freed_memory() -> None:
    """Ask glibc for it: giving pages back and getting new ones costs a twentieth of a run. Elsewhere nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
