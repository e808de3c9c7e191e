"""Memory that rank 0 shares with the processes that it started, so that calls are requested without a message.

A step has a number. Rank 0 writes the inputs, then the number: it *rings*. Each other rank polls the number until it changes,
runs its part, writes its outputs, then the number into its own word. After :data:`SPIN_S` without a step, a rank sleeps on
a socket, and the next ring wakes it with a byte.

All words are 8 bytes, aligned, and each is written by one process only.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.errors import RankError
from optdnn.types import DTYPES, Array, DType, dtype_name

SPIN_S = 0.01
"""Seconds that a rank polls for the next step before it sleeps: longer than most programs take between two tokens."""
LIMIT_S = 600.0
"""Seconds that rank 0 waits for a rank that is alive."""
_LINE = 16
"""Distance of two words, in words: two cache lines, which processors fetch together."""
_STEP, _CALL, _RANKS = 0, 1, _LINE
_WAKE_S = 1.0
Types = Mapping[str, tuple[DType, Sequence[int]]]
"""Name -> element type and shape."""
Fields = dict[str, list[Any]]
"""Name -> offset of an array in the memory, its element type, its shape."""


def _fence() -> None:
    """A memory fence: all processes see earlier writes before later writes and reads."""
    for _ in range(2):  # a store may move into a critical section, but not through two
        with _LOCK:
            pass


_LOCK = threading.Lock()
_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Board:
    """The shared memory, as one process sees it. ``descriptor``: of its file, which has no name and is removed with the last
    process."""

    def __init__(self, descriptor: int, world: int):
        self.descriptor, self.world = descriptor, world
        self._memory = mmap.mmap(descriptor, _header(world))
        self._words = memoryview(self._memory).cast("q")
        self._end = _header(world)

    @classmethod
    def create(cls, world: int) -> Board:
        descriptor = os.memfd_create("optdnn-ranks")
        os.ftruncate(descriptor, _header(world))
        return cls(descriptor, world)

    def close(self) -> None:
        """Close the file; arrays in it stay valid."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)

    # ---------------------------------------------------------------- arrays

    def place(self, shared: Types, own: Sequence[Types]) -> list[Fields]:
        """New space for arrays that all ranks read (``shared``) and for each rank's ``own``. Returns each rank's fields."""
        at = self._end

        def fields_of(types: Types) -> Fields:
            nonlocal at
            made: Fields = {}
            for name, (dtype, shape) in types.items():
                made[name] = [at, dtype_name(dtype), list(shape)]
                at += -(-math.prod(shape) * dtype.itemsize // 128) * 128
            return made

        common = fields_of(shared)
        found = [common | fields_of(types) for types in own]
        self._end = _pages(at)
        os.ftruncate(self.descriptor, self._end)
        return found

    def arrays(self, fields: Mapping[str, Sequence[Any]]) -> dict[str, Array]:
        """The arrays of these fields."""
        if not fields:
            return {}
        memory = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        found = {}
        for name, (at, dtype, shape) in fields.items():
            size = math.prod(shape) * DTYPES[dtype].itemsize
            found[name] = np.frombuffer(memory, np.uint8)[at : at + size].view(DTYPES[dtype]).reshape(shape)
        return found

    # ---------------------------------------------------------------- rank 0

    def ring(self, call: int, bells: Iterable[socket.socket]) -> None:
        """Request the next step of this call from the other ranks. ``bells``: the socket of each, from rank 1 on."""
        words = self._words
        words[_CALL] = call
        _fence()
        words[_STEP] += 1
        _fence()
        for rank, bell in enumerate(bells, 1):
            if words[_RANKS + 2 * _LINE * rank + _LINE]:
                with contextlib.suppress(OSError):  # the group's connection reports a rank that ended
                    bell.send(b"r")

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until the other ranks have finished the last step. ``check`` is called meanwhile, and may raise.

        Raises RankError if a rank is alive but does not answer."""
        words, step, end = self._words, self._words[_STEP], 0.0
        for rank in range(1, self.world):
            at = _RANKS + 2 * _LINE * rank
            while words[at] != step:
                check()
                now = time.monotonic()
                end = end or now + LIMIT_S
                if now > end:
                    raise RankError(f"rank {rank} did not answer within {LIMIT_S:g} s", hint="load the engine again")
                _yield()
        _fence()

    # ---------------------------------------------------------------- other ranks

    def wait(self, rank: int, seen: int, bell: socket.socket) -> int | None:
        """The call of the step after step ``seen``, once it is requested; None if rank 0 has left."""
        words, at = self._words, _RANKS + 2 * _LINE * rank + _LINE
        end = time.monotonic() + SPIN_S
        bell.settimeout(_WAKE_S)
        while words[_STEP] == seen:
            if time.monotonic() < end:
                _yield()
                continue
            words[at] = 1
            _fence()
            try:
                if words[_STEP] == seen and not bell.recv(64):
                    return None
            except TimeoutError:
                pass
            except OSError:
                return None
            finally:
                words[at] = 0
        _fence()
        return words[_CALL]

    def done(self, rank: int, step: int) -> None:
        """Report that a rank has finished this step."""
        _fence()
        self._words[_RANKS + 2 * _LINE * rank] = step


def _header(world: int) -> int:
    return _pages(8 * (_RANKS + 2 * _LINE * world))


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
