"""Tactics of a plan that is made later, for further sizes: what was measured at the nearest size, where it is still near the best.

The cost model ranks the configurations of a kernel to within its scatter; which of those it calls nearly equal is the fastest, only
a measurement tells. So an operator gets what won at the nearest size that was tuned, unless the cost model now puts it behind
others by more than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optdnn.ir.graph import Op
from optdnn.tactics.cuda.builder import Builder
from optdnn.tactics.cuda.select import Choice, Selection, offers_of, usable
from optdnn.tactics.cuda.table import TACTICS

SCATTER = 0.15
"""How far above the best prediction that of a measured configuration may be: what the cost model errs by."""
Key = tuple[str, tuple[str, ...]]
"""An operator in plans for other sizes: its kind, and the ONNX nodes it came from."""


@dataclass
class Nearest:
    """Fills ``choices`` (by signature) as operators are emitted: a ``Visit`` of :func:`optdnn.lower_cuda.emit_program`."""

    measured: Mapping[Key, Choice]
    selection: Selection
    choices: dict[str, Choice] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], selection: Selection) -> Nearest:
        """``rows``: the decisions of a tuned plan, as its program's ``meta["tactics"]`` holds them."""
        found: dict[Key, set[Choice]] = {}
        for row in rows:
            choice = Choice(str(row["tactic"]), str(row.get("config", "")))
            found.setdefault((str(row["kind"]), tuple(row["nodes"])), set()).add(choice)
        return cls({key: next(iter(choices)) for key, choices in found.items() if len(choices) == 1}, selection)

    def __call__(self, b: Builder, op: Op, key: str) -> None:
        known = self.measured.get((op.kind, tuple(sorted(op.src))))
        if known is not None and key not in self.choices and self._stands(b, op, known):
            self.choices[key] = known

    def _stands(self, b: Builder, op: Op, known: Choice) -> bool:
        """Whether a choice of another size can run the operator, and is nearly the best that is predicted."""
        able, _ = usable(b, op, TACTICS[op.kind], self.selection)
        tactic = next((t for t in able if t.name == known.tactic), None)
        if tactic is None:
            return False
        offers = {o.name: o for o in offers_of(b, op, tactic, self.selection)[0] if o is not None}
        if not known.config:
            return not offers or tactic is able[0]
        if known.config not in offers:
            return False
        predicted = offers[known.config].seconds
        best = min((o.seconds for o in offers.values() if o.seconds is not None), default=None)
        # A library predicts nothing: that it won nearby is all there is to go by.
        return predicted is None or best is None or predicted <= best * (1 + SCATTER)
