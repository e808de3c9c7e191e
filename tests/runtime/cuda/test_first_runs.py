"""The first runs in the worker, with a made-up context: waits, comparisons and reports."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import lowered

from optdnn.errors import RunError
from optdnn.runtime.cuda.trials import first_runs
from optdnn.runtime.cuda.trials.first_runs import FirstRuns, ResultsDiffer
from optdnn.runtime.cuda.trials.gpu_worker import GpuWorker
from optdnn.runtime.cuda.trials.timer import KernelCrashes, KernelHangs, MemoryCorrupted
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions


class Item:
    """A launch that adds to the result."""

    def __init__(self, gpu: Gpu, number: int):
        self.gpu, self.number = gpu, number

    def enqueue(self, stream: int) -> None:
        self.gpu.launch(self.number)


class Gpu:
    """A stand-in for the context, arena, stream and timer."""

    handle = 7
    pool = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, program: Program):
        self.program, self.result, self.done = program, np.zeros(1), list[Any]()
        self.at: dict[int, Callable[[], None]] = {}
        self.in_graph: Callable[[], None] = lambda: None
        self.whole, self.lost, self.limits, self.staged = True, False, list[float](), list[Any]()
        self.stream = self
        self.memory = SimpleNamespace(
            copy_in=lambda handle: self.result.fill(0.0), copy_out=lambda handle: None, pinned=lambda i: self.result
        )
        real = first_runs.CudaRunner

        def runner(p: Program, options: LoadOptions) -> Any:
            assert options.trust_cubins
            found = real(p, options)
            monkeypatch.setattr(found, "context", lambda arena: self)
            return found

        monkeypatch.setattr(first_runs, "CudaRunner", runner)
        monkeypatch.setattr(first_runs, "FencedArena", lambda size: self)
        monkeypatch.setattr(first_runs, "ENQUEUED", (Item,))
        monkeypatch.setattr(first_runs, "wait", self.wait)
        self.made = FirstRuns(self, program)  # type: ignore[arg-type]

    def launch(self, number: int) -> None:
        self.done.append(number)
        self.result += number + 1
        self.at.get(number, lambda: None)()

    def items(self, given: Any) -> list[Any]:
        return [Item(self, k) for k in range(len(self.program.steps))]

    def graph(self) -> Any:
        return SimpleNamespace(replay=self.replay)

    def replay(self, stream: Any) -> None:
        self.result.fill(0.0)
        for k in range(len(self.program.steps)):
            self.launch(k)
        self.in_graph()

    def stage(self, arrays: Any) -> None:
        self.staged = list(arrays)

    def fill(self, byte: int) -> None:
        self.whole = True

    def intact(self, byte: int) -> bool:
        return self.whole

    def wait(self, stream: Any, limit: float = 10.0) -> float:
        self.limits.append(limit)
        return 0.0

    def disturb(self) -> None:
        self.done.append("disturbed")

    def usable(self) -> bool:
        return not self.lost


def program() -> Program:
    n = Net()
    return lowered(n.done(n.op("Softmax", n.op("Relu", n.conv(n.input(1, 8, 6, 6), 8, 3, bias=True)))))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch, program())


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_launches_run_alone_twice_and_then_their_graph(gpu: Gpu) -> None:
    steps = list(range(len(gpu.program.steps)))
    assert len(steps) > 2
    assert gpu.staged[0].shape == (1, 8, 6, 6)
    assert gpu.made.singly()
    assert gpu.done == 2 * steps
    gpu.done.clear()
    assert gpu.made.replay(20, 60.0, same=True) == 20
    assert gpu.done.count(0) == 20
    assert gpu.done.count("disturbed") == 10


def test_slow_programs_run_less_often_and_are_waited_for_longer(gpu: Gpu) -> None:
    gpu.made.singly()
    gpu.made.seconds = 5.0
    assert gpu.made.replay(20, 0.0, same=True) == 1 + first_runs.TOGETHER
    assert max(gpu.limits) == 30 * 5.0 * first_runs.TOGETHER


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KernelHangs("it has not ended after 10 s"), KernelHangs),
        (RunError("cuLaunchKernelEx: invalid argument"), KernelCrashes),
    ],
)
def test_the_launch_at_fault_is_known(gpu: Gpu, error: RunError, raised: type[RunError]) -> None:
    gpu.at[1] = raising(error)
    with pytest.raises(raised):
        gpu.made.singly()
    assert gpu.made.at == 1
    step = gpu.program.steps[1]
    reported = {"step": 1, "kind": step.params["op"]["kind"], "nodes": list(step.src), "tactic": step.params["tactic"]}
    assert gpu.made.step(1) == reported


def test_a_write_outside_of_results_is_found_after_the_launch(gpu: Gpu) -> None:
    gpu.at[2] = lambda: setattr(gpu, "whole", False)
    with pytest.raises(MemoryCorrupted):
        gpu.made.singly()
    assert gpu.made.at == 2


def test_a_write_outside_of_results_in_one_run_only_is_attributed_to_no_launch(gpu: Gpu) -> None:
    def once() -> None:
        del gpu.at[1]
        gpu.whole = False

    gpu.at[1] = once
    with pytest.raises(MemoryCorrupted, match="not in every run"):
        gpu.made.singly()
    assert gpu.made.step(gpu.made.at)["step"] is None


def test_a_graphs_write_outside_of_results_is_found(gpu: Gpu) -> None:
    gpu.made.singly()
    gpu.in_graph = lambda: setattr(gpu, "whole", False)
    with pytest.raises(MemoryCorrupted):
        gpu.made.replay(3, 60.0, same=True)


def test_results_that_do_not_repeat_are_reported_and_not_compared(gpu: Gpu) -> None:
    count = iter(range(100))

    def noise() -> None:
        gpu.result += next(count)

    gpu.at[0] = noise
    assert not gpu.made.singly()
    assert gpu.made.replay(4, 60.0, same=False) == 4


def test_a_graph_that_gives_something_else_is_refused(gpu: Gpu) -> None:
    gpu.made.singly()

    def other() -> None:
        gpu.result += 1e-9

    gpu.in_graph = other
    with pytest.raises(ResultsDiffer, match="differ from those of its single launches"):
        gpu.made.replay(4, 60.0, same=True)


def test_integers_are_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    n = Net()
    i = n.input(2, 3, name="i", dtype=np.int64)
    net = lowered(n.done(n.op("Gather", n.random(5, 4), i)))
    assert net.meta["bounds"]["i"][:2] == [-5, 4]
    net.meta["bounds"]["i"][:2] = [2, 4]
    gpu = Gpu(monkeypatch, net)
    assert gpu.staged[0].min() == gpu.staged[0].max() == 2


# ---------------------------------------------------------------- the worker's answers


def test_a_lost_context_is_distinguished_from_any_other_failure(gpu: Gpu) -> None:
    worker = GpuWorker()
    worker._gpu = SimpleNamespace(usable=lambda: not gpu.lost, load=raising_load)
    worker._received = SimpleNamespace(unpack=lambda message, arrays: None)  # type: ignore[assignment]
    with pytest.raises(RunError, match="no room") as caught:
        worker.do_load({"net": 1}, {})
    assert not isinstance(caught.value, KernelCrashes)
    gpu.lost = True
    with pytest.raises(KernelCrashes, match="no room"):
        worker.do_load({"net": 1}, {})


def raising_load(program: object) -> None:
    raise RunError("no room")
