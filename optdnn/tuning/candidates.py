"""Candidates as small programs: each tactic and configuration of an operator, ready to be checked and timed alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.layout.moves import emit_move
from optdnn.kernels.tactic import Offer, Tactic
from optdnn.lowering.assemble import compact, placed
from optdnn.lowering.choose import Selection, TacticChoice, alternatives, results_of, signature
from optdnn.runtime.program import Program
from optdnn.types import TensorSpec

FIRST = 4
"""Candidates without a prediction come after this many of the ranked ones."""
SCATTER = 0.15
"""The relative error of the cost model: a candidate may be this much faster or slower than predicted."""
MOST = 36
"""At most this many configurations of a tactic are tried for a problem."""


@dataclass(frozen=True)
class Trial:
    """A candidate: the launches of one operator as a program over its operands. ``seconds`` is the cost model's prediction."""

    choice: TacticChoice
    provider: str
    seconds: float | None
    program: Program
    covered_keys: tuple[str, ...] = ()
    """The signatures of the operators before it that these launches compute as well."""


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
    covered: Mapping[str, Problem] = field(default_factory=dict)
    """The problems, by key, of the operators before it that some candidates compute as well."""

    @cached_property
    def covering(self) -> dict[TacticChoice, tuple[str, ...]]:
        """Candidates -> the keys of the operators that they compute as well."""
        return {t.choice: t.covered_keys for t in self.trials if t.covered_keys}

    @property
    def covered_seconds(self) -> float:
        """Seconds of the own launches of all covered operators."""
        return sum(p.seconds for p in self.covered.values())

    def saved_seconds(self, choice: TacticChoice) -> float:
        """Seconds of the separate launches of the operators that the candidate also computes."""
        found = (self.covered.get(key) for key in self.covering.get(choice, ()))
        return sum(p.seconds for p in found if p is not None)

    def added_seconds(self, choice: TacticChoice) -> float:
        """Seconds that a measured candidate adds to the network's time: its own, less those it saves."""
        return self.times[choice] - self.saved_seconds(choice)

    @property
    def best(self) -> TacticChoice:
        """The fastest measured candidate. The default, until the default itself is measured or has failed."""
        known = self.default in self.times or self.default in self.failed
        return min(self.times, key=self.added_seconds) if self.times and known else self.default

    @property
    def untried(self) -> TacticChoice | None:
        """The first candidate that has not failed; None if all have."""
        return next((t.choice for t in self.trials if t.choice not in self.failed), None)

    @property
    def seconds(self) -> float:
        """Seconds that the best candidate adds to the network's time: measured, or else predicted."""
        if self.times:
            return min(map(self.added_seconds, self.times))
        predicted = (t.seconds - self.saved_seconds(t.choice) for t in self.trials if t.seconds is not None)
        return min(predicted, default=2e-6)

    @property
    def weight(self) -> float:
        """Seconds of the network that depend on the choice: all its operators, and the operators that they may cover."""
        return self.count * (self.seconds + self.covered_seconds)


def trials_of(b: Builder, op: Op, tactics: Sequence[Tactic], selection: Selection) -> list[Trial]:
    """The candidates of an operator that is about to be planned. The one that is used without measuring comes first."""
    trials: list[Trial] = []
    count: dict[str, int] = {}
    for tactic, offer in alternatives(b, op, tactics, selection):
        count[tactic.name] = count.get(tactic.name, 0) + 1
        if count[tactic.name] <= MOST:
            trials.append(_trial(b, op, tactic, offer))
    default, others = trials[:1], trials[1:]
    ranked = sorted((t for t in others if t.seconds is not None), key=lambda t: t.seconds or 0.0)
    # The best of each tactic comes first: each tactic's cost model has its own error.
    leaders = {t.choice.tactic: t for t in reversed(ranked)}
    ranked.sort(key=lambda t: leaders[t.choice.tactic] is not t)
    return [*default, *ranked[:FIRST], *(t for t in others if t.seconds is None), *ranked[FIRST:]]


def _trial(b: Builder, op: Op, tactic: Tactic, offer: Offer | None) -> Trial:
    """The launches of a candidate as a program. The builder stays as it is."""
    region = tactic.region(b, op)
    # Operators that an earlier site covers have no problem of their own.
    covered_keys = tuple(signature(b, x) for x in region.before if x.id in b.chosen)
    choice = TacticChoice(tactic.name, "" if offer is None else offer.name)
    first, planned = len(b.steps), len(b.plan)
    b = b.fork()
    tactic.place(b, op)
    for move in b.plan[planned:]:
        emit_move(b, move)
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
    seconds = None if offer is None else offer.seconds
    return Trial(choice, tactic.provider, seconds, placed(compact(program)), covered_keys)


def _port(b: Builder, buffer: int) -> tuple[TensorSpec, int]:
    x = b.buffers[buffer]
    assert x.shape is not None
    return TensorSpec(f"{buffer}:{x.name}", x.dtype, x.shape), buffer
