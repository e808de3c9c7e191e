"""A Gemm of transposed rows that a Reshape joins becomes a product without the Reshapes, which the Transpose can pass.

ONNX Runtime's offline optimizer and onnxslim write Gemms in the place of products with a bias, between two Reshapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, producer
from optdnn.passes.support.products import constant_matrix


@rule("turned_rows", {"Gemm"})
def turned_rows(graph: Graph, op: Op) -> Match | None:
    """``reshape(gemm(reshape(transpose(x))))`` whose rows keep the axes of the Transpose's result: ``transpose(x) @ W + b``."""
    join, split = producer(graph, op.inputs[0], RESHAPES), graph.sole_user(op.value)
    turn = None if join is None else producer(graph, operand(join), {"Transpose"})
    matrix = constant_matrix(graph, op)
    if turn is None or split is None or split.kind not in RESHAPES or matrix is None:
        return None
    rows, result, perm = turn.outputs[0].type, split.outputs[0].type, turn.attrs.perm
    if not rows.is_static or not result.is_static or not perm or perm[-1] != len(perm) - 1 or len(perm) < 3:
        return None
    lead, after = _longer(rows.static_shape[:-1]), result.static_shape
    if rows.static_shape[-1] != matrix.shape[0] or _longer(after)[: len(lead)] != lead:
        return None

    def build(patch: Patch) -> Value:
        y = patch.add("MatMul", [turn.value, matrix.add_to(patch)], MatMulAttrs())
        if matrix.bias is not None:
            y = patch.add("Add", [y, patch.constant(matrix.bias, "bias")])
        return y if patch.type(y).dims == after else in_shape(patch, y, after)

    return Match((op, split), build, split.value)


def _longer(shape: Sequence[int]) -> list[int]:
    """The sizes of axes that are longer than 1."""
    return [n for n in shape if n != 1]
