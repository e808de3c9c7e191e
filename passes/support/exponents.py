"""Exponents that are running sums: scans in the domain of logarithms (minGRU, decays of state-space models).

``exp(a + log(cumsum(exp(b - a))))`` with ``a = cumsum(...)``: a running sum grows with the number of steps, and the exponential
turns its absolute error into a relative one. A sum of -500 has steps of 0.25 in fp16. So the operators between the last layer with
weights and such an exponential stay in fp32.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph
from optdnn.passes.fuse_pointwise import is_pointwise
from optdnn.passes.support.guards import Stage, StageId, nodes
from optdnn.types import is_float

CARRIES = frozenset({"CumSum", "ReduceMax"})
"""Kinds, besides pointwise ones and movement, that compute exponents of exponents."""


def exponents(graph: Graph) -> dict[int, str]:
    """Op id -> the reason, for operators that compute exponents by running sums, and those that take their exponentials."""
    if "CumSum" not in graph.kinds():
        return {}
    stages = dict(nodes(graph))
    found: dict[int, str] = {}
    for step, stage in stages.items():
        if stage.kind == "Exp":
            chain = _chain(graph, stages, step)
            if any(graph.op(i).kind == "CumSum" for i in chain):
                reason = f"it computes the exponent of Exp {stage.op.outputs[0].name}, a running sum"
                for i in sorted(chain):
                    found.setdefault(i, reason)
    return found


def _chain(graph: Graph, stages: dict[StageId, Stage], last: StageId) -> set[int]:
    """The operators before an exponential, back to inputs, integers and other kinds of operators."""
    found, seen, wanted = set[int](), {last}, [last]
    while wanted:
        stage = stages[wanted.pop()]
        found.add(stage.op.id)
        for a in stage.args:
            if not isinstance(a, tuple) or a in seen:
                continue
            seen.add(a)
            op = graph.op(a[0])
            if op.kind in ("Constant", "Input") or not is_float(op.outputs[0].type.dtype):
                continue
            before = a if a in stages else (op.id, 0)  # another result of the same operator
            carries = is_pointwise(op) or op.definition.traits.movement or op.kind in CARRIES
            if before in stages and carries:
                wanted.append(before)
    return found
