"""Executable graphs are freed once, when they are closed or with the last reference, checked with a driver that counts; and the
launches that may begin early."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from optdnn.runtime.cuda import allocator
from optdnn.runtime.cuda.allocator import DeviceMemory, PinnedMemory
from optdnn.runtime.cuda.device import CudaError
from optdnn.runtime.cuda.launches import graphs
from optdnn.runtime.cuda.launches.chain import Transfer, follows_copy


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The destroyed objects, and how often each was destroyed."""
    found: Counter[str] = Counter()
    made = iter(range(100))
    mode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    driver = SimpleNamespace(
        CUstreamCaptureMode=mode,
        cuStreamBeginCapture=lambda *given: None,
        cuStreamEndCapture=lambda *given: "template",
        cuGraphInstantiate=lambda *given: f"graph {next(made)}",
        cuGraphDestroy=lambda graph: found.update([graph]),
        cuGraphExecDestroy=lambda graph: found.update([graph]),
    )
    for module in (allocator, graphs):
        monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(graphs, "check", lambda call, result: result)
    return found


def test_an_executable_graph_is_freed_once(freed: Counter[str]) -> None:
    stream: Any = SimpleNamespace(handle=0)
    first, second = graphs.Graph([], stream), graphs.Graph([], stream)
    other = first.moved({})
    second.close()
    second.close()
    assert freed == {"graph 1": 1}
    del second
    assert freed == {"graph 1": 1, "template": 1}
    del first
    assert freed == {"graph 0": 1, "graph 1": 1, "template": 1}, "the other's template is there as long as it is"
    other.close()
    del other
    assert freed == {"graph 0": 1, "graph 1": 1, "graph 2": 1, "template": 2}


def test_the_first_error_of_a_capture_is_reported(freed: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(graphs.driver(), "cuStreamEndCapture", lambda *given: ended.append(given))

    class Failing:
        def enqueue(self, stream: int) -> None:
            raise CudaError("cuLaunchKernel", "CUDA_ERROR_INVALID_VALUE", "no")

    with pytest.raises(CudaError, match="cuLaunchKernel"):
        graphs.Graph([Failing()], SimpleNamespace(handle=0))  # type: ignore[arg-type]
    assert len(ended) == 1
    assert not freed


@pytest.mark.gpu
def test_memory_and_graphs_may_be_freed_during_a_capture() -> None:
    """The garbage collector may free those of another engine at any time, on the thread that captures."""
    stream = graphs.Stream()
    other: list[Any] = [DeviceMemory(1 << 20, "a test"), PinnedMemory(64), graphs.Graph([], stream)]
    assert other[1].pointer

    class Freeing:
        def enqueue(self, stream: int) -> None:
            other.clear()

    graph = graphs.Graph([Freeing()], stream)
    graph.replay(stream)
    stream.synchronize()


def test_a_copy_that_is_left_out_holds_up_no_launch() -> None:
    copy, none = Transfer(1, 2, 16, False, "copy"), Transfer(0, 0, 0, False, "left out")
    work: Any = lambda: None  # noqa: E731
    assert follows_copy([copy])
    assert follows_copy([work, copy, none])
    assert not any(map(follows_copy, ([], [none], [copy, work], [copy, work, none, none])))
