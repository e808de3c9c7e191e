"""Products of one value whose results meet in pointwise arithmetic become one product, and a Split after it.

The cells of closed-form continuous-time networks (Hasani et al., 2022) have four products of one vector: two candidates, and two
terms of the gate that blends them. As epilogues, the arithmetic of the gate would make each product wait for the one before it. One
product computes all of them, and one launch does the arithmetic. The parts of the Split are read in place.

Two products stay: one launch computes a gated unit, or the arithmetic is an epilogue of the second product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.fuse_siblings import ALIGNED, LAUNCH_BYTES
from optdnn.passes.support.facts import bytes_of, operand, split_along
from optdnn.passes.support.products import PRODUCTS, PlainProduct, added_vector, plain_product

LEAST_GATES = 3
"""Fewest products that become one: the arithmetic is a launch of its own then."""
MOST_OPS = 64
"""Most pointwise operators between a product and the one in which products meet."""


@dataclass(frozen=True)
class Gate:
    """A product with constant weights, and its result: after the addition of a vector, if there is one."""

    value: Value
    product: PlainProduct


@rule("sibling_gates", PRODUCTS)
def sibling_gates(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """At least three products of one value, whose results have one type and meet in pointwise arithmetic, become one."""
    x = operand(op)
    products = [u for u in graph.users(x) if u.kind in PRODUCTS and u.inputs[0] == x]
    if len(products) < LEAST_GATES or products[0].id != op.id:
        return None
    found = [gate for u in products if (gate := _gate(graph, u)) is not None]
    gates = _meeting(graph, found)
    if len(gates) < LEAST_GATES:
        return Miss(f"fewer than {LEAST_GATES} products of this value meet in pointwise arithmetic")
    dims = graph.type(gates[0].value).dims
    width = dims[-1]
    if not isinstance(width, int) or width % ALIGNED:
        return Miss(f"their columns are no multiple of {ALIGNED}, so that the parts could not be read in place")
    moved = 2 * sum(bytes_of(graph, g.value) for g in gates)
    saved = (len(gates) - LEAST_GATES + 1) * LAUNCH_BYTES
    if context.counted(moved) > saved:
        return Miss(
            f"the results would be stored ({moved / 1e6:.1f} MB) to save launches that take as long as {saved / 1e6:.1f} MB"
        )

    def build(patch: Patch) -> None:
        whole = _joined(patch, x, gates, len(dims))
        parts = split_along(patch, whole, len(dims) - 1, [width] * len(gates))
        patch.replace_each((gate.value for gate in gates), parts)

    return Match(tuple(o for g in gates for o in g.product.ops), build)


def _gate(graph: Graph, op: Op) -> Gate | None:
    """The product ``op`` with the vector that is added to it, if all readers of the result are pointwise; else None."""
    reader = graph.sole_user(op.value)
    added = reader is not None and reader.kind == "Add" and added_vector(graph, reader) is not None
    value = reader.value if added and reader is not None else op.value
    product = plain_product(graph, value)
    readers = graph.users(value)
    if product is None or not readers or any(u.kind not in STAGE_KINDS for u in readers):
        return None
    return Gate(value, product)


def _meeting(graph: Graph, gates: Sequence[Gate]) -> list[Gate]:
    """The most products of one type from which pointwise operators on values of that type lead to one operator."""
    reached = [(gate, _reached(graph, gate.value)) for gate in gates]
    most: list[Gate] = []
    for at in sorted({one for _, ops in reached for one in ops}):
        here = [gate for gate, ops in reached if at in ops]
        kind = _kind(graph, here[0])
        alike = [gate for gate in here if _kind(graph, gate) == kind]
        most = alike if len(alike) > len(most) else most
    return most


def _kind(graph: Graph, gate: Gate) -> tuple[object, object]:
    """What products must have in common: the type of the result, and of the weights."""
    return graph.type(gate.value), gate.product.matrix.stored.dtype


def _reached(graph: Graph, value: Value) -> set[int]:
    """The pointwise operators that compute values of the type of ``value`` from it."""
    wanted, found, open_values = graph.type(value), set[int](), [value]
    while open_values and len(found) < MOST_OPS:
        for user in graph.users(open_values.pop()):
            if user.id not in found and user.kind in STAGE_KINDS and graph.type(user.value) == wanted:
                found.add(user.id)
                open_values.append(user.value)
    return found


def _joined(patch: Patch, x: Value, gates: Sequence[Gate], rank: int) -> Value:
    """The product of ``x`` with the weights of all gates side by side, and their vectors added."""
    products = [gate.product for gate in gates]
    weight = patch.constant(np.concatenate([p.weight for p in products], axis=1), "gates.weight")
    bias: Value | None = None
    if any(p.bias is not None for p in products):
        zeros = np.zeros(products[0].matrix.shape[1], products[0].matrix.stored.dtype)
        biases = [zeros if p.bias is None else p.bias for p in products]
        bias = patch.constant(np.concatenate(biases).astype(zeros.dtype), "gates.bias")
    if rank == 2:
        return patch.add("Gemm", [x, weight] if bias is None else [x, weight, bias], GemmAttrs())
    y = patch.add("MatMul", [x, weight], MatMulAttrs())
    return y if bias is None else patch.add("Add", [y, bias])


class GatesOfSiblings(RulePass):
    """Products of one value whose results meet in pointwise arithmetic become one product, and a Split after it."""

    name = "sibling_gates"
    rules = (sibling_gates,)
