"""A Gemm of rows that a Reshape joins, and another one splits again, becomes a product of the rows as they are.

ONNX Runtime's offline optimizer and onnxslim write Gemms between two Reshapes for products with a bias. Transposes,
and selections of rows, can pass the product only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, producer
from optdnn.passes.support.products import constant_matrix, multiplied


@rule("rows_of_gemm", {"Gemm"})
def rows_of_gemm(graph: Graph, op: Op) -> Match | None:
    """``reshape(gemm(reshape(x)))`` whose rows keep the leading axes of ``x``: ``x @ W + b``."""
    join, split, matrix = producer(graph, op.inputs[0], RESHAPES), graph.sole_user(op.value), constant_matrix(graph, op)
    if join is None or split is None or split.kind not in RESHAPES or matrix is None:
        return None
    x = operand(join)
    if not graph.type(x).is_static or not split.outputs[0].type.is_static:
        return None
    before, after, depth = graph.type(x).static_shape, split.outputs[0].type.static_shape, matrix.shape[0]
    axes = next((i for i in range(2, len(before)) if math.prod(before[i:]) == depth), None)
    if axes is None or depth == 0 or _longer(after)[: len(_longer(before[:axes]))] != _longer(before[:axes]):
        return None

    def build(patch: Patch) -> Value:
        rows = x if axes == len(before) - 1 else in_shape(patch, x, (*before[:axes], depth))
        y = multiplied(patch, rows, matrix.add_to(patch), matrix.bias)
        return y if patch.type(y).dims == after else in_shape(patch, y, after)

    return Match((op, split), build, split.value)


def _longer(shape: Sequence[int]) -> list[int]:
    """The sizes of axes that are longer than 1."""
    return [n for n in shape if n != 1]
