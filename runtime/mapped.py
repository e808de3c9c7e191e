"""A mapped engine file: weights are read from it while the engine runs, so a change in place must be noticed."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence

from optdnn.errors import RunError
from optdnn.types import Array


class MappedFile:
    """The file that holds the arrays of a program. ``digests``: arrays with their SHA-256, if these were verified.

    A change is detected by the file's size and modification time. A file that was only touched is read again and accepted.
    """

    def __init__(self, descriptor: int, shown: str):
        self._fd, self._shown = os.dup(descriptor), shown
        weakref.finalize(self, os.close, self._fd)
        self._state = self._now()
        self.digests: Sequence[tuple[Array, bytes]] = ()

    @property
    def descriptor(self) -> int:
        """The open file that was loaded, even if another file has its name now."""
        return self._fd

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Raise RunError if the file has changed since it was loaded."""
        state = self._now()
        if state == self._state:
            return
        same = state[0] == self._state[0] and bool(self.digests)
        if not same or any(
            hashlib.sha256(a.reshape(-1).view("u1").data).digest() != known for a, known in self.digests
        ):
            raise RunError(
                f"{self._shown} was changed while its engine was in use",
                hint="load it again; replace an engine's file by renaming, as save does, or load with mmap=False",
            )
        self._state = state
