"""Contents of files, read into reusable memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from optdnn.runtime.pictures.files import File
from optdnn.types import Array

Span: TypeAlias = tuple[int, int]
"""The place of a file in memory: its address and its length."""
METADATA = 1 << 20
"""Bytes of a file in addition to its pixels: the JPEG engines get no file with more."""


class Contents:
    """Memory for the contents of a batch's files, stored consecutively. It grows as needed and is reused: allocating
    memory for each file takes longer than reading it."""

    def __init__(self) -> None:
        self._hold(np.empty(METADATA, np.uint8))

    def _hold(self, memory: Array) -> None:
        self.memory, self.view, self.base = memory, memory.data, int(memory.ctypes.data)

    def read(self, files: Sequence[File], most: int) -> list[Span]:
        """The spans of the files' contents. Files that cannot be read, or have more bytes than ``most``, have length 0."""
        starts, at = [], 0
        for file in files:
            starts.append(at)
            at += self._one(file, at, most)
        return [(self.base + start, end - start) for start, end in zip(starts, [*starts[1:], at], strict=True)]

    def of(self, span: Span) -> memoryview:
        """The contents at a span."""
        start = span[0] - self.base
        return self.view[start : start + span[1]]

    def _one(self, file: File, at: int, most: int) -> int:
        """Read a file to offset ``at``. Returns its length."""
        if isinstance(file, bytes):
            self._make_room(at + len(file))
            self.view[at : at + len(file)] = file
            return len(file)
        try:
            opened = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would block
        except OSError:
            return 0
        try:
            end = at + most + 1
            if end > len(self.view):
                self._make_room(end)
            length = os.readv(opened, (self.view[at:end],))  # asking for its size first would double the time
            return length if length <= most else 0
        except OSError:
            return 0
        finally:
            os.close(opened)

    def _make_room(self, end: int) -> None:
        if end > len(self.view):
            larger = np.empty(2 * end, np.uint8)
            larger[: len(self.view)] = self.memory
            self._hold(larger)
