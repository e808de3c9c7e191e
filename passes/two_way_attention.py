"""Attention in both directions with one matrix of scores becomes two attentions, each with scores of its own.

Matchers of two images attend in both directions with one matrix of scores (LightGlue: Lindenberger et al., 2023): the weights of
the second direction are the softmax over the columns, transposed. The transposed scores are a product of the same factors in the
other order. So each direction is an attention of its own, which stores no scores.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.attention_scores import find_scores, has_stages
from optdnn.passes.support.facts import exchange_last, operand, producer
from optdnn.types import normalize_axis


@rule("softmax_of_columns", {"MatMul"})
def softmax_of_columns(graph: Graph, op: Op) -> Match | Miss | None:
    """``softmax(s, axis=-2)^T v`` with ``s = scale * q k^T`` is ``softmax(scale * k q^T) v``. Others may read ``s``."""
    turned = producer(graph, op.inputs[0], {"Transpose"})
    softmax = None if turned is None else producer(graph, operand(turned), {"Softmax"})
    rank = graph.type(op.value).rank
    if turned is None or softmax is None or rank is None or rank < 2 or turned.attrs.perm != exchange_last(rank):
        return None
    if normalize_axis(softmax.attrs.axis, rank) != rank - 2 or has_stages(op):
        return None
    found = find_scores(graph, operand(softmax), op.outputs[0].type.dtype)
    if isinstance(found, Miss) or found.rows or not {o.kind for o in found.ops} <= {"Mul", "Div"}:
        return None
    product, factor, scales = found.product, found.factor, found.ops
    if any(graph.constant_value(v) is not None for v in product.inputs):
        return Miss("a factor of its scores is constant, so they are no scores of queries and keys")
    for inner in (turned, softmax):
        if graph.sole_user(inner.value) is None:
            return Miss(f"an inner value is used elsewhere: {inner.outputs[0].name}")

    def build(patch: Patch) -> Value:
        exchange = TransposeAttrs(exchange_last(rank))
        k, q = (patch.add("Transpose", [operand(product, i)], exchange, src=product.src) for i in (1, 0))
        scores = patch.add("MatMul", [k, q], product.attrs, src=product.src)
        if scales:
            number = patch.constant(np.array(factor, op.outputs[0].type.dtype), "scale")
            scores = patch.add("Mul", [scores, number], src=frozenset().union(*(o.src for o in scales)))
        weights = patch.add("Softmax", [scores], replace(softmax.attrs, axis=rank - 1), src=softmax.src)
        return patch.add("MatMul", [weights, op.inputs[1]], op.attrs)

    return Match((op, turned, softmax), build)


class TwoWayAttention(RulePass):
    """Before attention is fused: an attention over the rows of scores is fused only if nothing else reads them."""

    name = "two_way_attention"
    rules = (softmax_of_columns,)
