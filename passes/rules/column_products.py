"""A product of a constant matrix with single columns is a product of rows: ``W x`` with one column in x is ``(x^T W^T)^T``.

Cross networks (DCN-v2: Wang et al., 2021) keep each item's features as a column, and multiply all columns by one matrix. As
products of items, each would fill a small part of a tile. As rows, all items are one product, which siblings and activations can
join.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import integers, operand, shape_of


@rule("column_products", {"MatMul"})
def column_products(graph: Graph, op: Op) -> Match | None:
    """Takes plain products of a constant matrix with columns of several items: (…, k, 1)."""
    matrix, shape = graph.constant_value(op.inputs[0]), shape_of(graph, operand(op, 1))
    if op.attrs.epilogue or op.attrs.prologue or matrix is None or matrix.ndim != 2 or shape is None:
        return None
    if len(shape) < 3 or shape[-1] != 1 or all(n == 1 for n in shape[:-2]):
        return None

    def build(patch: Patch) -> Value:
        last = integers(patch, [-1], "axis")
        rows = patch.add("Squeeze", [operand(op, 1), last])
        made = patch.add("MatMul", [rows, patch.constant(matrix.T.copy(), "columns")], MatMulAttrs())
        return patch.add("Unsqueeze", [made, last])

    return Match((op,), build)
