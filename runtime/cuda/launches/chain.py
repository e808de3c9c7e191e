"""A run that is interrupted by the host: CUDA graphs of launches and copies, with operators on the CPU between them.

Copies go through pinned memory and are nodes of the graphs; the host waits for the GPU before it reads copied data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from optdnn.runtime.cuda.device import Launch, check, driver
from optdnn.runtime.cuda.launches.graphs import Events, Graph, Stream
from optdnn.runtime.cuda.libraries.calls import Called

Action = Callable[[], None]
"""A piece of work on the host."""


@dataclass(frozen=True)
class Transfer:
    """An asynchronous copy between pinned memory and the device; enqueued (or captured) like a launch."""

    target: int
    source: int
    nbytes: int
    to_host: bool
    label: str

    def enqueue(self, stream: int) -> None:
        if not self.nbytes:
            return
        name = "cuMemcpyDtoHAsync" if self.to_host else "cuMemcpyHtoDAsync"
        result = getattr(driver(), name)(self.target, self.source, self.nbytes, stream)
        check(f"{name} of {self.label}", result)


Item = Launch | Called | Transfer | Action
ENQUEUED = (Launch, Called, Transfer)
"""The items that the GPU runs, in stream order; the others run on the host."""


def follows_copy(items: Sequence[Item]) -> bool:
    """Whether the last of ``items`` is a copy, so that the next launch cannot begin early. A copy of no bytes, which
    stands for an omitted step, does not count."""
    done = (item for item in reversed(items) if not isinstance(item, Transfer) or item.nbytes)
    return isinstance(next(done, None), Transfer)


class Chain:
    """The items of a run in order, with the GPU's items collected into graphs; like :class:`Graph`, for programs with host
    steps."""

    def __init__(self, items: Sequence[Item], stream: Stream):
        self.parts: list[Graph | list[Any]] = []
        for on_gpu, group in groupby(items, lambda item: isinstance(item, ENQUEUED)):
            part: list[Any] = list(group)
            self.parts.append(Graph(part, stream) if on_gpu else part)

    def run(self, handle: int) -> None:
        """Run everything, and wait: the next run uses the same pinned memory."""
        for k, part in enumerate(self.parts):
            if isinstance(part, Graph):
                part.run(handle)
                continue
            if k:
                check("cuStreamSynchronize", driver().cuStreamSynchronize(handle))
            for action in part:
                action()
        check("cuStreamSynchronize", driver().cuStreamSynchronize(handle))

    def replay(self, stream: Stream) -> None:
        """Run everything on one of our streams, like :meth:`Graph.replay`; for measurements."""
        self.run(stream.handle)

    def close(self) -> None:
        for part in self.parts:
            if isinstance(part, Graph):
                part.close()


# ---------------------------------------------------------------- items one by one, for profiles and checks


def do(item: Item, stream: Stream) -> None:
    """Run one item alone: enqueued on ``stream``, or done by the host once the stream is empty."""
    if isinstance(item, ENQUEUED):
        item.enqueue(stream.handle)
        return
    stream.synchronize()
    item()


def timed(items: Sequence[Item], stream: Stream) -> list[int]:
    """Nanoseconds of each item: on the GPU, between two events; on the host, by its clock. The items do not overlap."""
    for item in items:  # once untimed: modules are loaded, clocks are up
        do(item, stream)
    events, times = Events(2 * len(items)), [0] * len(items)
    for k, item in enumerate(items):
        if isinstance(item, ENQUEUED):
            events.record(2 * k, stream)
            item.enqueue(stream.handle)
            events.record(2 * k + 1, stream)
            continue
        stream.synchronize()
        start = time.perf_counter_ns()
        item()
        times[k] = time.perf_counter_ns() - start
    stream.synchronize()
    for k, item in enumerate(items):
        if isinstance(item, ENQUEUED):
            times[k] = events.nanoseconds(2 * k, 2 * k + 1)
    events.close()
    return times
