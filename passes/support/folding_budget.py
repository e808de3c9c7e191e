"""Limits on the bytes that constant folding may add to a model and on its work: a small file can ask for much of both."""

from __future__ import annotations

from optdnn.ir.body import bodies
from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.limits import FOLDED_BYTES, FOLDED_WORK
from optdnn.ops.base import Call, Result
from optdnn.ops.checks import elements
from optdnn.ops.fused import flops
from optdnn.passes.support.facts import bytes_of

MOST_TRIPS = 10_000
"""Largest number of iterations that is assumed for a Loop in the estimate of work."""
CHEAP_WORK = 64
"""This many operations for each element of the operands are not counted: their time grows only with the size of the model."""
DENSE_WORK = 10
"""NumPy computes this many operations of a matrix product in the time in which it stores one element."""


class FoldingBudget:
    """The remaining bytes and work for folding one graph. Work is counted, not timed: the same model gives the same engine."""

    def __init__(self) -> None:
        self.bytes, self.work = FOLDED_BYTES.value, FOLDED_WORK.value

    def refusal(self, graph: Graph, op: Op) -> str | None:
        """Subtract an op's cost from the budget and return None, or return the reason why too little is left."""
        if not all(o.type.is_static for o in op.outputs):
            return None
        read = [v for v in op.inputs if v is not None and graph.type(v).is_static]
        grown = sum(bytes_of(graph, v) for v in op.values)
        grown -= sum(bytes_of(graph, v) for v in read)
        work = _work(graph, op) - CHEAP_WORK * sum(elements(graph.type(v)) for v in read)
        for left, asked, limit in ((self.bytes, grown, FOLDED_BYTES), (self.work, work, FOLDED_WORK)):
            if asked > left:
                return f"folding it would go beyond a limit: {limit.hint}"
        self.bytes -= max(0, grown)
        self.work -= max(0, int(work))
        return None


def _work(graph: Graph, op: Op) -> float:
    """The operations of an op in NumPy, including those of its bodies."""
    inside = sum(_work(b.graph, inner) for b in bodies(op) for inner in b.graph.ops() if inner.kind not in STRUCTURAL)
    if op.kind == "Loop":
        trips = op.input(0)
        known = None if trips is None else graph.known(trips)
        inside *= MOST_TRIPS if known is None or known.dtype == object else min(MOST_TRIPS, int(known.reshape(-1)[0]))
    types = tuple(None if v is None else graph.type(v) for v in op.inputs)
    values = tuple(None if v is None else graph.known(v) for v in op.inputs)
    call = Call(op.kind, op.attrs, types, values, len(op.outputs), graph.fresh_symbol)
    own = flops(op.definition, call, Result(tuple(o.type for o in op.outputs)))
    return inside + min(own, sum(elements(o.type) for o in op.outputs) + own / DENSE_WORK)
