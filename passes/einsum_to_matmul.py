"""Einsum, and the sum of a multiplication, become products of matrices, which kernels and all later passes know.

Operands of an Einsum are contracted from the left, two at a time:

- A label that both operands have is a batch axis if the result or a later operand needs it; otherwise the product sums over it.
- The other labels are the rows and columns. Several labels of one role become one axis, by reshapes around the product.
- If nothing is summed, the operands are multiplied elementwise, which pointwise kernels do without copies.
- An operand is summed before the product over labels that neither the other operands nor the result have.

A ReduceSum after a Mul that broadcasts both operands is such a product, too: Mamba-2 in Transformers is written so. A reduction
would compute all of its products one by one, without tensor cores.

A product of a constant matrix with columns becomes a product of rows (``passes/rules/column_products.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs, einsum_terms
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.column_products import column_products
from optdnn.passes.support.facts import integers, operand, producer, reduction_axes, reshaped, sizes_of
from optdnn.types import is_float

LEAST_SIDE = 4
"""Fewest rows, and fewest columns, of a multiplication that becomes a product of matrices."""


LEAST_TERMS = 4
"""Fewest terms of the sums of an Einsum that becomes a product of matrices, if one of its operands would be copied for that."""


@dataclass(frozen=True)
class Term:
    """A value with a label per axis."""

    value: Value
    labels: tuple[str, ...]


@rule("einsum_to_matmul", {"Einsum"})
def einsum_products(graph: Graph, op: Op) -> Match | Miss | None:
    """An Einsum of floats. Refuses diagonals, unknown sizes, axes of size 1 that broadcast, integers, and short sums."""
    values = [v for v in op.inputs if v is not None]
    types = [graph.type(v) for v in values]
    if not all(t.is_static for t in types):
        return Miss("its sizes are not known")
    if not is_float(types[0].dtype):
        return Miss(f"products of {types[0].dtype.name} are not products of matrices")
    labels, result = einsum_terms(op.attrs.equation, [len(t.static_shape) for t in types])
    if any(len(set(one)) != len(one) for one in labels):
        return Miss("an operand has the same label twice: a diagonal")
    sizes: dict[str, int] = {}
    for one, t in zip(labels, types, strict=True):
        for label, n in zip(one, t.static_shape, strict=True):
            if sizes.setdefault(label, n) != n:
                return Miss(f"an axis of 1 broadcasts along {label.strip('.')}")
    if 0 in sizes.values():
        return Miss("it has no elements")
    terms = [Term(v, tuple(one)) for v, one in zip(values, labels, strict=True)]
    if (few := _short_sum(graph, terms, result, sizes)) and few < LEAST_TERMS:
        return Miss(
            f"sums of {few} terms are shorter than the copy of the operand that a product of matrices would need"
        )
    return Match((op,), lambda patch: _build(patch, terms, tuple(result), sizes))


def _short_sum(graph: Graph, terms: Sequence[Term], result: Sequence[str], sizes: dict[str, int]) -> int:
    """The number of terms of each sum of two operands, if a computed one has its batch axes behind others; else 0."""
    if len(terms) != 2:
        return 0
    both = set(terms[0].labels) & set(terms[1].labels)
    batch = both & set(result)
    behind = any(graph.constant_value(t.value) is None and not batch <= set(t.labels[: len(batch)]) for t in terms)
    return math.prod(sizes[x] for x in both - batch) if behind and both - batch else 0


@rule("sum_to_matmul", {"ReduceSum"})
def sums_of_products(graph: Graph, op: Op) -> Match | Miss | None:
    """The sum of a multiplication that broadcasts both operands. Refuses vectors, which a reduction reads once."""
    mul, axes = producer(graph, operand(op), {"Mul"}, alone=True), reduction_axes(graph, op)
    if mul is None or not axes or not is_float(op.outputs[0].type.dtype):
        return None
    shape, shapes = sizes_of(graph, mul.value), [sizes_of(graph, operand(mul, k)) for k in (0, 1)]
    if shape is None or 0 in shape or None in shapes:
        return None
    found = [{str(k + len(shape) - len(s)) for k, n in enumerate(s) if n > 1} for s in shapes if s is not None]
    result = [str(k) for k, n in enumerate(shape) if n > 1 and k not in axes]
    sizes = {str(k): n for k, n in enumerate(shape)}
    rows, columns = (math.prod(sizes[x] for x in result if x in a and x not in b) for a, b in (found, found[::-1]))
    if min(rows, columns) == 1 or not any(str(k) in found[0] & found[1] for k in axes):
        return None
    if min(rows, columns) < LEAST_SIDE:
        return Miss(f"a product of {rows} rows and {columns} columns is too small")
    labels = [tuple(x for x in sizes if x in one) for one in found]

    def build(patch: Patch) -> Value:
        terms = [Term(_shaped(patch, operand(mul, k), [sizes[x] for x in one]), one) for k, one in enumerate(labels)]
        return _shaped(patch, _build(patch, terms, result, sizes), op.outputs[0].type.static_shape)

    return Match((op, mul), build)


def _build(patch: Patch, terms: Sequence[Term], result: Sequence[str], sizes: dict[str, int]) -> Value:
    first, *rest = terms
    for k, other in enumerate(rest):
        wanted = {*result, *(label for t in rest[k + 1 :] for label in t.labels)}
        left = _summed(patch, first, {*wanted, *other.labels})
        right = _summed(patch, other, {*wanted, *first.labels})
        if result and result[-1] in left.labels and result[-1] not in right.labels:
            left, right = (
                right,
                left,
            )  # the result's last axis becomes the product's columns: Keras writes scores as k @ q
        first = _product(patch, left, right, wanted, sizes, result)
    return _ordered(patch, _summed(patch, first, set(result)), result)


def _summed(patch: Patch, term: Term, wanted: set[str]) -> Term:
    """The term, summed over the axes whose labels are not ``wanted``."""
    axes = [i for i, label in enumerate(term.labels) if label not in wanted]
    if not axes:
        return term
    value = patch.add("ReduceSum", [term.value, integers(patch, axes, "axes")], ReduceAttrs(keepdims=False))
    return Term(value, tuple(label for label in term.labels if label in wanted))


def _ordered(patch: Patch, term: Term, labels: Sequence[str]) -> Value:
    perm = tuple(term.labels.index(label) for label in labels)
    if perm == tuple(range(len(perm))):
        return term.value
    return patch.add("Transpose", [term.value], TransposeAttrs(perm))


def _shaped(patch: Patch, value: Value, shape: Sequence[int]) -> Value:
    same = patch.type(value).static_shape == tuple(shape)
    return value if same else reshaped(patch, value, tuple(shape))


def _product(patch: Patch, a: Term, b: Term, wanted: set[str], sizes: dict[str, int], result: Sequence[str]) -> Term:
    """Two operands as one product of matrices, or as a multiplication if nothing is summed.

    The labels of the result are batch, rows, columns, with the batch in the order of ``result``. So are the rows and the columns
    where the operand is transposed in any case: the scores of grouped queries (JAX) then need no Transpose."""
    batch = [x for x in a.labels if x in b.labels and x in wanted]
    inner = [x for x in a.labels if x in b.labels and x not in wanted]
    rows = [x for x in a.labels if x not in b.labels]
    columns = [x for x in b.labels if x not in a.labels]

    def place(label: str) -> int:
        return result.index(label) if label in result else len(result)

    batch.sort(key=place)
    if inner and (*batch, *rows, *inner) != a.labels:
        rows.sort(key=place)
    if inner and (*batch, *inner, *columns) != b.labels:
        columns.sort(key=place)

    def extent(labels: Sequence[str]) -> int:
        return math.prod(sizes[x] for x in labels)

    lead = [sizes[x] for x in batch]
    if not inner:
        left = _shaped(
            patch, _ordered(patch, a, [*batch, *rows]), [*lead, *(sizes[x] for x in rows), *[1] * len(columns)]
        )
        right = _ordered(patch, b, [*batch, *columns])
        right = _shaped(patch, right, [*lead, *[1] * len(rows), *(sizes[x] for x in columns)])
        return Term(patch.add("Mul", [left, right]), (*batch, *rows, *columns))
    left = _shaped(patch, _ordered(patch, a, [*batch, *rows, *inner]), [*lead, extent(rows), extent(inner)])
    right = _shaped(patch, _ordered(patch, b, [*batch, *inner, *columns]), [*lead, extent(inner), extent(columns)])
    value = patch.add("MatMul", [left, right], MatMulAttrs())
    labels = (*batch, *rows, *columns)
    return Term(_shaped(patch, value, [sizes[x] for x in labels]), labels)


class EinsumProducts(RulePass):
    name = "einsum_to_matmul"
    rules = (einsum_products, sums_of_products, column_products)
