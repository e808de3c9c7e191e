"""Attention whose heads are mixed before and after the softmax becomes attention over the features of all heads, and a product.

Talking heads (Shazeer et al., 2020; CaiT: Touvron et al., 2021) mix the maps of ``H`` heads by a matrix ``W`` before the softmax
and by a matrix ``U`` after it. With this rewrite, no map has to be stored:

- Before the softmax, the scores ``sum_h W[h, g] q_h k_h^T`` are one product over the features of all heads: the queries times
  ``W[h, g]``, and the keys unchanged. An added vector disappears, since it is constant along a row of the softmax.
- After the softmax, map ``g`` multiplies the values of all heads. One product with a constant matrix, built from ``U``, adds up
  each head's share. An added vector ``c`` contributes ``c_h`` times the sum of the values of head ``h``.

Where maps are stored, in fp32 for example, both mixings become products that read and write heads as the products and the softmax
around them do. So does a convolution by 1 x 1 filters over the heads, which would read them as the channels of pixels: the maps
would be copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.support.attention_scores import factor_of, has_stages
from optdnn.passes.support.facts import HEADS_FIRST, integers, operand, producer, reshaped
from optdnn.passes.support.products import added_vector
from optdnn.passes.support.views import transposed
from optdnn.types import Array, normalize_axis

WIDEST = 512
"""Most features of all heads together: with more, the products take longer than storing the maps."""
WIDE = frozenset({"fp32", "fp64"})
"""Precisions whose attention has no kernel for so many features: the maps are stored."""
TO_LAST, FROM_LAST = (0, 2, 3, 1), (0, 3, 1, 2)
"""Permutations that move the heads after queries and keys, and back."""
MAPS = frozenset({"MatMul", "Softmax"})
"""Operators that read or write the maps of heads."""
AROUND = frozenset({"Add", "Div", "Mul", "Where"})
"""Scales and masks."""
MOST_STEPS = 5
"""Most operators between a convolution and the next product or softmax."""


@dataclass(frozen=True)
class Mixing:
    """``maps`` times a constant matrix over the heads, plus a vector (or None). ``ops``: the operators that compute this."""

    maps: Value
    matrix: Array
    vector: Array | None
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Talking:
    """``mix(softmax(mix(q k^T))) v`` of (B, H, N, D): the product ``scores`` of queries and keys, and all operators after it."""

    scores: Op
    before: Mixing
    after: Mixing
    ops: tuple[Op, ...]
    sizes: tuple[tuple[int, ...], ...]
    """The shapes of queries, of the transposed keys, and of values."""


def _talking(graph: Graph, op: Op) -> Talking | Miss | None:
    """The attention with mixed heads that ends in the product ``op``."""
    back = producer(graph, op.inputs[0], {"Transpose"}, alone=True)
    if back is None or tuple(back.attrs.perm or ()) != FROM_LAST or has_stages(op):
        return None
    after = _mixing(graph, operand(back))
    softmax = None if after is None else producer(graph, after.maps, {"Softmax"}, alone=True)
    if after is None or softmax is None or normalize_axis(softmax.attrs.axis, 4) != 2:
        return None
    before = _mixing(graph, operand(softmax))
    turn = None if before is None else producer(graph, before.maps, {"Transpose"}, alone=True)
    if before is None or turn is None or tuple(turn.attrs.perm or ()) != TO_LAST:
        return None
    scores = producer(graph, turn.inputs[0], {"MatMul"}, alone=True)
    if scores is None or has_stages(scores):
        return Miss("the mixed scores are not a product of queries and keys with no other reader")
    operands = (*scores.inputs[:2], op.inputs[1])
    types = [graph.type(v) for v in operands if v is not None]
    if any(not t.is_static or len(t.static_shape) != 4 for t in types):
        return Miss("its sizes are not known")
    ops = (op, back, *after.ops, softmax, *before.ops, turn)
    return Talking(scores, before, after, ops, tuple(t.static_shape for t in types))


@rule("talking_heads", {"MatMul"})
def talking_heads(graph: Graph, op: Op) -> Match | Miss | None:
    """Attention over the features of all heads."""
    found = _talking(graph, op)
    if not isinstance(found, Talking):
        return found
    q, k, v = found.sizes
    if q[:2] != k[:2] or q[:2] != v[:2] or q[1] * max(q[3], v[3]) > WIDEST:
        return Miss(f"its {q[1]} heads of {max(q[3], v[3])} features have more than {WIDEST} features together")
    scores = found.scores
    return Match((*found.ops, scores), lambda patch: _rewrite(patch, op, scores, found.before, found.after))


@rule("talking_products", {"MatMul"})
def talking_products(graph: Graph, op: Op) -> Match | Miss | None:
    """Products with the maps as they are stored: the heads are not moved to the last axis and back."""
    found = _talking(graph, op)
    if not isinstance(found, Talking):
        return found
    (batch, heads, rows, _), (*_, columns) = found.sizes[:2]
    if found.sizes[1][:2] != (batch, heads) or found.sizes[2][:2] != (batch, heads):
        return Miss("its queries, keys and values do not have the same batch and heads")

    def mixed(patch: Patch, maps: Value, mixing: Mixing) -> Value:
        shares = None if mixing.vector is None else patch.constant(mixing.vector.reshape(-1, 1), "shares")
        return _over_heads(patch, maps, (batch, rows, columns), np.ascontiguousarray(mixing.matrix.T), shares)

    def build(patch: Patch) -> Value:
        before = replace(found.before, vector=None)  # it is constant along a row of the softmax
        maps = patch.add("Softmax", [mixed(patch, found.scores.value, before)], SoftmaxAttrs(-1))
        return patch.add("MatMul", [mixed(patch, maps, found.after), operand(op, 1)], MatMulAttrs())

    return Match(found.ops, build)


@rule("mixed_heads", {"Conv"})
def mixed_heads(graph: Graph, op: Op) -> Match | None:
    """A convolution by 1 x 1 filters between products and a softmax, of maps (B, H, N, M)."""
    types = [graph.type(operand(op)), op.outputs[0].type]
    weights, bias = graph.constant_value(operand(op, 1)), None if op.input(2) is None else operand(op, 2)
    if weights is None or weights.shape[2:] != (1, 1) or op.attrs.group != 1 or has_stages(op):
        return None
    if (
        not all(t.is_static and len(t.dims) == 4 for t in types)
        or types[0].static_shape[2:] != types[1].static_shape[2:]
    ):
        return None
    if not _from_maps(graph, operand(op)) or not _to_maps(graph, op.value):
        return None
    batch, _, rows, columns = types[0].static_shape

    def build(patch: Patch) -> Value:
        shares = None if bias is None else reshaped(patch, bias, (len(weights), 1))
        return _over_heads(patch, operand(op), (batch, rows, columns), weights[:, :, 0, 0], shares)

    return Match((op,), build)


def _over_heads(patch: Patch, maps: Value, sizes: tuple[int, int, int], matrix: Array, shares: Value | None) -> Value:
    """The maps (B, H, N, M) times a matrix (new heads, H), plus ``shares`` (new heads, 1). ``sizes``: B, N and M."""
    (batch, rows, columns), (made, given) = sizes, matrix.shape
    x = reshaped(patch, maps, (batch, given, rows * columns))
    y = patch.add("MatMul", [patch.constant(matrix, "heads"), x], MatMulAttrs())
    if shares is not None:
        y = patch.add("Add", [y, shares])
    return reshaped(patch, y, (batch, made, rows, columns))


def _from_maps(graph: Graph, value: Value) -> bool:
    """Whether ``value`` is a softmax or a batched product, possibly scaled or masked."""
    for _ in range(MOST_STEPS):
        op = graph.op(value)
        if op.kind in MAPS:
            return op.kind == "Softmax" or all(graph.type(v).rank == 4 for v in op.inputs[:2] if v is not None)
        if op.kind not in AROUND:
            return False
        found = [v for v in op.inputs if v is not None and graph.type(v).shape == op.outputs[0].type.shape]
        value = next((v for v in found if graph.constant_value(v) is None), value)
    return False


def _to_maps(graph: Graph, value: Value) -> bool:
    """Whether the only reader of ``value`` is a softmax or a batched product, possibly after a scale or a mask."""
    for _ in range(MOST_STEPS):
        use = graph.sole_user(value)
        if use is None or use.kind not in AROUND:
            return use is not None and use.kind in MAPS
        value = use.value
    return False


def _mixing(graph: Graph, value: Value) -> Mixing | None:
    ops: list[Op] = []
    vector = None
    addition = producer(graph, value, {"Add"}, alone=True)
    if addition is not None:
        found = added_vector(graph, addition)
        if found is None:
            return None
        (value, vector), ops = found, [addition]
    product = producer(graph, value, {"MatMul"}, alone=True)
    matrix = None if product is None else graph.constant_value(product.input(1))
    if product is None or matrix is None or matrix.ndim != 2 or has_stages(product):
        return None
    return Mixing(operand(product), matrix, vector, (*ops, product))


def _rewrite(patch: Patch, op: Op, scores: Op, before: Mixing, after: Mixing) -> Value:
    graph = patch.graph
    queries, factor = factor_of(graph, graph.op(operand(scores))) or (operand(scores), 1.0)
    keys, values = operand(scores, 1), operand(op, 1)
    batch, heads, rows, size = graph.type(queries).static_shape
    _, _, count, valued = graph.type(values).static_shape
    mixed = before.matrix.shape[1]
    q = reshaped(patch, transposed(patch, queries, HEADS_FIRST), (batch, 1, rows, heads * size))
    weights = np.repeat(before.matrix.T, size, axis=1) * before.matrix.dtype.type(factor)
    q = patch.add("Mul", [q, patch.constant(weights[None, :, None, :], "mixed")])
    maps = patch.add("MatMul", [q, reshaped(patch, keys, (batch, 1, heads * size, count))], MatMulAttrs())
    maps = patch.add("Softmax", [maps], SoftmaxAttrs(-1))
    v = reshaped(patch, transposed(patch, values, HEADS_FIRST), (batch, 1, count, heads * valued))
    y = patch.add("MatMul", [maps, v], MatMulAttrs())
    y = reshaped(patch, transposed(patch, y, HEADS_FIRST), (batch, rows, mixed * heads * valued))
    y = patch.add("MatMul", [y, patch.constant(_taken(after.matrix, valued), "heads")], MatMulAttrs())
    y = transposed(patch, reshaped(patch, y, (batch, rows, heads, valued)), HEADS_FIRST)
    if after.vector is not None:
        total = patch.add("ReduceSum", [values, integers(patch, [2], "axes")], ReduceAttrs(True))
        shares = patch.constant(after.vector.reshape(1, heads, 1, 1), "shares")
        y = patch.add("Add", [y, patch.add("Mul", [total, shares])])
    return y


def _taken(matrix: Array, size: int) -> Array:
    """The matrix (mixed * heads * size, heads * size) that adds up, for each head, its values under each map times their shares."""
    mixed, heads = matrix.shape
    found: Array = np.zeros((mixed, heads, size, heads, size), matrix.dtype)
    head, feature = np.arange(heads)[:, None], np.arange(size)
    for g in range(mixed):
        found[g, head, feature, head, feature] = matrix[g][:, None]
    return found.reshape(mixed * heads * size, heads * size)


class TalkingHeads(RulePass):
    name = "talking_heads"
    rules = (talking_heads, talking_products, mixed_heads)

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        """Only attention in 16 bits has a kernel for the features of all heads."""
        plan, values = context.plan, (v for op in graph.of_kind("Softmax") for v in op.inputs[:1] if v is not None)
        asked = (
            {context.precision} if plan is None else {context.precision, plan.default, plan.base, *plan.nodes.values()}
        )
        stored = asked <= WIDE and not any(graph.type(v).dtype.itemsize == 2 for v in values)
        return (talking_products if stored else talking_heads, mixed_heads)
