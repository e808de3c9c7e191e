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
"""Bytes of a file beside its pixels: more is not read for the JPEG engines."""


class Contents:
    """Memory that holds the contents of a batch's files, one behind the other. It grows to what they need, and is used again: new
    memory for each file takes longer than to read it."""

    def __init__(self) -> None:
        self.memory: Array = np.empty(METADATA, np.uint8)

    def read(self, files: Sequence[File], most: int) -> list[Span]:
        """Where the contents of each file lie. Files that cannot be read, or have more bytes than ``most``, have length 0."""
        ends, at = [], 0
        for file in files:
            starts, at = at, at + self._one(file, at, most)
            ends.append((starts, at))
        base: int = self.memory.ctypes.data
        return [(base + start, end - start) for start, end in ends]

    def _one(self, file: File, at: int, most: int) -> int:
        """Put a file at offset ``at``. Returns its length."""
        if isinstance(file, bytes):
            length = len(file)
            self._room(at, length)[:] = file
            return length
        try:
            opened = os.open(file, os.O_RDONLY)
        except OSError:
            return 0
        try:
            length = os.readv(opened, [self._room(at, most + 1)])  # to ask for its size first takes as long again
            return length if length <= most else 0
        except OSError:
            return 0
        finally:
            os.close(opened)

    def _room(self, at: int, length: int) -> memoryview:
        if at + length > len(self.memory):
            larger = np.empty(2 * (at + length), np.uint8)
            larger[:at] = self.memory[:at]
            self.memory = larger
        return self.memory.data[at : at + length]
