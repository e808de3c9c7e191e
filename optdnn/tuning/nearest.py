"""Tactics of a later plan for further sizes: it takes the tactics of the engine's own plans if they are still near the best.

The cost model ranks configurations only to within its error, and a measurement decides among near-equals. So an
operator takes the choice of the plan for the nearest size (in a tuned plan: the measured winner), unless the cost model
puts that choice behind another by more than its error. The kernels of these plans are compiled already, so a further
plan seldom waits for the compiler.

Tactics without predictions, and those that compute other neighbors as well, cannot be compared by predictions. There a measured
choice stays, and an unmeasured one gives way to the tactic that the cost model prefers at these sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.tactic import Offer, Tactic
from optdnn.lowering.choose import Selection, TacticChoice, offers_of, untuned, usable
from optdnn.lowering.table import TACTICS
from optdnn.tuning.candidates import SCATTER

Key = tuple[str, tuple[str, ...]]
"""An operator in plans for several sizes: its kind, and the ONNX nodes that it comes from."""
Rows = Iterable[Mapping[str, Any]]
"""The decisions of a plan, as in its program's ``meta["tactics"]``."""


@dataclass
class Nearest:
    """Fills ``choices`` (by signature) while operators are planned: a ``Visit`` of :func:`optdnn.lowering.cuda.emit_program`.

    ``known``: the choices of operators in other plans, the preferred plan first. ``measured``: whether measurements made them.
    """

    known: Mapping[Key, Sequence[TacticChoice]]
    selection: Selection
    measured: bool = False
    choices: dict[str, TacticChoice] = field(default_factory=dict)

    @classmethod
    def of(cls, plans: Iterable[Rows], selection: Selection, measured: bool = False) -> Nearest:
        """From the decisions of ``plans``, the preferred plan first. Operators with several choices in one plan are left out, and
        those that the launches of another operator compute: their own choice was never used."""
        known: dict[Key, dict[TacticChoice, None]] = {}
        for rows in plans:
            in_plan: dict[Key, set[TacticChoice]] = {}
            for row in rows:
                if row.get("dropped", False):
                    continue
                choice = TacticChoice(str(row["tactic"]), str(row.get("config", "")))
                in_plan.setdefault((str(row["kind"]), tuple(row["nodes"])), set()).add(choice)
            for key, choices in in_plan.items():
                if len(choices) == 1:
                    known.setdefault(key, {}).update(dict.fromkeys(choices))
        return cls({key: tuple(choices) for key, choices in known.items()}, selection, measured)

    def __call__(self, b: Builder, op: Op, key: str) -> None:
        known = self.known.get((op.kind, tuple(sorted(op.src))), ())
        if not known or key in self.choices:
            return
        able, refused = usable(b, op, TACTICS[op.kind], self.selection)
        preferred = untuned(b, op, TACTICS[op.kind], able, self.selection, refused)
        if preferred is None:
            return
        predictions: dict[str, dict[str, float | None]] = {}
        for choice in known:
            tactic = next((t for t in able if t.name == choice.tactic), None)
            if tactic is None:
                continue
            if choice.tactic not in predictions:
                predictions[choice.tactic] = self._predictions(b, op, tactic)
            if self._is_near_best(b, op, tactic, choice, predictions[choice.tactic], preferred):
                self.choices[key] = choice
                return

    def _predictions(self, b: Builder, op: Op, tactic: Tactic) -> dict[str, float | None]:
        """Configuration -> predicted seconds ("": of a tactic without configurations)."""
        offers, _ = offers_of(b, op, tactic, self.selection)
        return {"" if o is None else o.name: None if o is None else o.seconds for o in offers}

    def _is_near_best(
        self,
        b: Builder,
        op: Op,
        tactic: Tactic,
        choice: TacticChoice,
        seconds: Mapping[str, float | None],
        preferred: tuple[Tactic, Offer | None],
    ) -> bool:
        """Whether ``choice``, of a tactic with these predicted seconds by configuration, is nearly as fast as the tactic's best
        configuration and as ``preferred``."""
        if choice.config not in seconds:
            return False
        predicted = seconds[choice.config]
        best = min((s for s in seconds.values() if s is not None), default=None)
        # A library has no predictions; then the choice at the nearest size is the only evidence.
        if predicted is not None and best is not None and predicted > best * (1 + SCATTER):
            return False
        other, offer = preferred
        if other is tactic:
            return True
        theirs = None if offer is None else offer.seconds
        same = {x.id for x in tactic.region(b, op).ops} == {x.id for x in other.region(b, op).ops}
        if predicted is None or theirs is None or not same:
            return self.measured
        return predicted <= theirs * (1 + SCATTER)
