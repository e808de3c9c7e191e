"""Sums of two products and a residual are reordered, so that the kernel of each product adds one tensor.

The blocks of GPT-J (Wang and Komatsuzaki, 2021), Falcon and Cohere have parallel attention and feed-forward units. They add the
results of both, and then the residual.
"""

from __future__ import annotations

from functools import partial

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.affine import variable
from optdnn.passes.support.stages import ANCHORS
from optdnn.types import is_float


@rule("third_term", {"Add"})
def third_term(graph: Graph, op: Op) -> Match | Miss | None:
    """``(p + q) + r`` becomes ``p + (q + r)`` for two products or convolutions p and q and another tensor r."""
    for inner, r in (op.inputs, op.inputs[::-1]):
        total = None if inner is None else graph.op(inner)
        if total is None or r is None or total.kind != "Add" or not is_float(op.outputs[0].type.dtype):
            continue
        p, q = total.inputs
        if p is None or q is None or not (_of_product(graph, p) and _of_product(graph, q)):
            continue
        if _of_product(graph, r) or graph.constant_value(r) is not None:
            continue
        if len({graph.type(v).shape for v in (p, q, r)}) > 1:
            continue
        if graph.sole_user(total.value) is None:
            return Miss(f"the result of {total.name} is used {graph.use_count(total.value)} times")
        return Match((op, total), partial(_nested, p, q, r))
    return None


def _nested(p: Value, q: Value, r: Value, patch: Patch) -> Value:
    return patch.add("Add", [p, patch.add("Add", [q, r])])


def _of_product(graph: Graph, value: Value) -> bool:
    """Whether ``value`` is a product, possibly plus constants, each with one reader."""
    while graph.sole_user(value) is not None:
        op = graph.op(value)
        if op.kind in ANCHORS:
            return True
        before = variable(graph, op) if op.kind == "Add" else None
        if before is None:
            return False
        value = before
    return False
