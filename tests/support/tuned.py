"""A small network, tuned with a made-up timer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.lowering.cuda import emit_program
from optdnn.optimize import optimize
from optdnn.runtime.cuda import device, usable
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.trials import process as trial_process
from optdnn.tuning.autotuner import Tuner
from optdnn.tuning.result import Tuned
from optdnn.tuning.timing_cache import TimingCache
from support.net import Net
from support.timer import FakeTimer, hashed

TARGET = "cuda:sm_90a"


def network(batch: int = 1) -> Graph:
    """Three equal convolutions and a product. The convolutions take most of the time."""
    n = Net()
    x = n.input(batch, 64, 28, 28)
    for _ in range(3):
        x = n.op("Relu", n.conv(x, 64, 3))
    return n.done(n.conv(x, 32, 1, pads=0))


def tuned(
    timer: FakeTimer,
    cache: TimingCache | None = None,
    graph: Graph | None = None,
    say: Any = lambda text: None,
    **options: Any,
) -> tuple[Tuned, Tuner]:
    chosen = BuildOptions(target=TARGET, precision="fp16", **options)
    g = (graph or network()).copy()
    optimize(g, chosen, TARGET)
    tuner = Tuner(
        g, chosen, of_arch("sm_90a"), timer, cache if cache is not None else TimingCache(), say, lambda: timer.now
    )
    found = tuner.run()
    assert timer.loaded == 0, "every network was closed"
    emit_program(g, chosen, of_arch("sm_90a"), {}, found.choices)  # the chosen candidates can be lowered
    return found, tuner


def tuned_by(seconds: Callable[[str], float], graph: Graph) -> tuple[Tuned, set[str], list[str]]:
    """The result of tuning by these times of launches, whose sum is a network's time; the tactics that were timed; the chosen
    ones."""
    timer = FakeTimer(seconds, lambda names: sum(map(seconds, names)) * 1e3)
    found, _ = tuned(timer, graph=graph, tactics="own")
    return found, {name.split()[0] for _, name in timer.trials}, [c.tactic for c in found.choices.values()]


def timed_without_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTimer:
    """Builds for a GPU find one whose times are hashes of names: the timer's."""
    timer = FakeTimer(hashed)
    monkeypatch.setattr(usable, "why_not", lambda: None)
    monkeypatch.setattr(device, "arch_here", lambda: timer.device.arch)
    monkeypatch.setattr(device, "read_facts", lambda: of_arch(timer.device.arch))
    monkeypatch.setattr(trial_process.GpuProcess, "begin", lambda self: None)
    monkeypatch.setattr(trial_process, "TrialTimer", lambda process, libraries=(): timer)
    return timer


@cache
def _first() -> tuple[Tuned, TimingCache]:
    kept = TimingCache()
    return tuned(FakeTimer(hashed), kept)[0], kept


def remembered() -> tuple[Tuned, TimingCache]:
    """The small network, tuned once per process by times that are hashes of names, and a copy of the cache with these times."""
    found, kept = _first()
    return found, copy.deepcopy(kept)


def convolution(found: Tuned) -> Any:
    return max(found.problems, key=lambda p: p.count * (p.op.kind == "Conv"))


def tried() -> list[tuple[str, str]]:
    timer = FakeTimer(hashed)
    tuned(timer)
    return timer.trials


def branchy() -> Graph:
    """Two branches of two convolutions, between two other convolutions."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 16, 14, 14), 16, 3))
    a = n.op("Relu", n.conv(n.op("Relu", n.conv(x, 16, 3)), 32, 3))
    b = n.op("Relu", n.conv(n.op("Relu", n.conv(x, 24, 5, pads=2)), 32, 1, pads=0))
    return n.done(n.conv(n.op("Mul", a, b), 32, 1, pads=0))
