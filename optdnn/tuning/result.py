"""The autotuner's interface to a GPU, and the result of tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.lane_choice import LaneChoice
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.trials.timer import Machine
from optdnn.runtime.program import Program
from optdnn.tuning.candidates import Problem

if TYPE_CHECKING:
    from optdnn.lowering.cuda import Emitted


class Timer(Protocol):
    """The measurements that tuning needs; :class:`optdnn.runtime.cuda.trials.process.TrialTimer` makes them on a GPU."""

    @property
    def machine(self) -> Machine: ...

    def compile(self, recipes: Sequence[Recipe], workers: int) -> None: ...

    def trial(self, key: str, program: Program, *, cold: bool, give_up: float) -> float: ...

    def load(self, program: Program) -> Any: ...

    def race(self, networks: Sequence[Any], rounds: int) -> list[float]: ...


@dataclass
class Tuned:
    """The result of tuning: ``choices`` by signature for :func:`optdnn.lowering.cuda.lower_cuda`.

    ``before_ms`` and ``after_ms`` are the whole network's times with the starting choices and with these (None: not measured).
    ``stopped`` is the reason if tuning ended early; ``failed``: the GPU was the reason. ``cached``: the choices are an
    earlier build's. ``seconds`` is the duration of each phase. ``providers`` are those whose kernels were candidates.
    """

    choices: dict[str, TacticChoice]
    problems: Sequence[Problem]
    before_ms: float | None = None
    after_ms: float | None = None
    stopped: str | None = None
    failed: bool = False
    cached: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    providers: Sequence[str] = ()
    streams: LaneChoice | None = None
    """The measured choice of lanes (None: not measured)."""
    emitted: Emitted | None = None
    """The launches of these choices, if they are known."""
    lost: list[str] = field(default_factory=list)
    """A line for each candidate or network that hung, crashed or wrote outside of its memory."""

    def to_plain(self) -> dict[str, Any]:
        """For the build's report."""
        rows = [
            {
                "nodes": sorted(p.op.src), "kind": p.op.kind, "operators": p.count, "signature": p.key,
                "chosen": str(self.choices.get(p.key, p.default)), "default": str(p.default), "candidates": len(p.trials),
                "us": {str(c): round(s * 1e6, 3) for c, s in sorted(p.times.items(), key=lambda i: i[1])},
                **({"failed": {str(c): why for c, why in p.failed.items()}} if p.failed else {}),
            }
            for p in self.problems
            if len(p.trials) > 1
        ]  # fmt: skip
        facts: dict[str, Any] = {"before_ms": self.before_ms, "after_ms": self.after_ms, "cached": self.cached}
        facts |= {"providers": list(self.providers)}
        s = self.streams
        if s is not None and s.lanes_ms is not None:
            facts |= {"streams": {"most": s.most, "one_ms": s.one_ms, "lanes_ms": s.lanes_ms}}
        facts |= {"stopped": self.stopped} if self.stopped else {}
        facts |= {"lost": list(self.lost)} if self.lost else {}
        return {**facts, "seconds": {k: round(v, 2) for k, v in self.seconds.items()}, "problems": rows}
