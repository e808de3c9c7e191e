"""Reshapes and transposes of rows move in front of the product of these rows with a matrix, and merge with the views there.

An attention's result is transposed, multiplied and, in PyTorch's exports, transposed or reshaped again before the residual is
added. Between product and addition, the second view would keep the addition out of the product's epilogue. In front of the
product it merges with the first one. A Gemm between reshapes of leading axes becomes a MatMul of the unflattened tensor.
"""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, operand, producer, shape_of
from optdnn.passes.support.pattern import ConstantVar, Var, node, pattern_rule
from optdnn.passes.support.products import PRODUCTS, added_vector, constant_matrix
from optdnn.passes.support.views import trace
from optdnn.types import Array

VIEWS = RESHAPES | {"Transpose"}
_MOST_ADDITIONS = 4


@rule("hoist_view", VIEWS)
def hoist_view(graph: Graph, op: Op) -> Match | Miss | None:
    """``view(view(x) @ W + b)`` is ``view(view(x)) @ W + b`` where the outer view leaves the last axis alone."""
    value = operand(op)
    before, after = shape_of(graph, value), op.outputs[0].type.shape
    if not before or not after or before[-1] != after[-1]:
        return None
    if op.kind == "Transpose" and (op.attrs.perm is None or op.attrs.perm[-1] != len(before) - 1):
        return None
    ops, vectors = [op], list[Array]()
    while (addition := producer(graph, value, {"Add"}, alone=True)) is not None:
        found = added_vector(graph, addition)
        if found is None or len(vectors) == _MOST_ADDITIONS:
            return None
        value = found[0]
        vectors.insert(0, found[1])
        ops.append(addition)
    product = producer(graph, value, PRODUCTS, alone=True)
    matrix = None if product is None else constant_matrix(graph, product)
    if product is None or matrix is None or producer(graph, product.inputs[0], VIEWS) is None:
        return None
    view = trace(graph, operand(product))
    if view is None:
        return None
    count = len(view.moves)
    shape = (*after[:-1], view.shape[-1])
    view = view.reshape(shape) if op.kind != "Transpose" else view.transpose(op.attrs.perm)
    if len(view.moves) > count or not view.expressible:
        return Miss(f"it does not merge with the views that {product.name} reads")
    weight, bias = matrix
    added = [*([] if bias is None else [bias]), *vectors]

    def build(patch: Patch) -> Value:
        right = weight if isinstance(weight, Value) else patch.constant(weight, "weight")
        y = patch.add("MatMul", [view.add_to(patch), right], MatMulAttrs())
        for vector in added:
            y = patch.add("Add", [y, patch.constant(vector, "bias")])
        return y

    return Match((*ops, product), build)


@pattern_rule(
    "add_before_reshape",
    node("Add", node("Reshape", Var("x"), Var("target"), name="reshape", alone=True), ConstantVar("bias")),
)
def add_before_split(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """``reshape(x @ W, [..., heads, size]) + b`` is ``reshape(x @ W + flat(b), ...)``: Keras's biases have an axis of heads."""
    x, reshape, bias = found["x"], found["reshape"], graph.op(found["bias"]).attrs.value
    before, after = shape_of(graph, x), reshape.outputs[0].type.shape
    if producer(graph, x, PRODUCTS, alone=True) is None or before is None or after is None:
        return None
    own = bias.shape[next((i for i, n in enumerate(bias.shape) if n != 1), bias.ndim) :]
    if root.outputs[0].type.shape != after or len(own) < 2:
        return None
    if own != after[len(after) - len(own) :] or bias.size != before[-1]:
        return None

    def build(patch: Patch) -> Value:
        y = patch.add("Add", [x, patch.constant(bias.reshape(-1), "bias")])
        return patch.add("Reshape", [y, found["target"]], reshape.attrs)

    return Match((root, reshape), build)


class HoistViews(RulePass):
    name = "hoist_views"
    rules = (hoist_view, add_before_split)
