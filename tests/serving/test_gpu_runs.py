"""Runs of a worker on a GPU: copies, their streams, and the memory that is page-locked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="the extra serve is not installed")
from onnx import TensorProto, helper
from support.needs import why_no_hopper

import optdnn
from optdnn.serving.workers.child import Instance
from optdnn.serving.workers.gpu import KEPT, GpuRuns, usable
from optdnn.serving.workers.memory import SharedMemory, layout_of, new_file
from optdnn.serving.workers.messages import layout_from, pair, plain_layout
from optdnn.types import FP16, FP32


class _Pointer:
    """Memory of a stand-in for an array on the GPU."""

    def __init__(self, array: np.ndarray[Any, Any], log: list[str]):
        self.array, self.log = array, log

    def copy_from_host_async(self, address: int, nbytes: int, stream: Any) -> None:
        self.log.append(f"in {nbytes} {stream.name}")
        self.array.reshape(-1).view(np.uint8)[:] = np.ctypeslib.as_array((_BYTE * nbytes).from_address(address))

    def copy_to_host_async(self, address: int, nbytes: int, stream: Any) -> None:
        self.log.append(f"out {nbytes} {stream.name}")
        np.ctypeslib.as_array((_BYTE * nbytes).from_address(address))[:] = self.array.reshape(-1).view(np.uint8)


_BYTE = np.ctypeslib.as_ctypes_type(np.uint8)


class _OnGpu:
    def __init__(self, array: np.ndarray[Any, Any], log: list[str]):
        self.array, self.data, self.dtype, self.shape = array, _Pointer(array, log), array.dtype, array.shape


class _Context:
    """Doubles ``x``; the size of ``places`` depends on data, so it comes as a NumPy array."""

    takes_device_arrays = True

    def __init__(self, log: list[str]):
        self.log = log

    def run(self, feeds: dict[str, Any], out: dict[str, Any] | None, stream: Any) -> dict[str, Any]:
        self.log.append(f"run {'new' if out is None else 'old'} {stream.name}")
        x = feeds["x"].array
        y = _OnGpu(np.empty_like(x), self.log) if out is None else out["y"]
        y.array[...] = 2 * x
        return {"y": y, "places": np.flatnonzero(x)}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the stand-in for CuPy."""
    asked: list[str] = []
    stream = SimpleNamespace(name="own", synchronize=lambda: asked.append("wait"))
    runtime = SimpleNamespace(
        hostRegister=lambda at, nbytes, flags: asked.append(f"lock {nbytes}"),
        hostUnregister=lambda at: asked.append("unlock"),
    )
    cuda = SimpleNamespace(runtime=runtime, Stream=lambda non_blocking: stream)
    cupy = SimpleNamespace(cuda=cuda, empty=lambda shape, dtype: _OnGpu(np.zeros(shape, dtype), asked))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return asked


def _run(runs: GpuRuns, memories: list[SharedMemory], x: np.ndarray[Any, Any]) -> dict[str, Any]:
    feeds = memories[0].arrays(layout_of({"x": (x.dtype, x.shape)}))
    feeds["x"][...] = x
    results = runs.run(feeds)
    targets = memories[1].arrays(layout_of({n: (a.dtype, a.shape) for n, a in results.items()}))
    runs.copy_out(results, targets)
    return targets


def test_a_run_copies_from_and_to_the_shared_memory(log: list[str]) -> None:
    memories = [SharedMemory(new_file()) for _ in range(2)]
    context: Any = _Context(log)
    runs = GpuRuns(context, *memories)
    for turn in range(2):
        found = _run(runs, memories, np.float32([[0, turn + 1, 3]]))
        assert found["y"].tolist() == [[0, 2 * turn + 2, 6]]
        assert found["places"].tolist() == [1, 2]
    first = ["lock 65536", "in 12 own", "run new own", "lock 65536", "out 12 own", "wait"]
    assert log == [*first, "in 12 own", "run old own", "out 12 own", "wait"]


def test_memory_that_grows_is_locked_again(log: list[str]) -> None:
    memories = [SharedMemory(new_file()) for _ in range(2)]
    context: Any = _Context(log)
    runs = GpuRuns(context, *memories)
    for rows in (1, 20000, 1):
        x = np.ones((rows, 1), np.float32)
        np.testing.assert_array_equal(_run(runs, memories, x)["y"], 2 * x)
    assert [t for t in log if "lock" in t][:4] == ["lock 65536", "lock 65536", "unlock", "lock 131072"]
    assert log.count("unlock") == 2


def test_few_shapes_keep_their_memory(log: list[str]) -> None:
    memories = [SharedMemory(new_file()) for _ in range(2)]
    context: Any = _Context(log)
    runs = GpuRuns(context, *memories)
    for rows in (*range(1, KEPT + 2), 1):
        _run(runs, memories, np.ones((rows, 1), np.float32))
    assert "run old own" not in log, "the memory of the first shape went"


def test_where_runs_take_numpy_arrays_instead(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = _Context(log)
    assert usable(context, {FP16, FP32})
    assert not usable(context, {FP32, np.dtype(ml_dtypes.bfloat16)})
    host: Any = SimpleNamespace(takes_device_arrays=False)
    assert not usable(host, {FP32})
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not usable(context, {FP32})


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
def test_an_instance_on_a_gpu() -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    engine = optdnn.build(model, target="cuda", shapes={"x": ((1, 3), (4, 3), (4000, 3))})
    memory = [new_file() for _ in range(2)]
    instance = Instance(engine, pair()[1], (memory[0], memory[1]))
    assert instance._gpu is not None
    ours = [SharedMemory(m) for m in memory]
    for rows in (2, 4, 4000, 2):
        x = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
        layout = layout_of({"x": (FP32, x.shape)})
        ours[0].arrays(layout)["x"][...] = x
        answer = instance._run({"inputs": plain_layout(layout), "rows": rows, "regions": []})
        np.testing.assert_array_equal(ours[1].arrays(layout_from(answer))["y"], np.maximum(x, 0))
