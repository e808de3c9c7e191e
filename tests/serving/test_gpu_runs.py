"""Runs of a worker on a GPU: copies, their streams, and page-locked memory."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("orjson", reason="the extra serve is not installed")
pytest.importorskip("prometheus_client", reason="the extra serve is not installed")
from onnx import TensorProto, helper
from support.serving import served

import optdnn
from optdnn.serving.frontends.arena import Arena, new_arena
from optdnn.serving.refusals import Refusal
from optdnn.serving.tensors import ARENA_KEPT, DeviceSlice, DeviceTarget, Job, RegionSlice
from optdnn.serving.workers.child import Instance
from optdnn.serving.workers.device_memory import DeviceRegions
from optdnn.serving.workers.gpu import KEPT, GpuRuns, usable
from optdnn.serving.workers.memory import SharedMemory, layout_of, new_file
from optdnn.serving.workers.messages import device_from, job_message, layout_from, pair, plain_layout
from optdnn.types import BOOL, FP16, FP32


class _Pointer:
    """A stand-in for the memory of an array on the GPU, from the byte ``first`` on."""

    def __init__(self, array: np.ndarray[Any, Any], log: list[str], first: int = 0):
        self.array, self.log, self.first = array, log, first

    def __add__(self, count: int) -> _Pointer:
        return _Pointer(self.array, self.log, self.first + count)

    def bytes(self, nbytes: int) -> np.ndarray[Any, Any]:
        return self.array.reshape(-1).view(np.uint8)[self.first : self.first + nbytes]

    def copy_from_host_async(self, address: int, nbytes: int, stream: Any) -> None:
        self.log.append(f"in {nbytes} {stream.name}")
        self.bytes(nbytes)[:] = np.ctypeslib.as_array((_BYTE * nbytes).from_address(address))

    def copy_from_device_async(self, source: _Pointer, nbytes: int, stream: Any) -> None:
        self.log.append(f"across {nbytes} {stream.name}")
        self.bytes(nbytes)[:] = source.bytes(nbytes)

    def copy_to_host_async(self, address: int, nbytes: int, stream: Any) -> None:
        self.log.append(f"out {nbytes} {stream.name}")
        np.ctypeslib.as_array((_BYTE * nbytes).from_address(address))[:] = self.bytes(nbytes)


_BYTE = np.ctypeslib.as_ctypes_type(np.uint8)


class _OnGpu:
    def __init__(self, array: np.ndarray[Any, Any], log: list[str]):
        self.array, self.data, self.dtype, self.shape = array, _Pointer(array, log), array.dtype, array.shape

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        return self.array[rows]

    def __setitem__(self, rows: slice, value: np.ndarray[Any, Any]) -> None:
        self.data.log.append("pad")
        self.array[rows] = value


class _Context:
    """A context that doubles ``x``. The size of ``places`` depends on data, so it is a NumPy array."""

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
    stream = MagicMock(synchronize=lambda: asked.append("wait"))
    stream.name = "own"
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


def test_runs_that_take_numpy_arrays_instead(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = _Context(log)
    assert usable(context, {FP16, FP32})
    assert not usable(context, {FP32, np.dtype(ml_dtypes.bfloat16)})
    host: Any = SimpleNamespace(takes_device_arrays=False)
    assert not usable(host, {FP32})
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not usable(context, {FP32})


class _Clients:
    """A stand-in for memory of clients on the GPU. Each handle has some floats. Opened and closed handles are counted."""

    def __init__(self, log: list[str]):
        self.memory: dict[bytes, np.ndarray[Any, Any]] = {}
        self.log, self.open, self.opened = log, 0, 0
        self.regions = DeviceRegions(self._opened, self._closed)

    def _opened(self, handle: bytes) -> tuple[Any, int]:
        if handle not in self.memory:
            raise Refusal("the CUDA memory of a region cannot be opened")
        self.open, self.opened = self.open + 1, self.opened + 1
        return _Pointer(self.memory[handle], self.log), self.memory[handle].nbytes

    def _closed(self, pointer: Any) -> None:
        self.open -= 1

    def put(self, values: list[float]) -> DeviceSlice:
        handle = bytes([len(self.memory)]) * 64
        self.memory[handle] = np.float32(values)
        return DeviceSlice(base64.b64encode(handle).decode(), 0, 4 * len(values))


@pytest.fixture
def on_gpu(log: list[str]) -> tuple[GpuRuns, list[SharedMemory], _Clients]:
    """Runs of an engine, the two memories of its worker, and memory of clients."""
    memories = [SharedMemory(new_file()) for _ in range(2)]
    context: Any = _Context(log)
    runs, clients = GpuRuns(context, *memories), _Clients(log)
    runs.opened = clients.regions
    return runs, memories, clients


def _batch(
    on_gpu: tuple[GpuRuns, list[SharedMemory], _Clients],
    size: int,
    rows: int,
    host: dict[int, float],
    parts: list[tuple[int, DeviceSlice]],
    wanted: list[DeviceTarget],
) -> np.ndarray[Any, Any]:
    """The output memory, which was -1, after a batch of ``rows`` rows with one number each."""
    runs, memories, _ = on_gpu
    x = memories[0].arrays(layout_of({"x": (FP32, (size, 1))}))
    x["x"][...] = 0
    for row, value in host.items():
        x["x"][row] = value
    results = runs.run(x, [("x", row, part) for row, part in parts], rows)
    targets = memories[1].arrays(layout_of({n: (a.dtype, a.shape) for n, a in results.items()}))
    targets["y"][...] = -1
    runs.copy_out(results, targets, wanted, rows)
    return targets["y"][:, 0].copy()


def test_memory_of_clients_is_read_and_written_on_the_gpu(
    on_gpu: tuple[GpuRuns, list[SharedMemory], _Clients], log: list[str]
) -> None:
    clients = on_gpu[2]
    given, wanted = clients.put([1, 2, 3]), clients.put([0, 0, 0])
    whole = DeviceTarget("y", 0, 3, 0, wanted)
    found = _batch(on_gpu, 4, 3, {}, [(0, given)], [whole])
    assert clients.memory[bytes([1]) * 64].tolist() == [2, 4, 6]
    assert found.tolist() == [-1] * 4, "an output that nobody wants on the host is not copied"
    assert "in 16 own" not in log
    assert log.count("pad") == 1


def test_a_batch_of_requests_on_the_gpu_and_on_the_host(on_gpu: tuple[GpuRuns, list[SharedMemory], _Clients]) -> None:
    clients = on_gpu[2]
    given, wanted = clients.put([1, 2, 3]), clients.put([0, 0, 0])
    part = DeviceSlice(given.handle, 4, 8)
    later = DeviceTarget("y", 1, 2, 1, wanted)  # the second piece of a request, after one row of another request
    found = _batch(on_gpu, 4, 3, {0: 7}, [(1, part)], [later])
    assert found.tolist() == [14, 4, 6, 6], "the last row is padded with the one before it"
    assert clients.memory[bytes([1]) * 64].tolist() == [0, 4, 6]


def test_memory_is_opened_once_and_closed_when_it_is_forgotten(
    on_gpu: tuple[GpuRuns, list[SharedMemory], _Clients],
) -> None:
    runs, _, clients = on_gpu
    given = clients.put([1, 2])
    for _ in range(3):
        _batch(on_gpu, 2, 2, {}, [(0, given)], [])
    assert (clients.open, clients.opened) == (1, 1)
    runs.opened.close([given.handle, "unknown"])
    assert clients.open == 0
    _batch(on_gpu, 2, 2, {}, [(0, given)], [])
    assert clients.opened == 2


def test_unknown_handles_and_wrong_sizes_are_refused(
    on_gpu: tuple[GpuRuns, list[SharedMemory], _Clients], log: list[str]
) -> None:
    clients = on_gpu[2]
    given = clients.put([1, 2])
    nothing = DeviceSlice(base64.b64encode(b"n" * 64).decode(), 0, 8)
    with pytest.raises(Refusal, match="cannot be opened"):
        _batch(on_gpu, 2, 2, {}, [(0, nothing)], [])
    with pytest.raises(Refusal, match="has 8 bytes, not 12"):
        _batch(on_gpu, 2, 2, {}, [(0, DeviceSlice(given.handle, 4, 8))], [])
    with pytest.raises(Refusal, match="an output has 8 bytes; its region has 4"):
        _batch(on_gpu, 2, 2, {}, [(0, given)], [DeviceTarget("y", 0, 2, 0, DeviceSlice(given.handle, 0, 4))])
    assert log[-1] == "wait", "no copy is in progress when the refusal is raised"


def test_a_message_names_memory_on_the_gpu() -> None:
    part, target = DeviceSlice("aGFuZGxl", 4, 8), DeviceTarget("y", 1, 2, 3, DeviceSlice("b3RoZXI=", 0, 16))
    job = Job({"x": (FP32, (4, 1))}, 3, [("x", 1, part), ("x", 0, np.zeros((1, 1), np.float32))], [target])
    message = json.loads(json.dumps(job_message(job, layout_of(job.shapes))))
    assert device_from(message) == ([("x", 1, part)], [target])
    assert message["regions"] == []


def test_requests_of_front_ends_are_read_in_place(
    on_gpu: tuple[GpuRuns, list[SharedMemory], _Clients], log: list[str]
) -> None:
    runs = on_gpu[0]
    arena = Arena(new_arena())
    held = [arena.put(memoryview(np.float32(values).view(np.uint8).data)) for values in ([1, 2], [3])]
    parts = [RegionSlice(arena.descriptor, arena.place(part) or 0, part.nbytes) for part in held]
    assert all(runs.reads(part, FP32) for part in parts)
    given: Any = [(0, parts[0]), (2, parts[1])]
    assert _batch(on_gpu, 4, 3, {}, given, []).tolist() == [2, 4, 6, 6]
    assert "in 8 own" in log
    assert "in 16 own" not in log, "the input memory is not copied"
    assert log.count(f"lock {ARENA_KEPT}") == 1
    assert not runs.reads(parts[0], BOOL), "a bool's bytes are looked at first"
    assert not runs.reads(RegionSlice(arena.descriptor, ARENA_KEPT - 4, 8), FP32), "these pages may be given back"
    assert not runs.reads(RegionSlice("of a client", 0, 8), FP32)


def test_an_instance_reads_each_part_in_place(log: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A batch of three requests: one in a client's file, one in an arena, and one on the GPU, where its output goes too."""
    monkeypatch.setattr("optdnn.serving.tensors.SHARED", str(tmp_path))
    (tmp_path / "file").write_bytes(np.float32([7]).tobytes())
    arena, clients = Arena(new_arena()), _Clients(log)
    held = arena.put(memoryview(np.float32([8]).view(np.uint8).data))
    given, wanted = clients.put([9]), clients.put([0])
    memory = (new_file(), new_file())
    engine: Any = SimpleNamespace(context=lambda: _Context(log), inputs=(), outputs=())
    instance = Instance(engine, pair()[1], memory)
    assert instance._gpu is not None
    instance._gpu.opened = clients.regions
    parts: Any = [("x", 0, RegionSlice("file", 0, 4)), ("x", 1, RegionSlice(arena.descriptor, 0, 4)), ("x", 2, given)]
    layout = layout_of({"x": (FP32, (4, 1))})
    job = Job({"x": (FP32, (4, 1))}, 3, parts, [DeviceTarget("y", 2, 1, 0, wanted)])
    ours = [SharedMemory(m) for m in memory]
    ours[0].arrays(layout)
    answer = instance._run(json.loads(json.dumps(job_message(job, layout))))
    assert ours[1].arrays(layout_from(answer))["y"][:, 0].tolist() == [14, 16, 18, 18]
    assert clients.memory[bytes([1]) * 64].tolist() == [18]
    assert held.nbytes == 4


