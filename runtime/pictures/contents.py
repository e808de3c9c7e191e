"""Contents of files, read into memory that is used again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from optdnn.runtime.pictures.files import File
from optdnn.types import Array

Span: TypeAlias = tuple[int, int]
"""Where a file lies in memory: its address and its length."""
METADATA = 1 << 20
"""Bytes of a file in addition to its pixels: more is not read for the JPEG engines."""


class Contents:
    """Memory that holds the contents of a batch's files, one after the other. It grows to what they need, and is used again: new
    memory for each file takes longer than to read it."""

    def __init__(self) -> None:
        self._hold(np.empty(METADATA, np.uint8))

    def _hold(self, memory: Array) -> None:
        self.memory, self.view, self.base = memory, memory.data, int(memory.ctypes.data)

    def read(self, files: Sequence[File], most: int) -> list[Span]:
        """Where the contents of each file lie. Files that cannot be read, or have more bytes than ``most``, have length 0."""
        starts, at = [], 0
        for file in files:
            starts.append(at)
            at += self._one(file, at, most)
        return [(self.base + start, end - start) for start, end in zip(starts, [*starts[1:], at], strict=True)]

    def of(self, span: Span) -> memoryview:
        """The contents that lie at a span."""
        start = span[0] - self.base
        return self.view[start : start + span[1]]

    def _one(self, file: File, at: int, most: int) -> int:
        """Put a file at offset ``at``. Returns its length."""
        if isinstance(file, bytes):
            self._room(at + len(file))
            self.view[at : at + len(file)] = file
            return len(file)
        try:
            opened = os.open(file, os.O_RDONLY)
        except OSError:
            return 0
        try:
            end = at + most + 1
            if end > len(self.view):
                self._room(end)
            length = os.readv(opened, (self.view[at:end],))  # to ask for its size first takes as long again
            return length if length <= most else 0
        except OSError:
            return 0
        finally:
            os.close(opened)

    def _room(self, end: int) -> None:
        if end > len(self.view):
            larger = np.empty(2 * end, np.uint8)
            larger[: len(self.view)] = self.memory
            self._hold(larger)
