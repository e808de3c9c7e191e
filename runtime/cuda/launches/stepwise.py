"""The items of a run one by one, outside of any graph: for profiles and checks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from optdnn.runtime.cuda.launches.chain import ENQUEUED, Item
from optdnn.runtime.cuda.launches.graphs import Events, Stream


def do(item: Item, stream: Stream) -> None:
    """One item by itself: enqueued on ``stream``, or done by the host when what the stream holds is done."""
    if isinstance(item, ENQUEUED):
        item.enqueue(stream.handle)
        return
    stream.synchronize()
    item()


def timed(items: Sequence[Item], stream: Stream) -> list[int]:
    """Nanoseconds of each item: on the GPU, between two events; on the host, by its clock. They do not overlap."""
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
