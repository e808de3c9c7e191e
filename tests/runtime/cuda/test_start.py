"""Work that is begun early in the background. Its failures are reported only to those who need its result."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optdnn.errors import MissingDependency, RunError
from optdnn.runtime.cuda import device, start
from optdnn.runtime.cuda.libraries import find as libraries


def test_the_device_is_opened_in_the_background_and_its_failure_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def fails(index: int = 0) -> None:
        seen.append(threading.current_thread().name)
        raise RunError("no GPU")

    monkeypatch.setattr(device.Device, "open", fails)
    start.begin().join(10)
    assert seen == ["optdnn-cuda-start"]


@pytest.mark.parametrize(
    ("target", "gpus", "begun"),
    [("auto", 1, True), ("cuda", 1, True), ("cuda:sm_90a", 1, True), ("cuda:sm_80", 1, False), ("auto", 0, False)],
)
def test_the_trial_process_is_started_for_the_gpu_of_this_machine(
    target: str, gpus: int, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: gpus)
    monkeypatch.setattr(device, "arch_here", lambda: "sm_90a")
    process: Any = SimpleNamespace(begin=lambda: seen.append(threading.current_thread().name))
    seen: list[str] = []
    start.begin_trials(process, target).join(10)
    assert seen == ["optdnn-trials-start"] * begun


@pytest.mark.parametrize("gpus", [None, 0, 1])
def test_libraries_are_loaded_where_there_is_a_gpu(gpus: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    (math,) = {
        Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line
    }
    asked: list[str] = []

    def files(library: str) -> Any:
        for file in ("no such library.so", math, "never asked for"):
            asked.append(file)
            yield file

    def gpu_count() -> int:
        if gpus is None:
            raise MissingDependency("cuda-bindings", "cuda", "to run on an NVIDIA GPU")
        return gpus

    monkeypatch.setattr(device, "gpu_count", gpu_count)
    monkeypatch.setattr(libraries, "files", files)
    start.load_libraries("cudnn").join(10)
    assert asked == (["no such library.so", math] if gpus else [])
    assert ctypes.CDLL(math) is not None
