"""Biases of attention that are added one by one to scores in five dimensions are added up first, and then to the scores.

SAM and ViTDet (Li et al., 2022) give each pair of positions of an image a bias for its rows and one for its columns:
``scores.view(B, h, w, h, w) + rows[..., None] + columns[..., None, :]``. A kernel of attention reads both without their sum.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, producer
from optdnn.types import broadcast_dims


@rule("factored_bias", {"Softmax"})
def factored_bias(graph: Graph, op: Op) -> Match | Miss | None:
    """``softmax(reshape(reshape(s) + a + b))`` is ``softmax(s + reshape(a + b))``."""
    view = producer(graph, operand(op), RESHAPES, alone=True)
    outer = None if view is None else producer(graph, operand(view), {"Add"}, alone=True)
    if view is None or outer is None or not outer.outputs[0].type.is_static:
        return None
    for i in (0, 1):
        inner, last = producer(graph, outer.input(i), {"Add"}, alone=True), operand(outer, 1 - i)
        if inner is None:
            continue
        for j in (0, 1):
            split, first = producer(graph, inner.input(j), RESHAPES, alone=True), operand(inner, 1 - j)
            if split is None or graph.type(operand(split)).shape != view.outputs[0].type.shape:
                continue
            if broadcast_dims(graph.type(first).dims, graph.type(last).dims) != outer.outputs[0].type.dims:
                continue
            scores = operand(split)

            def build(patch: Patch, scores: Value = scores, first: Value = first, last: Value = last) -> Value:
                bias = patch.add("Add", [first, last])
                return patch.add("Add", [scores, in_shape(patch, bias, view.outputs[0].type.dims)])

            return Match((view, outer, inner, split), build)
    return None
