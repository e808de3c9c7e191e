"""Requests inside of the server: checked tensors, and how their rows are copied into a batch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from optdnn.serving.refusals import Refusal
from optdnn.types import BOOL, RANK_LIMIT, Array, DType

SHARED = "/dev/shm"
"""Where Linux keeps system shared memory."""
ARENA_KEPT = 64 << 20
"""Bytes at the beginning of a front end's arena that stay memory also when no request is there."""


def open_shared(key: str, access: int) -> int:
    """The descriptor of a file in system shared memory. Raises Refusal.

    A link is not followed, and a pipe is not waited for: another user may have put one in the registered file's place.
    """
    try:
        return os.open(os.path.join(SHARED, key), access | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Refusal(f"the shared memory {key!r} cannot be opened: {error.strerror}") from error


@dataclass(frozen=True)
class RegionSlice:
    """Bytes of a shared memory region: its file, the first byte and their number."""

    key: str | int
    """The name of a file in :data:`SHARED`, or a descriptor that this process has inherited."""
    offset: int
    nbytes: int

    def read_into(self, target: Array) -> None:
        """Fill ``target`` (uint8, C-contiguous). The bytes are read, not mapped: a client that shortens its region cannot end the
        process that reads. Raises Refusal where the region has become shorter."""
        view = memoryview(target.data)
        done = 0
        file = open_shared(self.key, os.O_RDONLY) if isinstance(self.key, str) else self.key
        try:
            while done < len(view):
                count = os.preadv(file, [view[done:]], self.offset + done)
                if not count:
                    raise Refusal(f"the shared memory {self.key!r} is shorter than it was registered")
                done += count
        except OSError as error:
            raise Refusal(f"the shared memory {self.key!r} cannot be read: {error.strerror}") from error
        finally:
            if isinstance(self.key, str):
                os.close(file)


@dataclass(frozen=True)
class DeviceSlice:
    """Bytes of a client's memory on a GPU: the handle that opens it (CUDA's for processes, as base64), the first, their number.

    The process that runs the engine reads and writes it."""

    handle: str
    offset: int
    nbytes: int


Content: TypeAlias = Array | RegionSlice | DeviceSlice
"""The elements of a tensor, or where they lie."""


@dataclass(frozen=True)
class Tensor:
    """One input of a request: its element type, its shape, and its elements or where they lie."""

    dtype: DType
    shape: tuple[int, ...]
    data: Content

    def rows(self, start: int, stop: int) -> Content:
        """Rows ``start`` to ``stop`` of it."""
        if not isinstance(self.data, RegionSlice | DeviceSlice):
            return self.data[start:stop]
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self.data, offset=self.data.offset + start * row, nbytes=(stop - start) * row)


@dataclass
class InferRequest:
    """A request that has been checked against its model."""

    tensors: Mapping[str, Tensor]
    priority: int = 0
    """1 is served first; 0, the default, last."""
    timeout_s: float | None = None
    """How long it may wait in the queue."""
    targets: Mapping[str, DeviceSlice] = field(default_factory=dict)
    """Outputs that the run writes into memory on the GPU."""

    @property
    def order(self) -> float:
        """The key that sorts the queue."""
        return self.priority or math.inf


@dataclass(frozen=True)
class DeviceTarget:
    """Rows of an output that a run writes into a client's memory on the GPU."""

    name: str
    row: int
    """The first of them in the batch."""
    rows: int
    before: int
    """Rows of the request in front of them, which other batches write."""
    memory: DeviceSlice


@dataclass
class Job:
    """One run of an engine: the shape of every input, and the parts that are copied to their rows."""

    shapes: dict[str, tuple[DType, tuple[int, ...]]]
    rows: int | None
    """Rows that are filled; the rest repeats the last of them. None: the inputs have no rows."""
    parts: list[tuple[str, int, Content]] = field(default_factory=list)
    """Input, first row, content."""
    targets: list[DeviceTarget] = field(default_factory=list)


def check_shape(name: str, shape: Sequence[Any]) -> None:
    """Raise Refusal unless ``shape`` is a shape that input ``name`` may have."""
    if len(shape) > RANK_LIMIT or not all(type(d) is int and 0 <= d < 1 << 63 for d in shape):
        raise Refusal(
            f"the shape of input {name!r} is not valid", hint=f"a shape is at most {RANK_LIMIT} whole numbers from 0 on"
        )


def check_bools(name: str, dtype: DType, data: Array) -> None:
    """Raise Refusal where the bytes ``data`` of input ``name`` are of bools, and some are not 0 or 1."""
    if dtype == BOOL and data.max(initial=0) > 1:
        raise Refusal(f"input {name!r} holds bytes that are not 0 or 1")


def fill(arrays: Mapping[str, Array], parts: Sequence[tuple[str, int, Content]]) -> None:
    """Copy ``parts`` into the arrays of a batch. Those on a GPU are not copied.

    Raises Refusal as :meth:`RegionSlice.read_into`, and for bytes of a bool that are not 0 or 1.
    """
    for name, row, content in parts:
        target = arrays[name]
        if isinstance(content, DeviceSlice):
            continue
        if isinstance(content, RegionSlice):
            flat: Any = target.reshape(-1).view(np.uint8)
            first = row * (target[:1].nbytes if target.ndim else 0)
            read = flat[first : first + content.nbytes]
            content.read_into(read)
            check_bools(name, target.dtype, read)
        elif target.ndim:
            np.copyto(target[row : row + len(content)], content)
        else:
            np.copyto(target, content)


def pad(arrays: Mapping[str, Array], rows: int | None) -> None:
    """Repeat the last of ``rows`` rows in the rows behind them: its values are valid wherever those of a request are."""
    if rows is not None:
        for a in arrays.values():
            a[rows:] = a[rows - 1 : rows]
