"""Complex layers, which exporters write as four real layers, become one layer of both parts side by side, and a Split after it.

A complex layer has two real ones, R and I. Of the real part a and the imaginary part b it computes R(a) - I(b) and R(b) + I(a)
(Trabelsi et al., "Deep Complex Networks", 2018; DCCRN: Hu et al., 2020). That is one layer of the channels of a and b, with a
matrix of four blocks. It has as many multiplications, in one launch, which reads each value once.

Other sums of layers of two values stay: one of the values may be a state, and then the layers of the other one do not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import CONVOLUTIONS, operand, producer, split_along
from optdnn.passes.support.products import plain_product
from optdnn.types import Array


@dataclass(frozen=True)
class Term:
    """A layer of ``x`` with constant weights, which one sum reads. ``weight`` has input channels on axis ``of``, output channels on
    the other one of the first two axes. Layers with equal ``key`` differ only in their weights and biases."""

    x: Value
    weight: Array
    bias: Array | None
    of: int
    key: tuple[Any, ...]
    ops: tuple[Op, ...]

    def scaled(self, sign: int) -> Array:
        """The weights times ``sign``."""
        return self.weight if sign > 0 else -self.weight


@dataclass(frozen=True)
class Sum:
    """``op`` computes ``signs[0] * terms[0] + signs[1] * terms[1]``."""

    op: Op
    terms: tuple[Term, Term]
    signs: tuple[int, int]

    @property
    def turned(self) -> Sum:
        """The same sum, with its terms in the other order."""
        return Sum(self.op, self.terms[::-1], self.signs[::-1])

    @property
    def bias(self) -> Array | None:
        """The bias of both terms together."""
        own = [t.bias if s > 0 else -t.bias for t, s in zip(self.terms, self.signs, strict=True) if t.bias is not None]
        return sum(own[1:], own[0]) if own else None


@rule("complex_layer", {"Add", "Sub"})
def complex_layer(graph: Graph, op: Op) -> Match | Miss | None:
    """Two sums, of ``R(a)`` and ``I(b)`` and of ``I(a)`` and ``R(b)``, become one layer and a Split."""
    mine = _sum(graph, op)
    if mine is None:
        return None
    a, b = (t.x for t in mine.terms)
    first, second = mine.terms
    if first.key != second.key or graph.type(a) != graph.type(b):
        return Miss("the two layers that it adds differ in geometry or type")
    sums = _sums(graph, mine)
    if len(sums) != 2:
        return Miss("no other sum, or more than one, adds such layers of these two values")
    if not _crossed(sums):
        return Miss("the layers of one value have other weights than those of the other value")
    width = first.weight.shape[1 - first.of]
    rank = len(op.outputs[0].type.dims)
    axis = 1 if first.key[0] in CONVOLUTIONS else rank - 1

    def build(patch: Patch) -> None:
        both = patch.add("Concat", [a, b], ConcatAttrs(axis))
        parts = split_along(patch, _layer(patch, both, sums), axis, [width] * len(sums))
        patch.replace_each((each.op.value for each in sums), parts)

    layers = (o for each in sums for t in each.terms for o in t.ops)
    return Match((op, *(each.op for each in sums if each.op.id != op.id), *layers), build)


def _sum(graph: Graph, op: Op) -> Sum | None:
    """The sum of two layers of different values that ``op`` computes, or None."""
    if op.kind not in complex_layer.kinds or len({graph.type(v) for v in op.inputs if v is not None}) != 1:
        return None
    first, second = (_term(graph, operand(op, k)) for k in (0, 1))
    if first is None or second is None or first.x == second.x:
        return None
    return Sum(op, (first, second), (1, -1 if op.kind == "Sub" else 1))


def _term(graph: Graph, value: Value) -> Term | None:
    """The layer that computes a value for one reader, or None."""
    if graph.use_count(value) != 1:
        return None
    if (conv := producer(graph, value, CONVOLUTIONS)) is not None:
        weight, bias = graph.constant_value(conv.input(1)), graph.constant_value(conv.input(2))
        plain = not conv.attrs.epilogue and not conv.attrs.prologue and conv.attrs.group == 1
        if weight is None or not plain or (bias is None and conv.input(2) is not None):
            return None
        key = (conv.kind, conv.attrs, weight.shape, weight.dtype)
        return Term(operand(conv), weight, bias, 1 if conv.kind == "Conv" else 0, key, (conv,))
    product = plain_product(graph, value)
    if product is None:
        return None
    key = ("MatMul", None, product.weight.shape, product.weight.dtype)
    return Term(product.x, product.weight, product.bias, 0, key, product.ops)


def _sums(graph: Graph, mine: Sum) -> list[Sum]:
    """The sums of layers like those of ``mine``, of the same two values, in the order of their operators."""
    a, b = (t.x for t in mine.terms)
    found = dict[int, Sum]()
    for layer in graph.users(a):
        reader = graph.sole_user(layer.value)
        if reader is not None and reader.kind == "Add" and _term(graph, reader.value) is not None:
            reader = graph.sole_user(reader.value)  # a vector is added to a product
        each = None if reader is None else _sum(graph, reader)
        if each is None or {t.x for t in each.terms} != {a, b} or any(t.key != mine.terms[0].key for t in each.terms):
            continue
        found[each.op.id] = each if each.terms[0].x == a else each.turned
    return [found[k] for k in sorted(found)]


def _crossed(sums: Sequence[Sum]) -> bool:
    """Whether the first sum's layers are those of the second sum, each on the other value, perhaps with another sign."""
    (r, i), (other_i, other_r) = (each.terms for each in sums)
    pairs = ((r.weight, other_r.weight), (i.weight, other_i.weight))
    return all(a is b or np.array_equal(a, b) or np.array_equal(a, -b) for a, b in pairs)


def _layer(patch: Patch, x: Value, sums: Sequence[Sum]) -> Value:
    """The layer of both values side by side that computes all sums side by side."""
    first = sums[0].terms[0]
    rows = [np.concatenate([t.scaled(s) for t, s in zip(e.terms, e.signs, strict=True)], axis=first.of) for e in sums]
    weight = patch.constant(np.concatenate(rows, axis=1 - first.of), "pair.weight")
    biases, bias = [e.bias for e in sums], None
    if any(own is not None for own in biases):
        zeros = np.zeros(first.weight.shape[1 - first.of], first.weight.dtype)
        bias = patch.constant(np.concatenate([zeros if own is None else own for own in biases]), "pair.bias")
    kind, attrs = first.key[:2]
    if kind in CONVOLUTIONS:
        return patch.add(kind, [x, weight] if bias is None else [x, weight, bias], attrs)
    if len(patch.type(x).dims) == 2:
        return patch.add("Gemm", [x, weight] if bias is None else [x, weight, bias], GemmAttrs())
    y = patch.add("MatMul", [x, weight], MatMulAttrs())
    return y if bias is None else patch.add("Add", [y, bias])


class ComplexLayers(RulePass):
    """Complex layers, written as four real layers, become one layer of both parts side by side, and a Split after it."""

    name = "complex_layers"
    rules = (complex_layer,)
