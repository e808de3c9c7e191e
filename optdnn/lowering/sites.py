"""From a graph to a plan, and from the plan to steps.

The planner goes through the graph once. For each operator it decides the side (GPU or host), the region, and the places
of the results. It launches nothing: the plan is a list of moves, steps on the host, and sites. Emitting a plan decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from optdnn.errors import UnsupportedError
from optdnn.ir.graph import STRUCTURAL, Op
from optdnn.kernels.builder import Builder, Move
from optdnn.kernels.layout.concats import plan_concats, plan_outputs
from optdnn.kernels.layout.moves import emit_move
from optdnn.kernels.layout.views import VIEWS
from optdnn.lowering.assemble import SITE
from optdnn.lowering.choose import (
    Decision,
    Selection,
    Site,
    Usable,
    choose,
    dropped_decision,
    emit_site,
    signature,
    usable,
)
from optdnn.lowering.host import CHEAPER, HostSide
from optdnn.lowering.table import TACTICS, WRITES_ANYWHERE
from optdnn.runtime.program import Step

Visit = Callable[[Builder, Op, str], None]
"""Is called with an operator and its signature before its tactic is chosen."""


def no_visit(b: Builder, op: Op, key: str) -> None:
    """The :data:`Visit` that does nothing."""


class NoKernel(Exception):
    """The launches of an operator cannot be emitted."""

    def __init__(self, op: Op, why: str):
        super().__init__(why)
        self.op, self.why = op, why


@dataclass
class Planner:
    """Plans one graph. ``to_host``: operators (by number) that must run on the host -> the reason."""

    b: Builder
    host: HostSide
    selection: Selection
    visit: Visit
    strict: bool
    to_host: Mapping[int, str]
    _site_of: dict[int, Site] = field(default_factory=dict)
    """Operator -> the site whose region contains it."""

    def run(self) -> None:
        """Fill ``b.plan``."""
        plan_outputs(self.b, WRITES_ANYWHERE)
        plan_concats(self.b, WRITES_ANYWHERE)
        for op in self.b.graph.order():
            if op.kind not in STRUCTURAL and op.id not in self._site_of:
                self._plan(op)

    def _plan(self, op: Op) -> None:
        b, host = self.b, self.host
        if all(out.type.is_static and 0 in out.type.static_shape for out in op.outputs):
            for value in op.values:  # nothing to compute
                b.place_empty(value)
            return
        why = host.must(op) or self.to_host.get(op.id)
        if why is None:
            if not self.strict and host.cheaper(op):
                host.run(op, CHEAPER, forced=False)
                return
            before = host.snapshot()
            try:
                asked = usable(b, op, TACTICS.get(op.kind, ()), self.selection) if op.kind in VIEWS else None
                if asked is not None and not asked[0]:  # no tactic computes it: it is a view
                    VIEWS[op.kind](b, op)
                else:
                    self._choose(op, asked)
                return
            except UnsupportedError as error:
                host.undo(before)
                why = error.message
        host.run(op, why)

    def _choose(self, op: Op, asked: Usable | None) -> None:
        """Choose the site of an operator. The later operators of its region need no sites.

        ``asked``: the tactics that can run it, if the caller has already asked them.
        """
        b = self.b
        for value in op.inputs:
            if value is not None and value not in b.place and b.graph.constant_value(value) is None:
                b.operand(value)  # copy a value that the host computes to the GPU
        key = signature(b, op)
        self.visit(b, op, key)
        site = choose(b, op, TACTICS[op.kind], self.selection, key, asked)
        covered = {x.id for x in site.region.ops}
        for earlier in site.region.before:
            earlier_site = self._site_of.get(earlier.id)
            if earlier_site is not None and covered.issuperset(x.id for x in earlier_site.region.ops):
                earlier_site.dropped = True
        self._site_of |= dict.fromkeys(covered, site)
        b.chosen[op.id] = site.tactic
        for k, x in enumerate((op, *site.region.after)):
            if others := (*site.region.before, *(op, *site.region.after)[:k]):
                b.joined[x.id] = others
        b.plan.append(site)


def emit_plan(b: Builder) -> list[Decision]:
    """Add the steps of ``b.plan``. The parameter :data:`SITE` of a site's step is the number of its decision.

    Raises NoKernel.
    """
    b.fetch = lambda value: None  # the plan has all copies from the host
    decisions: list[Decision] = []
    for entry in b.plan:
        first = len(b.steps)
        if isinstance(entry, Step):
            b.steps.append(entry)
        elif isinstance(entry, Move):
            emit_move(b, entry)
            b.credit(first, "copy")
        elif entry.dropped:
            decisions.append(dropped_decision(entry))
        else:
            try:
                decisions.append(emit_site(b, entry))
            except UnsupportedError as error:
                raise NoKernel(entry.op, error.message) from error
            for k in range(first, len(b.steps)):
                b.steps[k] = replace(b.steps[k], params={**b.steps[k].params, SITE: len(decisions) - 1})
    return decisions
