"""A fake GPU timer: tests of the autotuner's decisions need no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.trials.process import FirstRun
from optdnn.runtime.cuda.trials.timer import Machine
from optdnn.runtime.program import Program


def tactics_of(program: Program) -> list[str]:
    return [s.params.get("tactic", "") for s in program.steps]


class FakeTimer:
    """``seconds`` gives the time of a candidate by its name (or raises), ``net`` the time of a network by the tactics of its
    steps. ``lanes``: the time of a network with lanes, as a share of that time."""

    def __init__(
        self,
        seconds: Callable[[str], float],
        net: Callable[[Sequence[str]], float] | None = None,
        *,
        device: str = "GPU",
        driver: str = "1",
        l2: int = 60 << 20,
        lanes: float = 1.0,
    ):
        self.machine = Machine(device, l2, {"driver": driver})
        self.seconds, self.net = seconds, net
        self.trials: list[tuple[str, str]] = []
        self.regimes: set[bool] = set()
        self.compiled: set[str] = set()
        self.loaded, self.lanes, self.with_lanes = 0, lanes, 0
        self.now = 0.0
        self.device = SimpleNamespace(arch="sm_90a")

    def compile(self, recipes: Sequence[Recipe], workers: int) -> None:
        assert workers >= 1
        self.compiled |= {r.key() for r in recipes}

    def trial(self, key: str, program: Program, *, cold: bool, give_up: float) -> float:
        self.now += 1.0
        name = tactics_of(program)[-1]
        self.trials.append((key, name))
        self.regimes.add(cold)
        assert give_up > 0
        for kernel in program.kernels:
            assert Recipe(kernel.template, kernel.arch, kernel.generated, kernel.options).key() in self.compiled
        return self.seconds(name)

    def load(self, program: Program) -> Any:
        self.loaded += 1
        self.with_lanes += bool(program.lanes)
        return FakeNet(self, tactics_of(program), self.lanes if program.lanes else 1.0)

    def race(self, networks: Sequence[FakeNet], rounds: int) -> list[float]:
        self.now += 0.5
        assert rounds >= 1
        return [(self.net or self._sum)(n.tactics) * n.factor for n in networks]

    def first_run(self, program: Program) -> FirstRun:
        return FirstRun(20)

    def _sum(self, tactics: Sequence[str]) -> float:
        return sum(self.seconds(t) for t in tactics if t.startswith("conv")) * 1e3 + 0.001


class FakeNet:
    def __init__(self, timer: FakeTimer, tactics: list[str], factor: float):
        self.timer, self.tactics, self.factor, self.closed = timer, tactics, factor, False

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.timer.loaded -= 1
        self.closed = True


def hashed(name: str) -> float:
    """2 to 3 microseconds, by a hash of the name: independent of the predictions."""
    return 2e-6 + sum(map(ord, name)) * 37 % 101 * 1e-8
