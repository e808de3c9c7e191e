"""Features of an attention that are joined in another order than the heads': the rows of the next product's matrix are reordered.

NesT joins its heads as ``(features, heads)``, which is no view of an attention's result.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, VIEWS, in_shape, operand, producer

_DEPTH = 6
"""Most views between an attention and a product."""


@rule("ordered_features", {"MatMul"})
def ordered_features(graph: Graph, op: Op) -> Match | Miss | None:
    """``reshape(transpose(y)) W`` of an attention's result ``y`` joins the axes in the order of ``y``, and W has its rows in it."""
    join = producer(graph, op.inputs[0], RESHAPES)
    turn = None if join is None else producer(graph, join.inputs[0], {"Transpose"})
    weight = graph.constant_value(op.inputs[1])
    if join is None or turn is None or weight is None or weight.ndim != 2 or op.attrs != MatMulAttrs():
        return None
    if not turn.attrs.perm or not turn.outputs[0].type.is_static or not _of_attention(graph, operand(turn)):
        return None
    dims, perm = turn.outputs[0].type.static_shape, turn.attrs.perm
    first = next((i for i in range(len(dims)) if math.prod(dims[i:]) == len(weight)), len(dims))
    tail = perm[first:]
    if first == len(dims) or tail == tuple(sorted(tail)) or join.outputs[0].type.static_shape[-1] != len(weight):
        return None
    if graph.sole_user(turn.value) is None or graph.sole_user(join.value) is None:
        return Miss("its operand is read elsewhere, in the order of its features")
    order = np.arange(len(weight)).reshape(dims[first:]).transpose(np.argsort(tail)).reshape(-1)

    def build(patch: Patch) -> Value:
        x = patch.add("Transpose", [operand(turn)], TransposeAttrs((*perm[:first], *sorted(tail))), src=turn.src)
        rows = patch.constant(np.ascontiguousarray(weight[order]), graph.output(operand(op, 1)).name)
        return patch.add("MatMul", [in_shape(patch, x, join.outputs[0].type.dims), rows], op.attrs)

    return Match((op, join, turn), build)


def _of_attention(graph: Graph, value: Value) -> bool:
    for _ in range(_DEPTH):
        op = graph.op(value)
        if op.kind not in VIEWS:
            return op.kind == "Attention"
        value = operand(op)
    return False
