"""The terms of a sum are ordered so that convolutions and products add all other terms in their epilogues.

An epilogue adds one tensor. In `(a(x) + b(x)) + x`, one of the convolutions `a` and `b` adds the result of the other one, and `x`
is left to a launch of its own. In `(x + a(x)) + b(x)` each of them adds the terms before it. Sums of branches (SegNeXt: Guo et al.,
2022) and parallel transformer blocks (GPT-J, Falcon, Phi) have the first form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, RulePass, rule
from optdnn.passes.support.stages import ACTIVATIONS, ADDITIONS, ANCHORS, SCALINGS, reads_tensor
from optdnn.passes.support.sum_terms import sum_terms
from optdnn.types import Shape

_STAGES = ACTIVATIONS | ADDITIONS | SCALINGS


@rule("order_sum", {"Add"})
def order_sum(graph: Graph, op: Op) -> Match | None:
    """Sum of three or more tensors. In another order, more convolutions or products could add other terms."""
    shape = op.outputs[0].type.shape
    found = sum_terms(graph, op)
    if shape is None or found is None:
        return None
    sums, terms = found
    adders = [v for v in terms if _adder(graph, v, shape)]
    if len(sums) < 2 or _added(sums, adders) >= min(len(adders), len(sums)):
        return None
    depth = _depths(graph)
    ordered = [v for v in terms if v not in adders] + sorted(adders, key=lambda v: depth[v.op])

    def build(patch: Patch) -> Value:
        total, *rest = ordered
        for term in rest:
            total = patch.add("Add", [total, term])
        return total

    return Match(tuple(sums), build)


def _adder(graph: Graph, value: Value, shape: Shape) -> bool:
    """Whether a convolution or product, perhaps with stages after it, computes a term, and can still add a tensor."""
    while graph.sole_user(value) is not None:
        op = graph.op(value)
        if op.kind in ANCHORS:
            return not reads_tensor(graph, op)
        computed = [v for v in op.inputs if v is not None and graph.constant_value(v) is None]
        if op.kind not in _STAGES or len(computed) != 1 or graph.type(computed[0]).shape != shape:
            return False
        value = computed[0]
    return False


def _added(sums: Sequence[Op], adders: Collection[Value]) -> int:
    """How many additions of a sum are in the epilogue of a term. (The epilogue of a smaller sum has added a tensor.)"""
    return sum(any(v in adders for v in one.inputs) for one in sums)


def _depths(graph: Graph) -> dict[int, int]:
    """Operator -> the number of operators on the longest path from the inputs to it."""
    depth: dict[int, int] = {}
    for op in graph.order():
        depth[op.id] = 1 + max((depth[v.op] for v in op.inputs if v is not None), default=0)
    return depth


class OrderedSums(RulePass):
    name = "ordered_sums"
    rules = (order_sum,)
