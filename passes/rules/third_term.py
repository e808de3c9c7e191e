"""Sums of products, residuals and biases are reordered, so that kernels of products add them.

ONNX Runtime's optimizer moves the bias of a product into SkipLayerNormalization, which adds it after the residual. The blocks of
GPT-J (Wang and Komatsuzaki, 2021), Falcon and Cohere have parallel attention and feed-forward units. They add the results of both,
and then the residual.
"""

from __future__ import annotations

from functools import partial

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.affine import variable
from optdnn.passes.support.facts import operand, producer
from optdnn.passes.support.stages import ANCHORS
from optdnn.types import Array, is_float

PRODUCING = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
"""Kinds whose kernels add a constant for each column or channel."""


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


@rule("bias_first", {"Add"})
def bias_first(graph: Graph, op: Op) -> Match | Miss | None:
    """``(p + r) + bias`` becomes ``(p + bias) + r`` for a product or convolution p and a constant for each of its columns."""
    bias = graph.constant_value(op.inputs[1])
    total = producer(graph, op.inputs[0], {"Add"})
    if bias is None or total is None or not is_float(op.outputs[0].type.dtype):
        return None
    for p, r in (total.inputs, total.inputs[::-1]):
        anchor = None if p is None or r is None else producer(graph, p, PRODUCING, alone=True)
        if p is None or r is None or anchor is None or graph.constant_value(r) is not None:
            continue
        if graph.type(p).shape != op.outputs[0].type.shape or not _per_column(graph, anchor, bias):
            return None
        if graph.sole_user(total.value) is None:
            return Miss(f"the result of {total.name} is used {graph.use_count(total.value)} times")
        return Match((op, total), partial(_biased, p, r, operand(op, 1)))
    return None


def _biased(p: Value, r: Value, bias: Value, patch: Patch) -> Value:
    return patch.add("Add", [patch.add("Add", [p, bias]), r])


def _per_column(graph: Graph, anchor: Op, bias: Array) -> bool:
    """Whether a constant has one number for each column of a product, or for each channel of a convolution."""
    rank = anchor.outputs[0].type.rank or 0
    axis = -1 if anchor.kind in ("MatMul", "Gemm") else 1 - rank
    shape = bias.shape if bias.ndim >= -axis else ()
    return bias.size > 1 and bool(shape) and shape[axis] == bias.size == anchor.outputs[0].type.dims[axis]


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
