"""Arrays of an ``.npz`` that are read a few rows at a time: a file may be larger than memory, compressed or not."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from optdnn.errors import UsageError
from optdnn.types import Array

CHUNK_BYTES = 1 << 18
"""Rows are read together up to about this many bytes."""


class StoredArray:
    """One array of an ``.npz``: its shape and type, and slices of its first axis, which are cheap from front to back.

    Raises ValueError for anything but a plain array. Reading raises UsageError if the file is damaged or missing.
    """

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self._stream: IO[bytes] | None = None
        self._at = 0
        stream = self._opened()
        self.shape, fortran, self.dtype = _header(stream)
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        if self.dtype.hasobject:
            raise ValueError(f"{name} is not an array of plain numbers")
        self._stream = stream
        self._row = self.dtype.itemsize * math.prod(self.shape[1:])
        # Columns first: the elements of a row are spread over the whole array.
        self._whole = np.load(path, allow_pickle=False)[name] if fortran and self.ndim > 1 else None

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Array]:
        step = max(1, CHUNK_BYTES // max(1, self._row))
        for start in range(0, len(self), step):
            yield from self[start : start + step]

    def __getitem__(self, rows: slice) -> Array:
        start, stop, step = rows.indices(len(self))
        assert step == 1, "rows are read one after the other"
        if self._whole is not None:
            part: Array = self._whole[rows]
            return part
        count = max(0, stop - start)
        try:
            if self._stream is None or start < self._at:
                self._stream, self._at = self._opened(), 0
                _header(self._stream)
            while self._at < start:
                skipped = min(start - self._at, max(1, CHUNK_BYTES // max(1, self._row)))
                self._bytes(skipped)
            data = self._bytes(count)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise UsageError(f"{self.path} cannot be read: {self.name!r} is damaged or has changed ({error})") from None
        return np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])

    def _opened(self) -> IO[bytes]:
        with zipfile.ZipFile(self.path) as archive:
            file = f"{self.name}.npy"
            return archive.open(file if file in archive.namelist() else self.name)

    def _bytes(self, rows: int) -> bytes:
        assert self._stream is not None
        wanted = rows * self._row
        data = self._stream.read(wanted)
        if len(data) < wanted:
            raise EOFError("it ends too early")
        self._at += rows
        return data


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and type of an ``.npy`` that begins at the stream's position."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return tuple(shape), bool(fortran), dtype
