"""Data that all ranks exchange before NCCL starts, and collectives as calls: the parts that need no GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import optdnn
from optdnn.errors import EngineError, MissingDependency, RankError
from optdnn.runtime.cuda.collectives import communicator
from optdnn.runtime.cuda.collectives.communicator import Communicator
from optdnn.runtime.cuda.collectives.handle import Handle
from optdnn.runtime.cuda.collectives.peers import (
    ELEMENT_BYTES,
    FLAGGED,
    ONE_SHOT,
    WORLDS,
    Peers,
    packets_at,
    recipe_for,
    ways,
)
from optdnn.runtime.cuda.compile.nvrtc import resources
from optdnn.runtime.cuda.libraries.calls import Collective, from_plain, to_plain
from optdnn.runtime.ranks.exchange import Threads, together
from optdnn.runtime.ranks.group import Group, Hub, join


def of_both(work: Callable[[Group], Any]) -> list[Any]:
    """The results of ``work`` on two ranks, or the errors that it raises."""
    hub = Hub(2)
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        group = join(hub.address, 1, 2, hub.token) if rank else hub.accept(limit=10)
        try:
            found[rank] = work(group)
        except Exception as error:
            found[rank] = error
        group.close()

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    return found


class FakeDevice:
    """GPUs 0 and 1 on different buses."""

    def __init__(self, index: int):
        self.index, self.place = index, f"0000:0{index}:00.0"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs with peer access. Ranks are threads here, so the GPU of a rank is the one that its thread has chosen."""
    state = SimpleNamespace(count=2, access=1, visible=("0000:00:00.0", "0000:01:00.0"), same=False)
    chosen = threading.local()
    results = SimpleNamespace(CUDA_SUCCESS=0)
    cu = SimpleNamespace(
        CUresult=results,
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetByPCIBusId=lambda bus: (0, 1) if bus.decode() in state.visible else (101, 0),
        cuDeviceCanAccessPeer=lambda own, other: (0, state.access),
    )
    monkeypatch.setattr(communicator, "driver", lambda: cu)
    monkeypatch.setattr(communicator, "check", lambda call, result: result[1])
    monkeypatch.setattr(communicator, "gpu_count", lambda: state.count)
    monkeypatch.setattr(communicator, "choose", lambda index: setattr(chosen, "index", 0 if state.same else index))
    monkeypatch.setattr(communicator, "Device", SimpleNamespace(open=lambda: FakeDevice(chosen.index)))
    monkeypatch.setattr(communicator, "bindings", lambda: "nccl")
    return state


def devices() -> list[Any]:
    return of_both(lambda group: communicator._device(group, group.rank))


def test_two_gpus_that_work_together(gpus: SimpleNamespace) -> None:
    assert [device.index for device, _ in devices()] == [0, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": 1}, "rank 1 is to run on GPU 1; .* has 1"),
        ({"access": 0}, "GPUs of ranks 0 and 1, .* have no access to each other's memory"),
        ({"visible": ()}, r"rank 0 does not see the GPU 0000:01:00\.0 of rank 1"),
        ({"same": True}, "ranks 0 and 1 are on the same GPU"),
    ],
)
def test_every_rank_learns_why_the_gpus_do_not_fit(gpus: SimpleNamespace, change: dict[str, Any], said: str) -> None:
    vars(gpus).update(change)
    for error in devices():
        with pytest.raises(RankError, match=said):
            raise error


def test_fewer_gpus_than_ranks(gpus: SimpleNamespace) -> None:
    communicator.check_gpus(2)
    with pytest.raises(
        RankError, match="the engine is for 3 GPUs; this machine has 2\n  hint: build it with --devices 2"
    ):
        communicator.check_gpus(3)


def test_nccl_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(communicator.importlib, "import_module", absent)
    with pytest.raises(MissingDependency, match=r"nccl4py is needed to run on several GPUs(?s:.*)optdnn\[multi-gpu\]"):
        communicator.bindings()


