"""State on the GPU, with NumPy in place of CuPy: the arrays that a run reads and writes, and the reset to the initial state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optdnn.errors import InputError
from optdnn.ranges import DimRange
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.contexts.state import Binding
from optdnn.runtime.cuda.launches import graphs
from optdnn.runtime.cuda.launches.chain import timed
from optdnn.runtime.cuda.memory import state
from optdnn.runtime.cuda.memory.state import Growing, Streaming
from optdnn.types import TensorSpec

F32 = np.dtype(np.float32)


class Cupy:
    """The part of CuPy that state needs, in host memory."""

    uint8 = np.uint8
    asarray, empty, empty_like, copyto = map(staticmethod, (np.asarray, np.empty, np.empty_like, np.copyto))
    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None))

    @staticmethod
    def ndarray(shape: Any, dtype: Any, memptr: Any) -> Any:
        return np.ndarray(shape, dtype, memptr)


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "import_cupy", lambda why: Cupy)


class Adds:
    """new = past + x, bound to fixed arrays, and in place for the pairs of ``in_place``."""

    def __init__(self, in_place: dict[str, str] | None = None):
        self.in_place, self.signature = in_place or {}, ADDS
        self.bound = 0

    def bind(self, inputs: Any, outputs: Any = None) -> Any:
        self.bound += 1

        def run(stream: object) -> Any:
            np.add(inputs["past"], inputs["x"], out=outputs["new"])
            return dict(outputs)

        return SimpleNamespace(run=run, outputs=dict(outputs))


ADDS = Signature([TensorSpec("x", F32, (2,)), TensorSpec("past", F32, (2,))], [TensorSpec("new", F32, (2,))])


@pytest.mark.parametrize(("in_place", "graphs"), [({}, 2), ({"new": "past"}, 1)])
def test_state_of_fixed_size_is_handed_on(in_place: dict[str, str], graphs: int) -> None:
    context, x, past = Adds(in_place), np.ones(2, np.float32), np.array([1, 2], np.float32)
    calls = Streaming(context, Binding({"x": x, "past": past}, {}, {"new": "past"}))
    assert context.bound == graphs
    for k in (1, 2, 3):
        assert calls.run()["new"].tolist() == [1 + k, 2 + k]
        assert calls.state["past"].tolist() == [1 + k, 2 + k]
    assert past.tolist() == [1, 2], "the caller's array is not written"
    calls.reset()
    assert calls.run()["new"].tolist() == [2, 3]
    calls.reset({"past": np.zeros(2, np.float32)})
    assert calls.run()["new"].tolist() == [1, 1]
    with pytest.raises(InputError, match="input 'past' is state and has no initial value"):
        Streaming(context, Binding({"x": x}, {}, {"new": "past"}))


class Appends:
    """new = past with x appended; y = the sum of new."""

    def __init__(self) -> None:
        self.signature = APPENDS

    def outputs_for(self, feeds: Any) -> list[TensorSpec]:
        return [TensorSpec("new", F32, (len(feeds["past"]) + 1,)), TensorSpec("y", F32, (1,))]

    def run(self, feeds: Any, out: Any = None, stream: object = None) -> Any:
        out["new"][:] = [*feeds["past"], *feeds["x"]]
        out["y"][:] = out["new"].sum()
        return dict(out)


APPENDS = Signature(
    [TensorSpec("x", F32, (1,)), TensorSpec("past", F32, ("n",))],
    [TensorSpec("new", F32, ("m",)), TensorSpec("y", F32, (1,))],
    [{"n": DimRange(0, 2, 4)}],
)


def test_state_that_grows_lies_in_two_arrays() -> None:
    x, past = np.ones(1, np.float32), np.zeros(1, np.float32)
    assert state.grows(APPENDS, {"new": "past"})
    calls = Growing(Appends(), Binding({"x": x, "past": past}, {}, {"new": "past"}))
    places, results = [], []
    for k in (1, 2, 3):
        x[:] = k
        results.append(calls.run()["y"])
        assert calls.state["past"].tolist() == [0, *range(1, k + 1)]
        places.append(calls.state["past"].ctypes.data)
    assert places[0] == places[2] != places[1]
    assert results[0] is results[1] is results[2], "a result of the same size keeps its array"
    calls.reset()
    assert calls.state["past"].tolist() == [0]
    x[:] = 7
    assert calls.run()["y"].tolist() == [7]
    with pytest.raises(InputError, match="the state 'past' is int64"):
        calls.reset({"past": np.zeros(1, np.int64)})


# ---------------------------------------------------------------- times between events


class Driver:
    """Events that record a clock, which launches advance."""

    def __init__(self) -> None:
        self.now, self.live = 0.0, 0

    def cuEventCreate(self, flags: int) -> tuple[int, dict[str, float]]:
        self.live += 1
        return 0, {}

    def cuEventRecord(self, event: dict[str, float], stream: int) -> tuple[int]:
        event["at"] = self.now
        return (0,)

    def cuEventElapsedTime(self, a: dict[str, float], b: dict[str, float]) -> tuple[int, float]:
        return 0, b["at"] - a["at"]

    def cuEventDestroy(self, event: dict[str, float]) -> None:
        self.live -= 1


def test_times_are_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(graphs, "driver", lambda: driver)
    monkeypatch.setattr(graphs, "check", lambda call, result: result[1] if len(result) > 1 else None)
    stream: Any = SimpleNamespace(handle=1, synchronize=lambda: None)

    class Item:
        def __init__(self, ms: float):
            self.ms = ms

        def enqueue(self, handle: int) -> None:
            driver.now += self.ms

    monkeypatch.setattr("optdnn.runtime.cuda.launches.chain.ENQUEUED", (Item,))
    calls: list[str] = []
    items: list[Any] = [Item(2.0), lambda: calls.append("host"), Item(0.5)]
    times = timed(items, stream)
    assert times[::2] == [2_000_000, 500_000]
    assert times[1] >= 0
    assert calls == ["host", "host"], "once before the times are taken"
    assert driver.live == 0
    run = Item(3.0)
    assert graphs.time_runs(lambda: run.enqueue(0), stream, warmup=1, repeats=4, inner=2) == [3.0] * 4
    assert driver.live == 0
