"""Exponents that are running sums stay in fp32: scans of logarithms (minGRU, decays of state-space models).

In ``exp(a + log(cumsum(exp(b - a))))`` with ``a = cumsum(...)``, the running sum grows with the number of steps, and the
exponential turns its absolute error into a relative error. Near -500, the step between neighboring numbers of fp16 is 0.25. So the
operators between the last layer with weights and such an exponential stay in fp32.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op
from optdnn.passes.support.chains import chain
from optdnn.passes.support.facts import is_pointwise
from optdnn.passes.support.guards import nodes

CARRIES = frozenset({"CumSum", "ReduceMax"})
"""Kinds that compute exponents from exponents, besides pointwise operators and operators that only move elements."""


def exponents(graph: Graph) -> dict[int, str]:
    """Op id -> the reason to stay in fp32, for operators that compute exponents by running sums, and for their exponentials."""
    if "CumSum" not in graph.kinds():
        return {}
    stages = dict(nodes(graph))
    found: dict[int, str] = {}
    for step, stage in stages.items():
        if stage.kind != "Exp":
            continue
        before, _ = chain(graph, stages, step, _carries)
        if any(graph.op(i).kind == "CumSum" for i in before):
            for i in sorted(before):
                found.setdefault(i, f"it computes the exponent of Exp {stage.op.outputs[0].name}, a running sum")
    return found


def _carries(op: Op) -> bool:
    return is_pointwise(op) or op.definition.traits.movement or op.kind in CARRIES
