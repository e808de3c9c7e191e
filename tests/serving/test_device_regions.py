"""Memory of clients on GPUs, from its registration to the job of a worker. A stand-in for the worker needs no GPU."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="the extra serve is not installed")
from optdnn.ranges import DimRange
from optdnn.serving.core import Core
from optdnn.serving.facts import ModelFacts
from optdnn.serving.refusals import NotFound, Refusal
from optdnn.serving.regions import NamedPart, Regions
from optdnn.serving.repository import Model
from optdnn.serving.service import GivenTensor, InferCall, WantedOutput
from optdnn.serving.settings import ServeSettings
from optdnn.serving.tensors import DeviceSlice, DeviceTarget, Job
from optdnn.serving.workers.base import Instance, Outcome, Worker
from optdnn.types import BOOL, FP32, DType, TensorSpec

HANDLES = [base64.b64encode(bytes([k]) * 64).decode() for k in range(3)]


class _Gpu(Instance):
    """An instance that records its jobs and the handles to forget. Its outputs are zeros."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.forgotten: list[str] = []

    def start(self, job: Job, done: Callable[[Outcome], None]) -> None:
        self.jobs.append(job)
        done({"y": np.zeros((job.shapes["x"][1][0], 2), np.float32)})

    def forget(self, handles: Sequence[str]) -> None:
        self.forgotten += handles


class _Worker(Worker):
    def __init__(self, dtype: DType, on_gpu: bool):
        self.instances: tuple[_Gpu, ...] = (_Gpu(),)
        self._dtype, self._on_gpu = dtype, on_gpu

    async def ready(self) -> ModelFacts:
        x, y = TensorSpec("x", self._dtype, ("N", 2)), TensorSpec("y", FP32, ("N", 2))  # type: ignore[arg-type]
        return ModelFacts((x,), (y,), ({"N": DimRange(1, 2, 4)},), (), "cuda", "N", "", self._on_gpu)

    async def close(self) -> None:
        pass


def _served(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    use: Callable[[Core, _Gpu], Any],
    dtype: DType = FP32,
    on_gpu: bool = True,
) -> None:
    """Call ``use`` with the models of a server, and with the instance that runs the model m."""
    worker = _Worker(dtype, on_gpu)
    monkeypatch.setattr(Model, "_new_worker", lambda self, place: worker)
    (tmp_path / "m.engine").write_bytes(b"")

    async def main() -> None:
        core = Core(ServeSettings([tmp_path], shared_memory=True))
        await core.repository.start()
        await core.register_cuda("a", HANDLES[0], 0, 64)
        await use(core, worker.instances[0])
        await core.repository.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def _call(rows: int, kind: str = "FP32", nbytes: int | None = None, to: NamedPart | None = None) -> InferCall:
    size = rows * 2 * (1 if kind == "BOOL" else 4)
    part = NamedPart("a", 8, size if nbytes is None else nbytes)
    return InferCall("m", "", [GivenTensor("x", kind, [rows, 2], part)], [WantedOutput("y", to)])


def test_a_request_in_two_batches_names_the_rows_of_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def use(core: Core, gpu: _Gpu) -> None:
        await core.register_cuda("b", HANDLES[1], 0, 64)
        (answer,) = await core.infer(_call(6, to=NamedPart("b", 16, 48)))
        assert (answer.data, answer.shape) == (None, (6, 2))
        first, second = gpu.jobs
        assert first.parts == [("x", 0, DeviceSlice(HANDLES[0], 8, 32))]
        assert second.parts == [("x", 0, DeviceSlice(HANDLES[0], 40, 16))]
        whole = DeviceSlice(HANDLES[1], 16, 48)
        assert first.targets == [DeviceTarget("y", 0, 4, 0, whole)]
        assert second.targets == [DeviceTarget("y", 0, 2, 4, whole)]

    _served(monkeypatch, tmp_path, use)


def test_requests_that_are_refused_before_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def on_cpu(core: Core, gpu: _Gpu) -> None:
        with pytest.raises(Refusal, match="'m' takes no CUDA shared memory"):
            await core.infer(_call(2))
        assert not gpu.jobs

    async def of_bools(core: Core, gpu: _Gpu) -> None:
        with pytest.raises(Refusal, match="'x' is BOOL, which is not read from CUDA shared memory"):
            await core.infer(_call(2, "BOOL"))
        assert not gpu.jobs

    async def lies(core: Core, gpu: _Gpu) -> None:
        with pytest.raises(Refusal, match="input 'x' has 12 bytes; its shape"):
            await core.infer(_call(2, nbytes=12))
        with pytest.raises(Refusal, match="has 64 bytes, not 72"):
            await core.infer(_call(8))
        assert not gpu.jobs

    _served(monkeypatch, tmp_path, on_cpu, on_gpu=False)
    _served(monkeypatch, tmp_path, of_bools, dtype=BOOL)
    _served(monkeypatch, tmp_path, lies)


def test_a_handle_is_forgotten_with_its_last_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def use(core: Core, gpu: _Gpu) -> None:
        await core.register_cuda("again", HANDLES[0], 0, 8)
        await core.register_cuda("other", HANDLES[1], 1, 8)
        await core.unregister_cuda("a")
        assert gpu.forgotten == []
        await core.unregister_cuda("again")
        assert gpu.forgotten == [HANDLES[0]]
        await core.unregister_cuda("")
        assert gpu.forgotten == HANDLES[:2]

    _served(monkeypatch, tmp_path, use)


def test_regions_of_both_kinds_share_one_set_of_names() -> None:
    regions = Regions(enabled=True)
    regions.register_cuda("a", HANDLES[0], 3, 8)
    assert regions.cuda_status() == [{"name": "a", "device_id": 3, "byte_size": 8}]
    assert regions.status() == []
    with pytest.raises(NotFound):
        regions.status("a")
    regions.unregister("a")
    assert regions.unregister_cuda("unknown") == set()
    assert regions.unregister_cuda("a") == {HANDLES[0]}
    for wrong in (("a", None, 0, 8), ("a", "not base64!", 0, 8), ("a", HANDLES[0][:8], 0, 8), ("a", HANDLES[0], -1, 8)):
        with pytest.raises(Refusal):
            regions.register_cuda(*wrong)
    with pytest.raises(Refusal, match="takes no shared memory"):
        Regions(enabled=False).register_cuda("a", HANDLES[0], 0, 8)