def test_an_arena_that_cannot_be_locked_is_copied(
    on_gpu: tuple[GpuRuns, list[SharedMemory], _Clients], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    runtime = sys.modules["cupy"].cuda.runtime

    def refuse(at: int, nbytes: int, flags: int) -> None:
        raise MemoryError("too much is locked")

    monkeypatch.setattr(runtime, "hostRegister", refuse)
    monkeypatch.setattr(runtime, "CUDARuntimeError", MemoryError, raising=False)
    part = RegionSlice(new_arena(), 0, 8)
    assert not on_gpu[0].reads(part, FP32)
    assert not on_gpu[0].reads(part, FP32)
    assert [r.message for r in caplog.records] == [
        "requests of a front end are copied once more, since its memory cannot be page-locked: too much is locked"
    ]


@pytest.mark.hopper
@pytest.mark.parametrize("frontends", [0, 1])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_memory_of_another_process_on_a_gpu(tmp_path: Path, protocol: str, frontends: int) -> None:
    import cupy

    module = pytest.importorskip(f"tritonclient.{protocol}")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    optdnn.build(model, target="cuda", shapes={"x": ((1, 3), (4, 3), (8, 3))}).save(tmp_path / "relu.engine")
    rows = np.random.default_rng(0).standard_normal((11, 3)).astype(np.float32)  # two batches of the engine
    memory = cupy.cuda.Memory(4 << 20)  # a separate allocation, not a piece of a pool
    region = cupy.ndarray((22, 3), np.float32, cupy.cuda.MemoryPointer(memory, 0))
    region[:11], region[11:] = cupy.asarray(rows), -1
    cupy.cuda.Device().synchronize()
    handle = base64.b64encode(cupy.cuda.runtime.ipcGetMemHandle(memory.ptr))
    with (
        served(tmp_path, "--shared-memory", "--frontends", frontends) as server,
        module.InferenceServerClient(getattr(server, protocol)) as client,
    ):
        client.register_cuda_shared_memory("region", handle, 0, 2 * rows.nbytes)
        assert "region" in str(client.get_cuda_shared_memory_status())
        i, o = module.InferInput("x", [11, 3], "FP32"), module.InferRequestedOutput("y")
        i.set_shared_memory("region", rows.nbytes)
        o.set_shared_memory("region", rows.nbytes, offset=rows.nbytes)
        for _ in range(2):
            client.infer("relu", [i], outputs=[o])
            np.testing.assert_array_equal(cupy.asnumpy(region[11:]), np.maximum(rows, 0))
            region[11:] = -1
            cupy.cuda.Device().synchronize()
        answer = client.infer("relu", [i]).as_numpy("y")
        np.testing.assert_array_equal(answer, np.maximum(rows, 0))
        sent = module.InferInput("x", [11, 3], "FP32")
        sent.set_data_from_numpy(rows)
        np.testing.assert_array_equal(client.infer("relu", [sent]).as_numpy("y"), np.maximum(rows, 0))
        client.unregister_cuda_shared_memory("region")
        with pytest.raises(Exception, match="not registered"):
            client.infer("relu", [i])
        client.register_cuda_shared_memory("nothing", base64.b64encode(bytes(range(64))), 0, rows.nbytes)
        i.set_shared_memory("nothing", rows.nbytes)
        with pytest.raises(Exception, match="cannot be opened"):
            client.infer("relu", [i])
        client.register_cuda_shared_memory("lies", handle, 0, 1 << 40)
        i.set_shared_memory("lies", rows.nbytes, offset=1 << 39)
        with pytest.raises(Exception, match="CUDA memory of a region has"):
            client.infer("relu", [i])
        assert len(server.workers()) == 1
        assert server.metric("optdnn_workers_lost_total") == 0


@pytest.mark.hopper
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
