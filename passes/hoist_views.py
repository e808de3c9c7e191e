"""Reshapes and transpositions of rows pass the products of these rows with a matrix, up to the views that they come from.

An attention's result is transposed, multiplied and, in PyTorch's exports, transposed or reshaped again before the residual is
added: between product and addition the second view would keep the addition out of the product's epilogue. In front of the
product it merges with the first one. A Gemm between reshapes of leading axes becomes a MatMul of the unflattened tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.rules.shape import RESHAPES
from optdnn.passes.support.views import View, trace
from optdnn.types import Array

VIEWS = RESHAPES | {"Transpose"}
_MOST_ADDITIONS = 4


@dataclass(frozen=True)
class Rows:
    """A product of rows with a matrix: what it multiplies, and the vectors that are added then."""

    view: View
    """Of the product's left operand, with the view behind the product in front of it."""
    weight: Value | Array
    vectors: tuple[Array, ...]
    result: Value


class HoistView(Rule):
    """``view(view(x) @ W + b)`` is ``view(view(x)) @ W + b`` where the outer view leaves the last axis alone."""

    name = "hoist_view"
    kinds = VIEWS

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        value = op.inputs[0]
        after, before = op.outputs[0].type.shape, None if value is None else graph.type(value).shape
        if value is None or before is None or after is None or not before or not after or before[-1] != after[-1]:
            return None
        if op.kind == "Transpose" and (op.attrs.perm is None or op.attrs.perm[-1] != len(before) - 1):
            return None
        ops = [op]
        vectors: list[Array] = []
        while (inner := graph.op(value)).kind == "Add" and graph.sole_user(value) is not None:
            found = _vector(graph, inner)
            if found is None or len(vectors) == _MOST_ADDITIONS:
                return None
            value, vector = found
            vectors.append(vector)
            ops.append(inner)
        if inner.kind not in ("MatMul", "Gemm") or graph.sole_user(value) is None:
            return None
        matrix = _matrix(graph, inner)
        rows = inner.inputs[0]
        if matrix is None or rows is None or graph.op(rows).kind not in VIEWS:
            return None
        weight, bias = matrix
        view = trace(graph, rows)
        if view is None:
            return None
        count = len(view.moves)
        width = view.shape[-1]
        view = view.reshape((*after[:-1], width)) if op.kind != "Transpose" else view.transpose(op.attrs.perm)
        if len(view.moves) > count or not view.expressible:
            return Miss(f"it does not merge with the views that {inner.name} reads")
        ops.append(inner)
        added = (*(() if bias is None else (bias,)), *reversed(vectors))
        return Match(tuple(ops), Rows(view, weight, added, op.value))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        found: Rows = match.data
        patch = Patch(graph, match.ops)
        x = found.view.add_to(patch)
        assert x is not None, "it was expressible"
        weight = found.weight if isinstance(found.weight, Value) else patch.constant(found.weight, "weight")
        y = patch.add("MatMul", [x, weight], MatMulAttrs())
        for vector in found.vectors:
            y = patch.add("Add", [y, patch.constant(vector, "bias")])
        patch.replace(found.result, y)
        return patch


class AddBeforeSplit(Rule):
    """``reshape(x @ W, [..., heads, size]) + b`` is ``reshape(x @ W + flat(b), ...)``: Keras's biases have an axis of heads."""

    name = "add_before_reshape"
    kinds = frozenset({"Add"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        for value, other in (op.inputs, op.inputs[::-1]):
            bias = graph.constant_value(other)
            if value is None or bias is None or graph.op(value).kind != "Reshape":
                continue
            reshape = graph.op(value)
            x, target = reshape.inputs[:2]
            if x is None or target is None or graph.op(x).kind not in ("MatMul", "Gemm"):
                continue
            if graph.sole_user(value) is None or graph.sole_user(x) is None:
                continue
            before, after = graph.type(x).shape, graph.type(value).shape
            if before is None or after is None or op.outputs[0].type.shape != after or bias.ndim < 2:
                continue
            own = bias.shape[next((i for i, n in enumerate(bias.shape) if n != 1), bias.ndim) :]
            if len(own) >= 2 and own == after[len(after) - len(own) :] and bias.size == before[-1]:
                return Match((op, reshape), (x, bias.reshape(-1), target, reshape.attrs))
        return None

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        x, bias, target, attrs = match.data
        patch = Patch(graph, match.ops)
        y = patch.add("Add", [x, patch.constant(bias, "bias")])
        patch.replace(match.ops[0].value, patch.add("Reshape", [y, target], attrs))
        return patch


def _vector(graph: Graph, op: Op) -> tuple[Value, Array] | None:
    """The operand of an addition whose other one is constant along all axes but the last: (operand, that vector)."""
    for i in (0, 1):
        value, array = op.inputs[i], graph.constant_value(op.inputs[1 - i])
        if value is None or array is None or graph.type(value).shape != op.outputs[0].type.shape:
            continue
        if array.size == (array.shape[-1] if array.ndim else 1):
            return value, array.reshape(-1) if array.ndim else array.reshape(1)
    return None


def _matrix(graph: Graph, op: Op) -> tuple[Value | Array, Array | None] | None:
    """The constant matrix and vector of a product without stages."""
    array, weight = graph.constant_value(op.inputs[1]), op.inputs[1]
    if array is None or weight is None or array.ndim != 2 or op.attrs.prologue or op.attrs.epilogue:
        return None
    if op.kind == "MatMul":
        return weight, None
    if op.attrs.transA or op.attrs.alpha != 1.0:
        return None
    bias = None
    if op.input(2) is not None:
        bias = graph.constant_value(op.inputs[2])
        if bias is None or op.attrs.beta != 1.0 or bias.size != (bias.shape[-1] if bias.ndim else 1):
            return None
        bias = bias.reshape(-1)
    return (np.ascontiguousarray(array.T) if op.attrs.transB else weight), bias


class HoistViews(RulePass):
    """Each view once it stands behind a product."""

    name = "hoist_views"
    rules = (HoistView(), AddBeforeSplit())
