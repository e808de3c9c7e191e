"""Products whose halves are multiplied with one another become two products: gated linear units whose weights lie side by side.

``a, b = split(x @ W); y = a * gelu(b)`` has a launch for the product and one for the rest. As two products, one multiplied by the
other, all of it is the work of products: the activation and the multiplication are stages of their epilogues.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand, producer
from optdnn.passes.support.parts import whole
from optdnn.passes.support.products import PRODUCTS, added_vector, constant_matrix
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.types import Array


@dataclass(frozen=True)
class _Product:
    """``x @ weight``, plus ``bias`` (a vector) where there is one; ``ops`` compute it."""

    x: Value
    weight: Array
    bias: Array | None
    ops: tuple[Op, ...]


@rule("split_product", {"Mul"})
def split_product(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(first) * g(second)``, the parts of ``x @ W + b``, is ``f(x @ W0 + b0) * g(x @ W1 + b1)``."""
    a, b = (_before_activations(graph, operand(op, i)) for i in (0, 1))
    if a == b or (joined := whole(graph, a, b) or whole(graph, b, a)) is None:
        return None
    first, second = (a, b) if whole(graph, a, b) is not None else (b, a)
    found = _product(graph, joined)
    if found is None:
        return None
    splitting = {graph.op(v).id: graph.op(v) for v in (a, b)}
    readers = [u for v in (joined, a, b) for u in graph.users(v) if u.id not in splitting]
    if len(readers) > 2 or any(len(graph.uses(v)) > 1 for v in (a, b)):
        return Miss(f"a part of {found.ops[-1].name} has another reader")
    cut = graph.type(first).dims[-1]
    assert isinstance(cut, int)

    def build(patch: Patch) -> None:
        for part, columns in ((first, slice(None, cut)), (second, slice(cut, None))):
            name = graph.output(part).name
            weight = np.ascontiguousarray(found.weight[:, columns])
            y = patch.add("MatMul", [found.x, patch.constant(weight, f"{name}.weight")], MatMulAttrs())
            if found.bias is not None:
                y = patch.add("Add", [y, patch.constant(found.bias[columns], f"{name}.bias")])
            patch.replace(part, y)

    return Match((*splitting.values(), *found.ops), build)


def _before_activations(graph: Graph, value: Value) -> Value:
    """The value that activations lead from to ``value``, each with one reader."""
    while (op := producer(graph, value, ACTIVATIONS, alone=True)) is not None:
        value = operand(op)
    return value


def _product(graph: Graph, value: Value) -> _Product | None:
    """The product without stages that computes a value."""
    ops: list[Op] = []
    vectors: list[Array] = []
    if (addition := producer(graph, value, {"Add"})) is not None:
        found = added_vector(graph, addition)
        if found is None:
            return None
        value = found[0]
        vectors.append(found[1])
        ops.append(addition)
    op = producer(graph, value, PRODUCTS, alone=bool(ops))
    taken = None if op is None else constant_matrix(graph, op)
    if op is None or taken is None:
        return None
    matrix, own = taken
    weight = graph.constant_value(matrix) if isinstance(matrix, Value) else matrix
    assert weight is not None
    vectors += [] if own is None else [own]
    bias = np.array(np.broadcast_to(sum(vectors), weight.shape[1:])) if vectors else None
    return _Product(operand(op), weight, bias, (*ops, op))


class SplitProducts(RulePass):
    name = "split_products"
    rules = (split_product,)
