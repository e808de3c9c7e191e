"""The items of a run one by one, outside of any graph: for profiles and checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from optdnn.runtime.cuda.device import check, driver
from optdnn.runtime.cuda.launches.chain import ENQUEUED, Item
from optdnn.runtime.cuda.launches.graphs import Stream


def do(item: Item, stream: Stream) -> None:
    """One item by itself: enqueued on ``stream``, or done by the host when what the stream holds is done."""
    if isinstance(item, ENQUEUED):
        item.enqueue(stream.handle)
        return
    stream.synchronize()
    item()


def timed(items: Sequence[Item], stream: Stream) -> list[int]:
    """Nanoseconds of each item: on the GPU, between two events; the host's, by its clock. They do not overlap."""
    cu, handle = driver(), stream.handle
    for item in items:  # once without marks: modules are loaded, clocks are up
        do(item, stream)
    marks: list[tuple[Any, Any] | int] = []
    for item in items:
        if isinstance(item, ENQUEUED):
            begin, end = (check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2))
            check("cuEventRecord", cu.cuEventRecord(begin, handle))
            item.enqueue(handle)
            check("cuEventRecord", cu.cuEventRecord(end, handle))
            marks.append((begin, end))
            continue
        stream.synchronize()
        start = time.perf_counter_ns()
        item()
        marks.append(time.perf_counter_ns() - start)
    stream.synchronize()
    return [m if isinstance(m, int) else _elapsed(*m) for m in marks]


def _elapsed(begin: Any, end: Any) -> int:
    """GPU nanoseconds between two recorded events, which are given back."""
    cu = driver()
    found = int(float(check("cuEventElapsedTime", cu.cuEventElapsedTime(begin, end))) * 1e6)
    for mark in (begin, end):
        cu.cuEventDestroy(mark)
    return found
