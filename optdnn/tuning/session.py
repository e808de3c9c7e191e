"""One tuning of a network: the state that its stages share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from optdnn.config import BuildOptions
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.cuda import Emitted, emit_program
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.tuning.candidates import Problem
from optdnn.tuning.result import Timer, Tuned
from optdnn.tuning.timing_cache import TimingCache

SPENT = "the budget was spent"


class OutOfTime(Exception):
    """The budget is spent."""


@dataclass
class Session:
    """The tuning of one optimized graph. ``clock`` gives seconds; ``begin`` is when the budget started to run."""

    graph: Graph
    options: BuildOptions
    gpu: GpuFacts
    timer: Timer
    cache: TimingCache
    say: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    begin: float = 0.0
    start: dict[str, TacticChoice] = field(default_factory=dict)
    """The choices that tuning starts from."""
    problems: dict[str, Problem] = field(default_factory=dict)
    """Signature -> problem."""
    tuned: Tuned = field(default_factory=lambda: Tuned({}, ()))
    """The best result so far."""
    cold: bool = False
    """Whether candidates are timed with operands outside of L2."""
    constants: ConstantCache = field(default_factory=ConstantCache)
    """All networks of a session share their constants: each is computed and uploaded once."""

    def spent(self, part: float = 1.0) -> bool:
        """Whether this part of the budget is spent."""
        return self.options.budget is not None and self.clock() - self.begin > part * self.options.budget

    def check_time(self) -> None:
        """Raise OutOfTime if the budget is spent."""
        if self.spent():
            raise OutOfTime

    def remaining(self, started: float, done: int, total: int) -> str:
        """The estimated time left of a loop, for a line of progress."""
        if not done:
            return ""
        return f", {(self.clock() - started) / done * (total - done):.0f} s left"

    def lose(self, what: str, why: str) -> None:
        """Report a candidate or network that hung, crashed or wrote outside of its memory. No cache remembers it."""
        self.tuned.lost.append(f"{what}: {why}")
        self.say(f"tune: refused {self.tuned.lost[-1]}")

    def emit(self, choices: Mapping[str, TacticChoice]) -> Emitted:
        """The network's launches with these choices."""
        return emit_program(self.graph, self.options, self.gpu, {}, choices, constants=self.constants)

    def measured(self, choices: Mapping[str, TacticChoice]) -> dict[str, float]:
        """Signature -> measured seconds of its operators with these choices, rounded as in the timing cache."""
        chosen = {p.key: p.times.get(choices.get(p.key, p.default)) for p in self.problems.values()}
        return {key: round(t, 10) for key, t in chosen.items() if t is not None}

    def problem_seconds(self) -> float:
        """The sum of the problems' best times over all operators of the network."""
        return sum(p.count * p.seconds for p in self.tuned.problems)
