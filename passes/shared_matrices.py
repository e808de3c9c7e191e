"""Vectors that are multiplied by one computed matrix, each in a product of its own, become the rows of one product.

Networks of proteins rotate the points of each residue by the residue's matrix (invariant point attention: Jumper et al., 2021;
ESM3: Hayes et al., 2025): ``R[:, None] @ p[..., None]`` is a product of 3 x 3 numbers for each point. As rows, the points of a
residue are one product. Constant matrices have this form already (:mod:`optdnn.passes.einsum_to_matmul`).
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, PassContext, RulePass, rule
from optdnn.passes.support.facts import integers, operand, shape_of
from optdnn.types import Shape


@rule("shared_matrix", {"MatMul"})
def shared_matrix(graph: Graph, op: Op, context: PassContext) -> Match | None:
    """Takes plain products of n columns (…, n, k, 1) or n rows (…, n, 1, k) with one matrix (…, 1, rows, columns)."""
    shapes = [shape_of(graph, operand(op, slot)) for slot in (0, 1)]
    if op.attrs.epilogue or op.attrs.prologue or any(shape is None or len(shape) < 2 for shape in shapes):
        return None
    left, right = (shape or () for shape in shapes)
    if right[-1] == 1 and _shared(left, right, context):
        slot, axis = 0, -1
    elif left[-2] == 1 and _shared(right, left, context):
        slot, axis = 1, -2
    else:
        return None
    if graph.constant_value(operand(op, slot)) is not None:
        return None  # a layer, whose weights others look for

    def build(patch: Patch) -> Value:
        matrix, vectors = operand(op, slot), operand(op, 1 - slot)
        if len(patch.type(matrix).dims) > 2:
            matrix = patch.add("Squeeze", [matrix, integers(patch, [-3], "axis")])
        if slot == 0:
            rank = len(patch.type(matrix).dims)
            perm = (*range(rank - 2), rank - 1, rank - 2)
            matrix = patch.add("Transpose", [matrix], TransposeAttrs(perm))
        one = integers(patch, [axis], "axis")
        made = patch.add("MatMul", [patch.add("Squeeze", [vectors, one]), matrix], MatMulAttrs())
        return patch.add("Unsqueeze", [made, one])

    return Match((op,), build)


def _shared(matrices: Shape, vectors: Shape, context: PassContext) -> bool:
    """Whether several vectors along the third axis from the end share a matrix of at least two rows and columns.

    That axis may be the batch: with ``row_invariant``, a single vector shares a matrix, too."""
    if context.row_invariant and len(matrices) == 2:
        return len(vectors) == 3 and 1 not in matrices
    if len(vectors) < 3 or vectors[-3] == 1 or 1 in matrices[-2:]:
        return False
    return len(matrices) == 2 or matrices[-3] == 1


class SharedMatrices(RulePass):
    name = "shared_matrices"
    rules = (shared_matrix,)
