"""The exchange of arrays between ranks in NumPy: it defines the meaning of ``AllReduce`` and ``AllGather``.

Each rank runs in a thread, which holds the exchange for its collectives (:func:`joined`). :class:`Threads` connects ranks
of one process; :mod:`optdnn.runtime.ranks.group` connects processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

from optdnn.errors import RankError, RunError
from optdnn.types import Array

T = TypeVar("T")
WAIT_S = 60.0
"""Seconds that a rank of one process waits for the others at a collective."""


class Exchange(Protocol):
    """One rank's connection to the others."""

    world: int

    def gather(self, array: Array) -> list[Array]:
        """The arrays of all ranks, in rank order; each rank gives one. Raises RankError if another rank is lost."""


class Threads:
    """The common part of the exchanges of ranks that are threads of one process."""

    def __init__(self, world: int):
        self.world = world
        self.barrier = threading.Barrier(world)
        self.given: list[Array | None] = [None] * world

    def of(self, rank: int) -> Exchange:
        """The exchange of one rank."""
        return _ThreadExchange(self, rank)


class _ThreadExchange:
    def __init__(self, common: Threads, rank: int):
        self.common, self.rank, self.world = common, rank, common.world

    def gather(self, array: Array) -> list[Array]:
        common = self.common
        try:
            common.given[self.rank] = array
            common.barrier.wait(WAIT_S)
            found = [a.copy() for a in common.given if a is not None]
            common.barrier.wait(WAIT_S)  # no rank gives the next array before all have read this one
        except threading.BrokenBarrierError:
            raise RankError("another rank of this process failed, or did not come to the collective") from None
        return found


_here = threading.local()


@contextmanager
def joined(exchange: Exchange) -> Iterator[None]:
    """Collectives of this thread use ``exchange`` within the block."""
    before = getattr(_here, "exchange", None)
    _here.exchange = exchange
    try:
        yield
    finally:
        _here.exchange = before


def gather(array: Array, world: int) -> list[Array]:
    """The arrays of all ranks. Raises RunError if this thread is not a rank of a world of this size."""
    exchange: Exchange | None = getattr(_here, "exchange", None)
    if exchange is None or exchange.world != world:
        there = "one rank" if exchange is None else f"{exchange.world} ranks"
        raise RunError(
            f"a collective of {world} ranks runs on {there}",
            hint="start it on all ranks together: optdnn run --devices N, or a launcher such as torchrun",
        )
    found = exchange.gather(array)
    if any(a.shape != array.shape for a in found):
        raise RankError(f"the ranks of a collective give arrays of different shapes: {[list(a.shape) for a in found]}")
    return found


def together(works: Sequence[Callable[[], T]], exchange: Threads) -> list[T]:
    """Run one function per rank, each in a thread that is this rank. Raises the first rank's own error."""

    def work(rank: int) -> T:
        try:
            with joined(exchange.of(rank)):
                return works[rank]()
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(len(works), "optdnn-rank") as pool:
        futures = [pool.submit(work, rank) for rank in range(len(works))]
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    exchange.barrier.reset()
    if errors:
        raise next((e for e in errors if not isinstance(e, RankError)), errors[0])
    return [f.result() for f in futures]
