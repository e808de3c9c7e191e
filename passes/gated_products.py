"""Gated linear units become two products, the second of which multiplies by the first one's result (Shazeer, "GLU variants", 2020).

Exporters write ``h * act(g)`` with ``[h, g] = x @ W + b``: one product, whose halves a pointwise operator reads and multiplies. As
two products, the activation is a stage of the first one's epilogue and the multiplication of the second one's: half of the columns
is neither written nor read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.checks import elements
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import ints, operand, producer
from optdnn.passes.support.products import PRODUCTS, added_vector, constant_matrix
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.types import Array, normalize_axis

LEAST = 1 << 20
"""Elements of the result from which on this traffic costs more than a second product's launch."""


@dataclass(frozen=True)
class _Part:
    """Columns ``start`` to ``end`` of ``whole``, which ``op`` takes."""

    whole: Value
    start: int
    end: int
    op: Op


def _part(graph: Graph, value: Value) -> _Part | None:
    """The columns of another value that this one is."""
    op, shape = graph.op(value), graph.type(value).shape
    if op.kind not in ("Slice", "Split") or shape is None or not isinstance(shape[-1], int):
        return None
    whole = operand(op)
    if op.kind == "Split":
        sizes = [graph.type(Value(op.id, port)).dims[-1] for port in range(len(op.outputs))]
        if normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1 or any(not isinstance(n, int) for n in sizes):
            return None
        start = sum(n for n in sizes[: value.port] if isinstance(n, int))
        return _Part(whole, start, start + shape[-1], op)
    starts, axes, steps = ints(graph, op.input(1)), ints(graph, op.input(3)), ints(graph, op.input(4))
    if starts is None or len(starts) != 1 or axes is None or axes[0] % len(shape) != len(shape) - 1 or starts[0] < 0:
        return None
    return None if steps not in (None, (1,)) else _Part(whole, starts[0], starts[0] + shape[-1], op)


@rule("gated_product", {"Mul"})
def gated_product(graph: Graph, op: Op) -> Match | Miss | None:
    """``h * act(g)``, where h and g are all columns of one product with a constant matrix, which nothing else reads."""
    for plain, gate in (op.inputs, op.inputs[::-1]):
        activation = producer(graph, gate, ACTIVATIONS, alone=True)
        if (
            activation is None
            or plain is None
            or any(graph.constant_value(v) is None for v in activation.inputs[1:] if v is not None)
        ):
            continue
        h, g = _part(graph, plain), _part(graph, operand(activation))
        if h is not None and g is not None and h.whole == g.whole:
            return _split(graph, op, activation, h, g)
    return None


def _split(graph: Graph, root: Op, activation: Op, h: _Part, g: _Part) -> Match | Miss | None:
    vectors, ops, value = list[Array](), [root, activation, *{x.id: x for x in (h.op, g.op)}.values()], h.whole
    while (addition := producer(graph, value, {"Add"})) is not None and (
        found := added_vector(graph, addition)
    ) is not None:
        value = found[0]
        vectors.insert(0, found[1])
        ops.append(addition)
    product = producer(graph, value, PRODUCTS)
    matrix = None if product is None else constant_matrix(graph, product)
    if product is None or matrix is None:
        return None
    covered = {x.id for x in ops}
    read = [h.whole, *(x.value for x in (*ops[2:], product) if len(x.outputs) == 1 and x not in (h.op, g.op))]
    inner = [Value(x.id, port) for x in (h.op, g.op) for port in range(len(x.outputs))]
    if any(user.id not in covered for v in (*read, *inner) for user in graph.users(v)):
        return Miss(f"something else reads columns of {product.name}")
    weight, bias = matrix
    array = weight if not isinstance(weight, Value) else graph.constant_value(weight)
    assert array is not None
    if sorted([(h.start, h.end), (g.start, g.end)]) != [(0, h.end - h.start), (h.end - h.start, array.shape[1])]:
        return Miss(f"its parts are not the halves of {product.name}")
    if elements(root.outputs[0].type) < LEAST:
        return Miss("its result is too small: a second product's launch would cost more than the traffic that it saves")
    added = [*([] if bias is None else [bias]), *vectors]

    def build(patch: Patch) -> Value:
        def columns(part: _Part, name: str) -> Value:
            cut = np.ascontiguousarray(array[:, part.start : part.end])
            y = patch.add("MatMul", [product.inputs[0], patch.constant(cut, f"{name}.weight")], MatMulAttrs())
            for vector in added:
                own = vector if vector.size == 1 else vector[part.start : part.end]
                y = patch.add("Add", [y, patch.constant(np.ascontiguousarray(own), f"{name}.bias")])
            return y

        gate = patch.add(activation.kind, [columns(g, "gate"), *activation.inputs[1:]], activation.attrs)
        return patch.add("Mul", [columns(h, "value"), gate])

    return Match((*ops, product), build)


class GatedProducts(RulePass):
    name = "gated_products"
    rules = (gated_product,)
