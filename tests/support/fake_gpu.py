"""A GPU worker without a GPU: candidates and programs "run" by their names, and fail in the ways that the test asks for.

The test puts its faults into the environment (:func:`pretend`), as JSON: a list of [where, pattern, how].

where
    "trial" (a candidate), "load" (a network), "step" (a launch alone), "graph" (the graph of a finished program), "open"
pattern
    a part of a tactic's name; for graphs "lanes", "early" or "" (any)
how
    "sleeps" (nobody answers), "hangs" (the worker finds it), "segfaults", "traps" (the context is lost), "corrupts", "wrong",
    "host" (an operator on the CPU fails)
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from optdnn.errors import RunError
from optdnn.runtime.cuda import device, usable
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.trials import process as trial_process
from optdnn.runtime.cuda.trials.gpu_worker import GpuWorker
from optdnn.runtime.cuda.trials.timer import KernelHangs, Machine, MemoryCorrupted, TrialFailed
from optdnn.runtime.program import Program
from optdnn.runtime.workers.wire import run
from support.timer import hashed, tactics_of

if TYPE_CHECKING:
    import pytest  # the worker, which is this module, takes half as long to start without it

VARIABLE = "OPTDNN_TEST_FAKE_GPU"
Fault = tuple[str, str, str]


def pretend(monkeypatch: pytest.MonkeyPatch, *faults: Fault, answers_s: float = 60.0) -> None:
    """Lets builds find a GPU of sm_90a, with the worker of this module."""
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    monkeypatch.setattr(usable, "why_not", lambda: None)
    monkeypatch.setattr(device, "arch_here", lambda: "sm_90a")
    monkeypatch.setattr(device, "read_facts", lambda: of_arch("sm_90a"))
    monkeypatch.setattr(trial_process, "MAIN", "support.fake_gpu:main")
    monkeypatch.setattr(trial_process, "ANSWERS_S", answers_s)


def main() -> None:
    run(GpuWorker(FakeGpu))


class FakeGpu:
    def __init__(self, libraries: Sequence[str]):
        self.faults: list[Fault] = [tuple(f) for f in json.loads(os.environ[VARIABLE])]
        self.device = SimpleNamespace(arch="sm_90a", name="a GPU")
        self.machine = Machine("GPU", 60 << 20, {"driver": "1"}, "0000:00:00.0")
        self.lost = False
        self.meets("open", [""])

    def usable(self) -> bool:
        return not self.lost

    def meets(self, where: str, names: Sequence[str]) -> None:
        for at, pattern, how in self.faults:
            if at == where and any(pattern in name for name in names):
                self.fail(how)

    def fail(self, how: str) -> None:
        match how:
            case "sleeps":
                time.sleep(3600)
            case "hangs":
                raise KernelHangs("it has not ended after 10 s")
            case "segfaults":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "traps":
                self.lost = True
                raise RunError("an illegal instruction was encountered")
            case "corrupts":
                raise MemoryCorrupted("it writes outside of its buffers")
            case "wrong":
                raise TrialFailed("wrong result")
            case "host":
                raise RunError("an operator on the CPU refuses its made-up inputs")
            case _:
                raise AssertionError(how)

    def trial(self, key: str, program: Program, *, cold: bool, give_up: float) -> float:
        self.meets("trial", tactics_of(program)[-1:])
        return hashed(tactics_of(program)[-1])

    def load(self, program: Program) -> Any:
        self.meets("load", [*tactics_of(program), *(["lanes"] if program.lanes else [])])
        ms = 1e3 * sum(map(hashed, tactics_of(program)))
        return SimpleNamespace(times=lambda: [ms], close=lambda: None)

    def first_runs(self, program: Program) -> FakeRuns:
        return FakeRuns(self, program)


class FakeRuns:
    seconds = 0.001

    def __init__(self, gpu: FakeGpu, program: Program):
        self.gpu, self.program, self.at = gpu, program, 0

    def singly(self) -> bool:
        for self.at, step in enumerate(self.program.steps):  # noqa: B020
            self.gpu.meets("step", [step.params.get("tactic", "")])
        return True

    def step(self, k: int) -> dict[str, Any]:
        step = self.program.steps[k]
        return {"step": k, "kind": "Conv", "nodes": list(step.src), "tactic": step.params.get("tactic", "")}

    def replay(self, most: int, seconds: float, *, same: bool) -> int:
        launches = [s.params["launch"] for s in self.program.steps if "launch" in s.params]
        early = any(launch["dependent"] for launch in launches)
        self.gpu.meets("graph", ["any", *(["lanes"] if self.program.lanes else []), *(["early"] if early else [])])
        return most
