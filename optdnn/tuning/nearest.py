"""Tactics of a plan that is made later, for further sizes: those of the engine's own plans, where they are still near the best.

The cost model ranks the configurations of a kernel to within its scatter; which of those it calls nearly equal is the fastest, only
a measurement tells. So an operator gets what it has in the plan for the nearest size (in a tuned one: what won there), unless the
cost model puts that behind others by more than its scatter. What a plan of the engine runs on is compiled already, too: a plan
for another size then waits for no compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.lowering.choose import Selection, TacticChoice, offers_of, usable
from optdnn.lowering.table import TACTICS

SCATTER = 0.15
"""How far above the best prediction that of a known configuration may be: what the cost model errs by."""
Key = tuple[str, tuple[str, ...]]
"""An operator in plans for other sizes: its kind, and the ONNX nodes it came from."""
Rows = Iterable[Mapping[str, Any]]
"""The decisions of a plan, as its program's ``meta["tactics"]`` holds them."""


@dataclass
class Nearest:
    """Fills ``choices`` (by signature) as operators are emitted: a ``Visit`` of :func:`optdnn.lowering.cuda.emit_program`.
    ``known``: what operators run on in other plans, the first that still stands to be taken."""

    known: Mapping[Key, Sequence[TacticChoice]]
    selection: Selection
    choices: dict[str, TacticChoice] = field(default_factory=dict)

    @classmethod
    def of(cls, plans: Iterable[Rows], selection: Selection) -> Nearest:
        """``plans``: those to be followed first come first."""
        known: dict[Key, dict[TacticChoice, None]] = {}
        for rows in plans:
            found: dict[Key, set[TacticChoice]] = {}
            for row in rows:
                choice = TacticChoice(str(row["tactic"]), str(row.get("config", "")))
                found.setdefault((str(row["kind"]), tuple(row["nodes"])), set()).add(choice)
            for key, choices in found.items():
                if len(choices) == 1:
                    known.setdefault(key, {}).update(dict.fromkeys(choices))
        return cls({key: tuple(choices) for key, choices in known.items()}, selection)

    def __call__(self, b: Builder, op: Op, key: str) -> None:
        known = self.known.get((op.kind, tuple(sorted(op.src))), ())
        if known and key not in self.choices:
            taken = self._standing(b, op, known)
            if taken is not None:
                self.choices[key] = taken

    def _standing(self, b: Builder, op: Op, known: Sequence[TacticChoice]) -> TacticChoice | None:
        """The first choice of another size that can run the operator, and is nearly the best that is predicted."""
        able, _ = usable(b, op, TACTICS[op.kind], self.selection)
        offers: dict[str, dict[str, float | None]] = {}
        for choice in known:
            tactic = next((t for t in able if t.name == choice.tactic), None)
            if tactic is None:
                continue
            if choice.tactic not in offers:
                found = offers_of(b, op, tactic, self.selection)[0]
                offers[choice.tactic] = {o.name: o.seconds for o in found if o is not None}
            seconds = offers[choice.tactic]
            if not choice.config:
                if not seconds or tactic is able[0]:
                    return choice
                continue
            if choice.config not in seconds:
                continue
            predicted = seconds[choice.config]
            best = min((s for s in seconds.values() if s is not None), default=None)
            # A library predicts nothing: that it won nearby is all there is to go by.
            if predicted is None or best is None or predicted <= best * (1 + SCATTER):
                return choice
        return None
