"""Attention in both directions with one matrix of scores becomes two attentions, each with scores of its own.

Matchers of two images attend in both directions with one matrix of scores (LightGlue: Lindenberger et al., 2023): the weights of
the second direction are the softmax over the columns, transposed. The transposed scores are a product of the same factors in the
other order. So each direction is an attention of its own, which stores no scores.
"""

from __future__ import annotations

from dataclasses import replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.attention_scores import DEPTH, factor_of, has_stages
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
    scales, product = _scaled_product(graph, operand(softmax))
    if product is None or [graph.type(v).rank for v in product.inputs[:2] if v is not None] != [rank] * 2:
        return None
    if any(graph.constant_value(v) is not None for v in product.inputs):
        return Miss("a factor of its scores is constant, so they are no scores of queries and keys")
    for inner in (turned, softmax):
        if graph.sole_user(inner.value) is None:
            return Miss(f"an inner value is used elsewhere: {inner.outputs[0].name}")

    def build(patch: Patch) -> Value:
        exchange = TransposeAttrs(exchange_last(rank))
        k, q = (patch.add("Transpose", [operand(product, i)], exchange, src=product.src) for i in (1, 0))
        scores = patch.add("MatMul", [k, q], product.attrs, src=product.src)
        for scale in reversed(scales):
            scores = patch.add(
                scale.kind, [scores if v == _inner(graph, scale) else v for v in scale.inputs], src=scale.src
            )
        weights = patch.add("Softmax", [scores], replace(softmax.attrs, axis=rank - 1), src=softmax.src)
        return patch.add("MatMul", [weights, op.inputs[1]], op.attrs)

    return Match((op, turned, softmax), build)


def _inner(graph: Graph, scale: Op) -> Value | None:
    found = factor_of(graph, scale)
    return None if found is None else found[0]


def _scaled_product(graph: Graph, value: Value) -> tuple[list[Op], Op | None]:
    """The multiplications by numbers that lead from ``value`` back to a product, the last one first, and this product or None."""
    scales: list[Op] = []
    for _ in range(DEPTH):
        op = graph.op(value)
        if op.kind == "MatMul":
            return scales, None if has_stages(op) else op
        inner = _inner(graph, op)
        if inner is None:
            break
        scales.append(op)
        value = inner
    return [], None


class TwoWayAttention(RulePass):
    """Before attention is fused: an attention over the rows of scores is fused only if nothing else reads them."""

    name = "two_way_attention"
    rules = (softmax_of_columns,)
