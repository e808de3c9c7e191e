"""Workers and their memory without a server: the data of regions, and lost workers."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="the extra serve is not installed")
from optdnn.errors import OptdnnError
from optdnn.serving.facts import ModelFacts
from optdnn.serving.metrics import Metrics
from optdnn.serving.refusals import Refusal, Unavailable
from optdnn.serving.repository import Model
from optdnn.serving.settings import ServeSettings
from optdnn.serving.tensors import Job, RegionSlice, fill
from optdnn.serving.workers.base import Worker
from optdnn.serving.workers.messages import pair
from optdnn.serving.workers.process import ProcessInstance, ProcessWorker
from optdnn.types import BOOL, FP32, TensorSpec


def test_a_region_with_bytes_that_are_no_bool_and_a_pipe_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optdnn.serving.tensors.SHARED", str(tmp_path))
    (tmp_path / "flags").write_bytes(bytes([0, 1, 2]))
    os.mkfifo(tmp_path / "pipe")
    target = {"flag": np.zeros(2, BOOL)}
    fill(target, [("flag", 0, RegionSlice("flags", 0, 2))])
    assert target["flag"].tolist() == [False, True]
    with pytest.raises(Refusal, match="'flag' holds bytes that are not 0 or 1"):
        fill(target, [("flag", 0, RegionSlice("flags", 1, 2))])
    with pytest.raises(Refusal, match="'pipe' cannot be read"):
        fill(target, [("flag", 0, RegionSlice("pipe", 0, 2))])


def test_a_message_that_is_too_long_does_not_end_the_worker() -> None:
    lost: list[bool] = []
    ours, theirs = pair()
    instance = ProcessInstance(ours, lambda: lost.append(True))
    parts = [("x", k, RegionSlice("k" * 200, 4 * k, 4)) for k in range(6000)]
    with pytest.raises(OSError, match=os.strerror(errno.EMSGSIZE)):
        instance.start(Job({"x": (FP32, (6000,))}, 6000, list(parts)), lambda outcome: None)
    assert not lost
    theirs.close()
    instance.start(Job({"x": (FP32, (1,))}, 1), lambda outcome: None)
    assert lost
    instance.close()


def test_a_worker_whose_server_is_gone_says_nothing(tmp_path: Path) -> None:
    ours, theirs = pair()
    ours.close()
    order = {"engine": str(tmp_path / "none.engine"), "options": {}, "instances": [[theirs.fileno(), -1, -1]]}
    command = [sys.executable, "-c", "from optdnn.serving.workers.child import main; main()", json.dumps(order)]
    done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=60)
    theirs.close()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_if_no_process_can_be_started_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("optdnn.serving.workers.process.subprocess.Popen", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Unavailable, match="no worker process can be started: Resource temporarily"):
        ProcessWorker(Path("m.engine"), {}, 2, {}, lambda worker: None)
    assert os.listdir("/proc/self/fd") == before


class Loading(Worker):
    """A worker that is ready when the test sets ``allowed``. ``lost``: it died before the others were ready."""

    def __init__(self, error: OptdnnError | None = None):
        self.instances = ()
        self.allowed, self.closed, self._error = asyncio.Event(), False, error

    async def ready(self) -> ModelFacts:
        await self.allowed.wait()
        if self._error is not None:
            raise self._error
        spec = TensorSpec("x", FP32, (2,))
        return ModelFacts((spec,), (spec,), (), (), "cpu", None, "")

    async def close(self) -> None:
        self.closed = True


def loading(monkeypatch: pytest.MonkeyPatch, *workers: Loading) -> Model:
    """A model that gets these workers."""
    waiting = list(workers)
    monkeypatch.setattr(Model, "_new_worker", lambda self, place: waiting.pop(0))
    return Model("m", Path("m.engine"), ServeSettings([], workers=2), Metrics())


def test_a_worker_that_dies_while_others_load_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        first, second, third = workers = [Loading(), Loading(), Loading()]
        model = loading(monkeypatch, *workers)
        task = asyncio.create_task(model.load())
        first.allowed.set()
        await asyncio.sleep(0)
        first.lost = True
        model._lost(0, first)
        for worker in (second, third):
            worker.allowed.set()
        await task
        while model._workers.get(0) is not third:
            await asyncio.sleep(0)
        assert first.closed
        await model.close()
        assert second.closed

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_engine_that_cannot_be_loaded_leaves_no_worker_and_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        first, second = Loading(Unavailable("it is broken")), Loading()
        first.allowed.set()
        with pytest.raises(Unavailable, match="it is broken"):
            await loading(monkeypatch, first, second).load()
        assert first.closed
        assert second.closed
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
