"""Candidates as small programs: each way of running one operator, ready to be checked and timed by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.tactic import Offer, Tactic
from optdnn.lowering.assemble import compact, placed
from optdnn.lowering.choose import Selection, TacticChoice, alternatives, results_of, signature
from optdnn.runtime.program import Program
from optdnn.types import TensorSpec

FIRST = 4
"""Candidates of which the cost model knows nothing come after this many of those it ranks."""
MOST = 36
"""Most configurations of one tactic that are tried for one problem."""


@dataclass(frozen=True)
class Trial:
    """A candidate: the launches of one operator as a program over its operands. ``seconds`` is the cost model's prediction."""

    choice: TacticChoice
    provider: str
    seconds: float | None
    program: Program
    absorbs: str = ""
    """The signature of an operator before it that these launches compute, too."""


@dataclass
class Problem:
    """All operators of one signature, and the candidates to run them, the best predicted first."""

    key: str
    op: Op
    trials: Sequence[Trial]
    default: TacticChoice
    count: int = 0
    times: dict[TacticChoice, float] = field(default_factory=dict)
    """Measured seconds."""
    failed: dict[TacticChoice, str] = field(default_factory=dict)
    spared: Problem | None = None
    """The operator before it that some of its candidates compute, too."""

    @cached_property
    def sparing(self) -> frozenset[TacticChoice]:
        """Those candidates."""
        return frozenset(t.choice for t in self.trials if t.absorbs)

    def saved(self, choice: TacticChoice) -> float:
        """Seconds of launches that a candidate makes needless."""
        return self.spared.seconds if self.spared is not None and choice in self.sparing else 0.0

    def adds(self, choice: TacticChoice) -> float:
        """What a measured candidate adds to the network's time: its own, less what it saves."""
        return self.times[choice] - self.saved(choice)

    @property
    def best(self) -> TacticChoice:
        """The fastest that was measured; the default, unless that was measured too (or failed)."""
        known = self.default in self.times or self.default in self.failed
        return min(self.times, key=self.adds) if self.times and known else self.default

    @property
    def untried(self) -> TacticChoice | None:
        """The first candidate that did not fail; None where all did."""
        return next((t.choice for t in self.trials if t.choice not in self.failed), None)

    @property
    def seconds(self) -> float:
        """What the best adds to the network's time, or what is predicted of that."""
        if self.times:
            return min(map(self.adds, self.times))
        return min((t.seconds - self.saved(t.choice) for t in self.trials if t.seconds is not None), default=2e-6)

    @property
    def weight(self) -> float:
        """The time that depends on how it is run: of all its operators, and of those that they may make needless."""
        return self.count * (self.seconds + (0.0 if self.spared is None else self.spared.seconds))


def trials_of(b: Builder, op: Op, tactics: Sequence[Tactic], selection: Selection) -> list[Trial]:
    """The candidates of an operator that is about to be emitted: first what would be taken without measuring."""
    found: list[Trial] = []
    tried: dict[str, int] = {}
    for tactic, offer in alternatives(b, op, tactics, selection):
        tried[tactic.name] = tried.get(tactic.name, 0) + 1
        if tried[tactic.name] <= MOST:
            found.append(_trial(b, op, tactic, offer))
    known = sorted((t for t in found[1:] if t.seconds is not None), key=lambda t: t.seconds or 0.0)
    leaders = {t.choice.tactic: t for t in reversed(known)}  # each tactic's first: cost models err apart
    known.sort(key=lambda t: leaders[t.choice.tactic] is not t)
    return [*found[:1], *known[:FIRST], *(t for t in found[1:] if t.seconds is None), *known[FIRST:]]


def _trial(b: Builder, op: Op, tactic: Tactic, offer: Offer | None) -> Trial:
    first, planned = len(b.steps), len(b.plan)
    region = tactic.region(b, op)
    absorbs = signature(b, region.before[0]) if region.before else ""
    choice = TacticChoice(tactic.name, "" if offer is None else offer.name)
    with b.rehearsal():
        tactic.place(b, op)
        for move in b.plan[planned:]:
            copy(b, op, move.source, move.target)
        tactic.emit(b, op, None if offer is None else offer.config)
        b.credit(first, str(choice))
        steps = tuple(b.steps[first:])
        results = results_of(b, region)
        written: set[int] = set()
        read: dict[int, None] = {}
        for step in steps:
            read |= dict.fromkeys(i for i in step.inputs if b.buffers[i].blob is None and i not in written)
            written |= set(step.outputs)
        program = Program(
            target=f"cuda:{b.arch}", precision="", inputs=tuple(_port(b, i) for i in read),
            outputs=tuple(_port(b, i) for i in sorted(results & written)), buffers=tuple(b.buffers), steps=steps,
            blobs=list(b.blobs), kernels=tuple(b.kernels), retained=tuple(b.retained),
        )  # fmt: skip
    return Trial(choice, tactic.provider, None if offer is None else offer.seconds, placed(compact(program)), absorbs)


def _port(b: Builder, buffer: int) -> tuple[TensorSpec, int]:
    x = b.buffers[buffer]
    assert x.shape is not None
    return TensorSpec(f"{buffer}:{x.name}", x.dtype, x.shape), buffer
