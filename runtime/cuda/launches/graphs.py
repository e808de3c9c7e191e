"""CUDA graphs of launches, with programmatic dependent launch between them, and their timing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

from optdnn.runtime.cuda.allocator import free
from optdnn.runtime.cuda.device import Launch, check, driver


class Enqueued(Protocol):
    """An item of a graph: a launch, a copy or a library call."""

    def enqueue(self, stream: int) -> None:
        """Enqueue it on the stream with this handle."""


Waits = Sequence[Sequence[int]]
"""For each launch of a graph, the launches that it waits for."""


class Stream:
    """A non-blocking stream. ``handle`` is an int, as array libraries expect it."""

    def __init__(self) -> None:
        cu = driver()
        self._stream = check("cuStreamCreate", cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.handle = int(self._stream)

    def synchronize(self) -> None:
        """Wait for everything on the stream. Raises CudaError for any earlier failure."""
        check("cuStreamSynchronize", driver().cuStreamSynchronize(self._stream))


class Events:
    """``n`` reusable timing events."""

    def __init__(self, n: int):
        self._cu = driver()
        self._events = [check("cuEventCreate", self._cu.cuEventCreate(0)) for _ in range(n)]

    def record(self, k: int, stream: Stream) -> None:
        check("cuEventRecord", self._cu.cuEventRecord(self._events[k], stream.handle))

    def milliseconds(self, begin: int, end: int) -> float:
        """The time between two recorded events that have occurred."""
        a, b = self._events[begin], self._events[end]
        return float(check("cuEventElapsedTime", self._cu.cuEventElapsedTime(a, b)))

    def nanoseconds(self, begin: int, end: int) -> int:
        return int(self.milliseconds(begin, end) * 1e6)

    def close(self) -> None:
        for event in self._events:
            self._cu.cuEventDestroy(event)


class _Template:
    """A captured CUDA graph, not instantiated, and for each launch the nodes that others wait for (one, except for library calls).

    With ``waits``, the dependencies of the stream are set before each launch. A launch that asks for programmatic edges gets them
    from all launches that it waits for, if these are our kernels. Its griddepcontrol.wait then waits for each of them.
    """

    def __init__(self, launches: Sequence[Enqueued], stream: Stream, waits: Waits | None = None):
        cu = driver()
        self.nodes: list[list[Any]] = []
        # Python's garbage collector may free memory or graphs of another engine during the capture. The other modes forbid this:
        # the memory would stay, and the capture fail.
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check("cuStreamBeginCapture", cu.cuStreamBeginCapture(stream.handle, mode))
        try:
            self._enqueue(launches, stream, waits)
        except BaseException:
            cu.cuStreamEndCapture(stream.handle)  # it fails as well: the first error is the one to report
            raise
        self.graph = check("cuStreamEndCapture", cu.cuStreamEndCapture(stream.handle))
        weakref.finalize(self, free, "cuGraphDestroy", self.graph)

    def _enqueue(self, launches: Sequence[Enqueued], stream: Stream, waits: Waits | None) -> None:
        cu = driver()
        for k, launch in enumerate(launches):
            if waits is None:
                launch.enqueue(stream.handle)
            else:
                self._depend([node for w in waits[k] for node in self.nodes[w]], stream)
                if isinstance(launch, Launch):
                    ours = bool(waits[k]) and all(isinstance(launches[w], Launch) for w in waits[k])
                    launch.enqueue(stream.handle, early=ours)
                else:
                    launch.enqueue(stream.handle)
            _, _, _, last, *_ = check("cuStreamGetCaptureInfo", cu.cuStreamGetCaptureInfo(stream.handle))
            self.nodes.append(list(last))  # a next launch would depend on only these

    @staticmethod
    def _depend(nodes: Sequence[Any], stream: Stream) -> None:
        """Make the next captured launch depend on these nodes."""
        cu = driver()
        whole = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        edges = [cu.CUgraphEdgeData() for _ in nodes]
        result = cu.cuStreamUpdateCaptureDependencies(stream.handle, list(nodes), edges, len(nodes), whole)
        check("cuStreamUpdateCaptureDependencies", result)


class Graph:
    """An instantiated CUDA graph of ``launches`` in order.

    They are captured from one stream, so each depends on the previous one, or, with ``waits``, on the named ones (numbers of
    earlier launches, for each launch). Launches that ask for it get a programmatic edge.
    """

    def __init__(self, launches: Iterable[Enqueued], stream: Stream, waits: Waits | None = None):
        self.launches = tuple(launches)  # their parameter buffers were copied, their functions must stay loaded
        self._template = _Template(self.launches, stream, waits)
        self._instantiate()

    def _instantiate(self) -> None:
        self._executable = check("cuGraphInstantiate", driver().cuGraphInstantiate(self._template.graph, 0))
        self._free = weakref.finalize(self, free, "cuGraphExecDestroy", self._executable)  # at most once

    def moved(self, changed: Mapping[int, Launch]) -> Graph:
        """Another graph of the same launches, some of them (by number) with other parameters, such as the addresses of other
        arrays: nodes are changed, nothing is captured again."""
        cu = driver()
        graph = copy(self)
        graph.launches = tuple(changed.get(k, launch) for k, launch in enumerate(self.launches))
        graph._instantiate()
        for k, launch in changed.items():
            (node,) = self._template.nodes[k]
            parameters = check("cuGraphKernelNodeGetParams", cu.cuGraphKernelNodeGetParams(node))
            parameters.kernelParams = launch.parameters_address
            result = cu.cuGraphExecKernelNodeSetParams(graph._executable, node, parameters)
            check(f"cuGraphExecKernelNodeSetParams of {launch.label}", result)
        return graph

    def run(self, handle: int) -> None:
        """Enqueue one run on the stream with this handle."""
        check("cuGraphLaunch", driver().cuGraphLaunch(self._executable, handle))

    def replay(self, stream: Stream) -> None:
        """Enqueue one run on a stream of ours."""
        self.run(stream.handle)

    def close(self) -> None:
        """Free the executable graph, as the last reference would; a run in flight still finishes. Using the graph afterward
        is an error."""
        self._free()


def time_runs(
    run: Callable[[], Any],
    stream: Stream,
    *,
    warmup: int = 5,
    repeats: int,
    inner: int = 1,
    wait: Callable[[], Any] | None = None,
) -> list[float]:
    """GPU milliseconds of ``run()`` (which enqueues on ``stream``): one value per repeat, the mean of ``inner`` runs.

    ``wait`` waits for the stream if that must not take forever.
    """
    for _ in range(warmup):
        run()
    events = Events(2 * repeats)
    for k in range(repeats):
        events.record(2 * k, stream)
        for _ in range(inner):
            run()
        events.record(2 * k + 1, stream)
    (wait or stream.synchronize)()
    times = [events.milliseconds(2 * k, 2 * k + 1) / inner for k in range(repeats)]
    events.close()
    return times


class Flush:
    """Evicts L2: overwrites a buffer of ``bytes`` (twice the L2 is enough)."""

    def __init__(self, size: int, stream: Stream):
        self._size, self._stream = size, stream
        self._pointer = check("cuMemAlloc", driver().cuMemAlloc(size))

    def __call__(self) -> None:
        check("cuMemsetD8Async", driver().cuMemsetD8Async(self._pointer, 0, self._size, self._stream.handle))

    def close(self) -> None:
        check("cuMemFree", driver().cuMemFree(self._pointer))
