"""Exponents that are running sums: scans in the domain of logarithms (minGRU, decays of state-space models).

``exp(a + log(cumsum(exp(b - a))))`` with ``a = cumsum(...)``: a running sum grows with the number of steps, and the exponential
turns its absolute error into a relative one. A sum of -500 has steps of 0.25 in fp16. So the operators between the last layer with
weights and such an exponential stay in fp32.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op
from optdnn.passes.fuse_pointwise import is_pointwise
from optdnn.passes.support.chains import chain
from optdnn.passes.support.guards import nodes

CARRIES = frozenset({"CumSum", "ReduceMax"})
"""Kinds, besides pointwise ones and movement, that compute exponents of exponents."""


def exponents(graph: Graph) -> dict[int, str]:
    """Op id -> the reason, for operators that compute exponents by running sums, and those that take their exponentials."""
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