def test_a_kernel_that_gave_up_and_aborts() -> None:
    one = object.__new__(Communicator)
    aborted: list[Any] = []
    graphs_end = threading.Event()

    def abort(handle: str) -> None:
        aborted.append(handle)
        graphs_end.wait()  # NCCL does the same

    failed: list[str] = []
    one.group = SimpleNamespace(rank=0, world=2, fail=failed.append)  # type: ignore[assignment]
    one._word = SimpleNamespace(bytes=np.zeros(4, np.uint8))  # type: ignore[assignment]
    one._comm, one._prepared = Handle(lambda: "handle", abort), {}
    one._closing, one._closed = threading.Lock(), False
    one.check()
    one.word[:] = 2
    with pytest.raises(RankError, match="rank 0 waited for rank 1 for more than 60 s"):
        one.check()
    assert failed
    one.abort()
    assert one.word[0] == 255
    one.word[:] = 7
    one.abort()
    one.close()
    assert one.word[0] == 7, "its memory may be gone"
    graphs_end.set()
    assert one._comm._done.wait(10)
    assert aborted == ["handle"]
    with pytest.raises(RankError, match="rank 0 has left the others"):
        one.check()
    with pytest.raises(RankError, match="is for 4 ranks; 2 run"):
        one.prepare(Collective("float16", "reduce", 8, 4))


def test_calls_of_collectives_are_checked() -> None:
    call = Collective("float16", "gather", 8, 4)
    assert from_plain(to_plain(call)) == call
    assert call.extents == {"x": 16, "y": 64}
    assert Collective("float32", "reduce", 8, 2).extents == {"x": 32, "y": 32}
    for change in ({"dtype": "int8"}, {"kind": "scatter"}, {"count": 0}, {"world": 1}, {"world": 65}, {"world": "2"}):
        with pytest.raises(EngineError):
            from_plain({**to_plain(call), **change})


def test_inboxes_have_separate_pages() -> None:
    for world in WORLDS:
        assert Peers.size(world) % (1 << 21) == 0
        assert packets_at(world) >= world * 2 * ONE_SHOT
        assert Peers.size(world) - packets_at(world) >= world * 2 * 2 * FLAGGED


def test_kernels_are_for_small_arrays() -> None:
    for dtype, size in ELEMENT_BYTES.items():
        for kind, count, offered in (
            ("reduce", FLAGGED // size, ["flagged", "one_shot"]),
            ("reduce", FLAGGED // size + 1, ["one_shot"]),
            ("reduce", ONE_SHOT // size + 1, []),
            ("gather", FLAGGED // size, ["flagged"]),
            ("gather", FLAGGED // size + 1, []),
        ):
            assert ways(Collective(dtype, kind, count, 2)) == offered


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_the_kernels_compile(dtype: str) -> None:
    for world, arch in ((8, "sm_90a"), (4, "sm_80")):
        for way, kind in (("one_shot", "reduce"), ("flagged", "reduce"), ("flagged", "gather")):
            recipe = recipe_for(way, Collective(dtype, kind, 8, world), arch)
            (found,) = resources(recipe).values()
            if way == "flagged":
                assert found.spill_bytes == found.stack_bytes == 0


GATHERS = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
    agraph (float[2, 3, 4] x) => (float[4, 3, 4] a, float[2, 6, 4] b, float[2, 3, 8] c, float[3, 2, 4] d) {
      z = Relu (x)
      a = com.microsoft.AllGather <group_size = 2, axis = 0> (z)
      b = com.microsoft.AllGather <group_size = 2, axis = 1> (z)
      c = com.microsoft.AllGather <group_size = 2, axis = -1> (z)
      t = Transpose <perm = [1, 0, 2]> (z)
      d = com.microsoft.AllReduce <group_size = 2> (t)
    }"""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_programs_gather_along_every_axis(precision: str) -> None:
    engine = optdnn.build(onnx.parser.parse_model(GATHERS), target="simulate", precision=precision)
    given = [np.random.default_rng(r).uniform(0, 1, (2, 3, 4)).astype(np.float32) for r in range(2)]
    runs = [lambda x=x: engine.context().run({"x": x}) for x in given]
    for found in together(runs, Threads(2)):
        for axis, name in enumerate("abc"):
            np.testing.assert_allclose(found[name], np.concatenate(given, axis), rtol=2e-3)
        np.testing.assert_allclose(found["d"], sum(given).transpose(1, 0, 2), rtol=4e-3)
