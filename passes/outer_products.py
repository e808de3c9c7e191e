"""Products of one term are multiplications: ``x @ y`` with one column in x and one row in y is ``x * y``, broadcast.

Outer products of two vectors and projections of single numbers have this form. As products they would take a launch of their own,
and copies to pad their factors; as multiplications they join the pointwise work around them.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op
from optdnn.passes.base import Match, RulePass, rule
from optdnn.passes.support.facts import operand, shape_of


@rule("outer_product", {"MatMul"})
def outer_product(graph: Graph, op: Op) -> Match | None:
    """Takes plain products: epilogues are fused later."""
    shapes = [shape_of(graph, operand(op, slot)) for slot in (0, 1)]
    if op.attrs.epilogue or op.attrs.prologue or any(shape is None or len(shape) < 2 for shape in shapes):
        return None
    left, right = shapes
    if left is None or right is None or left[-1] != 1 or right[-2] != 1:
        return None
    return Match((op,), lambda patch: patch.add("Mul", [operand(op, 0), operand(op, 1)]))


class OuterProducts(RulePass):
    name = "outer_products"
    rules = (outer_product,)
