"""Fences around the memory of candidates, in host memory: the writes that break them, and the resulting errors of a trial."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from support.net import Net
from support.simulated import lowered

from optdnn.errors import EngineError, RunError
from optdnn.runtime.cuda import allocator as memory
from optdnn.runtime.cuda import device
from optdnn.runtime.cuda.trials import check, timer
from optdnn.runtime.cuda.trials.check import FENCE, FencedArena
from optdnn.runtime.cuda.trials.timer import GpuTimer, KernelHangs, MemoryCorrupted, TrialFailed
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver whose device memory is host memory."""
    held: list[Any] = []

    def allocate(size: int) -> tuple[int, int]:
        held.append(ctypes.create_string_buffer(size))
        return 0, ctypes.addressof(held[-1])

    def fill(pointer: int, byte: int, size: int) -> tuple[int]:
        ctypes.memset(pointer, byte, size)
        return (0,)

    def download(target: int, source: int, size: int) -> tuple[int]:
        ctypes.memmove(target, source, size)
        return (0,)

    fake = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuMemAlloc=allocate, cuMemFree=lambda pointer: (0,), cuMemsetD8=fill,
        cuMemcpyDtoH=download, cuStreamSynchronize=lambda stream: (0,), cuCtxSynchronize=lambda: (0,),
    )  # fmt: skip
    for module in (check, device, memory):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(device, "_facts_here", lambda: None)


@pytest.mark.parametrize("size", [0, 100, 4096])
def test_a_byte_beside_the_arena_or_a_buffer_is_seen(size: int) -> None:
    arena = FencedArena(size)
    own = arena.own(size, "a buffer")
    arena.fill(0xFF)
    for at in (arena.pointer, own.pointer):
        for place in (-FENCE, -1, size, size + FENCE - 1):
            assert arena.intact(0xFF)
            ctypes.memset(at + place, 0, 1)
            assert not arena.intact(0xFF)
            arena.fill(0xFF)
        if size:
            ctypes.memset(at, 0, size)
    assert arena.intact(0xFF), "what lies between the fences may change"


def program() -> Program:
    n = Net()
    return lowered(n.done(n.op("Tanh", n.input(2, 8))))


class Trial(GpuTimer):
    """A timer whose candidates run ``does`` when they are checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, does: Any):
        self.does, self.lost = does, False
        self.stream = SimpleNamespace(synchronize=self.synchronize)  # type: ignore[assignment]
        monkeypatch.setattr(timer, "CudaRunner", self.runner)

    def runner(self, program: Program, options: LoadOptions) -> Any:
        assert options.trust_cubins
        return SimpleNamespace(context=lambda arena: arena)

    def synchronize(self) -> None:
        if self.lost:
            raise RunError("an illegal memory access was encountered")

    def _check(self, key: str, program: Program, context: Any) -> None:
        self.does(self, context)

    def _seconds(self, program: Program, context: Any, cold: bool, give_up: float) -> float:
        return 1e-6


def strays(arena: FencedArena) -> None:
    ctypes.memset(arena.own(64, "a result").pointer + 64, 0, 4)


def raising(error: Exception, *, stray: bool = False, lost: bool = False) -> Any:
    def does(self: Trial, arena: FencedArena) -> None:
        self.lost = lost
        if stray:
            strays(arena)
        raise error

    return does


@pytest.mark.parametrize(
    ("does", "error", "reported"),
    [
        (lambda self, arena: strays(arena), MemoryCorrupted, "it writes outside of its buffers"),
        (raising(TrialFailed("wrong result")), TrialFailed, "wrong result"),
        (raising(TrialFailed("wrong result"), stray=True), MemoryCorrupted, "it writes outside of its buffers"),
        (raising(RunError("no room")), TrialFailed, "no room"),
        (raising(RunError("no plan"), stray=True), MemoryCorrupted, "it writes outside of its buffers"),
        (raising(RunError("launch failed"), lost=True), RunError, "an illegal memory access"),
        (raising(KernelHangs("it has not ended")), KernelHangs, "it has not ended"),
        (raising(EngineError("refused")), EngineError, "refused"),
    ],
)
def test_a_trial_reports_broken_fences(
    does: Any, error: type[Exception], reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=reported) as caught:
        Trial(monkeypatch, does).trial("a", program(), cold=False, give_up=1.0)
    assert type(caught.value) is error


def test_a_trial_within_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Trial(monkeypatch, lambda self, arena: ctypes.memset(arena.own(64, "a result").pointer, 0, 64))
    assert inside.trial("a", program(), cold=False, give_up=1.0) == 1e-6
