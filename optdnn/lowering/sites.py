"""From a graph to the plan of its launches, and from the plan to steps.

Planning goes through the graph once. It decides for each operator on which side it runs, which region computes it, and where its
results lie. Nothing is launched: the plan is a list of moves, steps of the host and sites. Making the steps of a plan decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from optdnn.errors import UnsupportedError
from optdnn.ir.graph import STRUCTURAL, Op, Value
from optdnn.kernels.builder import Builder, Move
from optdnn.kernels.layout.views import VIEWS, plan_concats
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.lowering.assemble import SITE
from optdnn.lowering.choose import Decision, Selection, Site, choose, emit_site, left_out, signature, usable
from optdnn.lowering.host import CHEAPER, HostSide
from optdnn.lowering.table import TACTICS, WRITES_ANYWHERE
from optdnn.runtime.program import Step

Visit = Callable[[Builder, Op, str], None]
"""Called before an operator's tactic is chosen, with its signature."""


class NoKernel(Exception):
    """The launches of an operator cannot be made, as shows when they are made."""

    def __init__(self, op: Op, why: str):
        super().__init__(why)
        self.op, self.why = op, why


@dataclass
class Planner:
    """Plans one graph. ``to_host`` names operators (by number) that run on the host whatever tactics say, each with the reason."""

    b: Builder
    host: HostSide
    selection: Selection
    visit: Visit
    strict: bool
    to_host: Mapping[int, str]
    _site_of: dict[int, Site] = field(default_factory=dict)
    """Operator -> the site whose region has it."""

    def run(self) -> None:
        """Fill ``b.plan``."""
        plan_concats(self.b, WRITES_ANYWHERE)
        for op in self.b.graph.order():
            if op.kind not in STRUCTURAL and op.id not in self._site_of:
                self._plan(op)

    def _plan(self, op: Op) -> None:
        b, host = self.b, self.host
        why = host.must(op) or self.to_host.get(op.id)
        if why is None:
            if all(0 in out.type.static_shape for out in op.outputs):
                for port, out in enumerate(op.outputs):  # nothing to compute: a constant without elements
                    b.place[Value(op.id, port)] = b.constant(np.empty(out.type.static_shape, out.type.dtype), out.name)
                return
            if not self.strict and host.cheaper(op):
                host.run(op, CHEAPER, forced=False)
                return
            before = host.snapshot()
            try:
                if op.kind in VIEWS and not self._has_kernel(op):
                    VIEWS[op.kind](b, op)
                else:
                    self._choose(op)
                return
            except UnsupportedError as error:
                host.undo(before)
                why = error.message
        host.run(op, why)

    def _has_kernel(self, op: Op) -> bool:
        """Whether a view's operator has a tactic that runs it, too."""
        return bool(usable(self.b, op, TACTICS.get(op.kind, ()), self.selection)[0])

    def _choose(self, op: Op) -> None:
        """Choose the site of an operator. What its region computes besides needs no site of its own."""
        b = self.b
        for value in op.inputs:
            if value is not None and value not in b.place and b.graph.constant_value(value) is None:
                b.operand(value)  # the host makes it
        key = signature(b, op)
        self.visit(b, op, key)
        site = choose(b, op, TACTICS[op.kind], self.selection, key)
        own = {x.id for x in site.region.ops}
        for earlier in site.region.before:
            other = self._site_of.get(earlier.id)
            if other is not None and own.issuperset(x.id for x in other.region.ops):
                other.dropped = True
        self._site_of |= dict.fromkeys(own, site)
        b.plan.append(site)


def emit_plan(b: Builder) -> list[Decision]:
    """Add the steps of ``b.plan``, each of a site's with the number of the site's decision as its parameter :data:`SITE`.

    Raises NoKernel.
    """
    b.fetch = lambda value: None  # all that the host makes is in the plan
    decisions: list[Decision] = []
    for entry in b.plan:
        first = len(b.steps)
        if isinstance(entry, Step):
            b.steps.append(entry)
        elif isinstance(entry, Move):
            copy(b, entry.op, entry.source, entry.target)
            b.credit(first, "copy")
        elif entry.dropped:
            decisions.append(left_out(entry))
        else:
            try:
                decisions.append(emit_site(b, entry))
            except UnsupportedError as error:
                raise NoKernel(entry.op, error.message) from error
            for k in range(first, len(b.steps)):
                b.steps[k] = replace(b.steps[k], params={**b.steps[k].params, SITE: len(decisions) - 1})
    return decisions
