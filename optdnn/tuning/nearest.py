"""Tactics of a later plan for further sizes: it takes the tactics of the engine's own plans if they are still near the best.

The cost model ranks configurations only to within its error, and a measurement decides among near-equals. So an
operator takes the choice of the plan for the nearest size (in a tuned plan: the measured winner), unless the cost model
puts that choice behind another by more than its error. The kernels of these plans are compiled already, so a further
plan seldom waits for the compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.tactic import Tactic
from optdnn.lowering.choose import Selection, TacticChoice, offers_of, usable
from optdnn.lowering.table import TACTICS
from optdnn.tuning.candidates import SCATTER

Key = tuple[str, tuple[str, ...]]
"""An operator in plans for several sizes: its kind, and the ONNX nodes that it comes from."""
Rows = Iterable[Mapping[str, Any]]
"""The decisions of a plan, as in its program's ``meta["tactics"]``."""


@dataclass
class Nearest:
    """Fills ``choices`` (by signature) while operators are planned: a ``Visit`` of :func:`optdnn.lowering.cuda.emit_program`.

    ``known``: the choices of operators in other plans, the preferred plan first.
    """

    known: Mapping[Key, Sequence[TacticChoice]]
    selection: Selection
    choices: dict[str, TacticChoice] = field(default_factory=dict)

    @classmethod
    def of(cls, plans: Iterable[Rows], selection: Selection) -> Nearest:
        """From the decisions of ``plans``, the preferred plan first. Operators with several choices in one plan are left out."""
        known: dict[Key, dict[TacticChoice, None]] = {}
        for rows in plans:
            in_plan: dict[Key, set[TacticChoice]] = {}
            for row in rows:
                choice = TacticChoice(str(row["tactic"]), str(row.get("config", "")))
                in_plan.setdefault((str(row["kind"]), tuple(row["nodes"])), set()).add(choice)
            for key, choices in in_plan.items():
                if len(choices) == 1:
                    known.setdefault(key, {}).update(dict.fromkeys(choices))
        return cls({key: tuple(choices) for key, choices in known.items()}, selection)

    def __call__(self, b: Builder, op: Op, key: str) -> None:
        known = self.known.get((op.kind, tuple(sorted(op.src))), ())
        if not known or key in self.choices:
            return
        able, _ = usable(b, op, TACTICS[op.kind], self.selection)
        predictions: dict[str, dict[str, float | None]] = {}
        for choice in known:
            tactic = next((t for t in able if t.name == choice.tactic), None)
            if tactic is None:
                continue
            if choice.tactic not in predictions:
                predictions[choice.tactic] = self._predictions(b, op, tactic)
            if _is_near_best(choice, predictions[choice.tactic], preferred=tactic is able[0]):
                self.choices[key] = choice
                return

    def _predictions(self, b: Builder, op: Op, tactic: Tactic) -> dict[str, float | None]:
        """Configuration -> predicted seconds."""
        offers, _ = offers_of(b, op, tactic, self.selection)
        return {o.name: o.seconds for o in offers if o is not None}


def _is_near_best(choice: TacticChoice, seconds: Mapping[str, float | None], *, preferred: bool) -> bool:
    """Whether a tactic with these predicted seconds by configuration still offers the choice, nearly as fast as its best."""
    if not choice.config:
        return not seconds or preferred
    if choice.config not in seconds:
        return False
    predicted = seconds[choice.config]
    best = min((s for s in seconds.values() if s is not None), default=None)
    # A library has no predictions; then the choice at the nearest size is the only evidence.
    return predicted is None or best is None or predicted <= best * (1 + SCATTER)
