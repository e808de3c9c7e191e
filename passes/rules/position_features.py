"""Biases of relative positions along several axes become features of queries and keys.

In MViT v2 and ViTDet (decomposed relative positions, Li et al., 2022), the bias of a query and a key is a sum of one term for each
axis of the picture or video: the product of the query with the embedding of their distance along that axis. The bias has an element
for each pair of a query and a key. The terms of a query are few: one for each position of a key along an axis. A key at position j
of an axis takes term j: the product of the terms with a vector that is one at j, and zero elsewhere. So queries get their terms as
further features, keys get these vectors, and attention has no bias.

Exporters multiply the queries of each position by a matrix of their own. Most columns of these matrices are the same embeddings. So
all queries are multiplied by all embeddings, once, and each takes its terms from the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import (
    RESHAPES,
    VIEWS,
    ints,
    operand,
    producer,
    reshaped,
    scalar,
    sizes_of,
    slice_limits,
)
from optdnn.passes.support.paths import path_to
from optdnn.types import Array

ALIGNED = 8
"""16-bit features in 16 bytes: queries and keys get a multiple of this, and products as many columns."""
MOST_FEATURES = 256
"""Most features of queries and keys. Kernels of attention take no more."""
LEAST_SCALE = 2.0**-12
"""Least scale of scores: its inverse, a feature of keys, is far from the largest and the smallest float of 16 bits."""


@dataclass(frozen=True)
class _Term:
    """A term of the bias: each row of ``x`` times a matrix of ``stack`` (matrices, features, positions of keys along one axis).

    ``positions``: the matrix of each query of a head. ``axis``: which of the keys' axes. ``ops``: the product, and the views after
    it."""

    x: Value
    stack: Array
    positions: Array
    axis: int
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class _Bias:
    """A sum of terms. ``keys``: sizes of the keys' axes. ``around``: numbers of queries before and after those with a bias, and of
    keys likewise. ``ops``: the additions, and what follows them."""

    terms: Sequence[_Term]
    keys: tuple[int, ...]
    around: tuple[int, int, int, int]
    ops: tuple[Op, ...]


@rule("position_features", {"Attention"})
def position_features(graph: Graph, op: Op) -> Match | Miss | None:
    """``softmax(q k + sum of q R_axis)`` is ``softmax([q, q R] [k, ones])``, with ``q R`` of one product for all axes."""
    more = any(v is not None for v in op.inputs[4:])
    if op.input(3) is None or op.attrs.softcap or more:
        return None
    q, k = (sizes_of(graph, operand(op, slot)) for slot in (0, 1))
    read = any(graph.use_count(Value(op.id, port)) for port in range(1, len(op.outputs)))
    if q is None or k is None or (len(q), len(k)) != (4, 4) or read:
        return None
    found = _bias(graph, op, q, k)
    if not isinstance(found, _Bias):
        return found
    scale = 1 / math.sqrt(q[3]) if op.attrs.scale is None else op.attrs.scale
    if not LEAST_SCALE <= scale <= 1 / LEAST_SCALE:
        return Miss(f"its scores have the scale {scale}: no feature of a key in 16 bits undoes it")
    source = _source(graph, found, q)
    if isinstance(source, Miss):
        return source
    terms = sum(t.stack.shape[2] for t in found.terms)
    spare = -(q[3] + terms) % ALIGNED
    if terms > q[3] or q[3] + terms + spare > MOST_FEATURES:
        return Miss(f"queries of {q[3]} features would get {terms} more")

    def build(patch: Patch) -> Value:
        taken = _taken(patch, source, found, q, spare)
        ones = np.pad(_ones(found, terms) / scale, ((found.around[2], found.around[3]), (0, spare)))
        dtype = patch.type(operand(op, 1)).dtype
        spread = patch.add("Expand", [
            patch.constant(ones.astype(dtype), "positions"),
            patch.constant(np.asarray([*k[:3], terms + spare], np.int64), "shape"),
        ])  # fmt: skip
        pairs = [operand(op, 0), taken], [operand(op, 1), spread]
        joined = [patch.add("Concat", pair, ConcatAttrs(-1)) for pair in pairs]
        return patch.add("Attention", [*joined, op.inputs[2]], replace(op.attrs, scale=scale))

    return Match((op, *found.ops, *(o for t in found.terms for o in t.ops)), build)


# ---------------------------------------------------------------- what the bias is


def _bias(graph: Graph, op: Op, q: tuple[int, ...], k: tuple[int, ...]) -> _Bias | Miss | None:
    """The bias of an attention; None if it is no sum over several axes of keys."""
    value, ops, around = operand(op, 3), list[Op](), (0, 0, 0, 0)
    pad = producer(graph, value, {"Pad"}, alone=True)
    if pad is not None:
        pads = ints(graph, pad.input(1))
        if pad.attrs.mode != "constant" or pad.input(3) is not None or pads is None or len(pads) != 8:
            return None
        if any((*pads[:2], *pads[4:6])) or min(pads) < 0 or (pad.input(2) and scalar(graph, pad.input(2)) != 0.0):
            return None
        around, value = (pads[2], pads[6], pads[3], pads[7]), operand(pad)
        ops.append(pad)
    views = path_to(graph, value, RESHAPES, alone=True)
    value = operand(views[-1]) if views else value
    ops += views
    total = producer(graph, value, {"Add"}, alone=True)
    shape = None if total is None else sizes_of(graph, value)
    if total is None or shape is None:
        return None
    rows, count = q[0] * q[1] * (q[2] - around[0] - around[1]), k[2] - around[2] - around[3]
    cut = next((i for i in range(len(shape)) if math.prod(shape[:i]) == rows and math.prod(shape[i:]) == count), 0)
    if cut == 0 or len(shape) - cut < 2:
        return None
    sums, leaves = _leaves(graph, total)
    terms = [_term(graph, leaf, shape, cut, rows // (q[0] * q[1])) for leaf in leaves]
    for term in terms:
        if isinstance(term, Miss):
            return term
    return _Bias([t for t in terms if isinstance(t, _Term)], shape[cut:], around, (*ops, *sums))


def _leaves(graph: Graph, total: Op) -> tuple[list[Op], list[Value]]:
    """The additions of a sum, and what they add."""
    sums, leaves = [total], list[Value]()
    for add in sums:
        for value in (operand(add, 0), operand(add, 1)):
            inner = producer(graph, value, {"Add"}, alone=True)
            if inner is None:
                leaves.append(value)
            else:
                sums.append(inner)
    return sums, leaves


def _term(graph: Graph, leaf: Value, shape: tuple[int, ...], cut: int, queries: int) -> _Term | Miss:
    """A term of a sum of ``shape``, whose first ``cut`` axes are those of the queries."""
    name = graph.op(leaf).name
    after = path_to(graph, leaf, VIEWS, alone=True)
    product = graph.op(operand(after[-1]) if after else leaf)
    stack = graph.constant_value(product.input(1)) if product.kind == "MatMul" else None
    if stack is None or stack.ndim != 3 or product.attrs.epilogue or product.attrs.prologue:
        return Miss(f"{name}, a term of its bias, is no product with a constant stack of matrices")
    own = sizes_of(graph, leaf)
    axes = [i for i in range(len(shape)) if own is not None and len(own) == len(shape) and own[i] > 1 and i >= cut]
    if own is None or own[:cut] != shape[:cut] or len(axes) != 1 or stack.shape[2] != own[axes[0]]:
        return Miss(f"{name}, a term of its bias, is not one of each query and of one axis of the keys")
    before = path_to(graph, operand(product), VIEWS)
    why = None
    for first in reversed(range(len(before) + 1)):
        x = operand(before[first - 1]) if first else operand(product)
        found = _matrices(graph, x, (before[:first][::-1], product, after[::-1]), stack, queries)
        if not isinstance(found, Miss):
            return _Term(x, stack, found, axes[0] - cut, (*after, product))
        why = why or found
    assert why is not None
    return why


def _matrices(
    graph: Graph, x: Value, path: tuple[Sequence[Op], Op, Sequence[Op]], stack: Array, queries: int
) -> Array | Miss:
    """The matrix of ``stack`` for each query of a head, if the rows of ``x`` are the queries in their order. ``path``: the views
    from ``x`` to the product, the product, and the views from there to the term."""
    before, product, after = path
    rows = _rows_after(graph, _numbers(graph, x, stack.shape[1]), before, stack.shape[1])
    if rows is None or rows.ndim != 2 or len(rows) != len(stack):
        return Miss(f"the rows of {product.name} do not come from one tensor, whole")
    last = _rows_after(graph, rows, after, stack.shape[2])
    if last is None or not np.array_equal(last.reshape(-1), np.arange(rows.size)):
        return Miss(f"the rows of {product.name} are in another order than the queries")
    positions = np.empty(rows.size, np.int64)
    positions[rows] = np.arange(len(rows))[:, None]
    each = positions.reshape(-1, queries)
    return Miss(f"{product.name} has other matrices for other heads") if (each != each[0]).any() else each[0]


def _numbers(graph: Graph, x: Value, width: int) -> Array | None:
    """The numbers of the rows of a tensor, in its shape without the last axis; None if rows have another ``width``."""
    shape = sizes_of(graph, x)
    return None if shape is None or shape[-1:] != (width,) else np.arange(math.prod(shape[:-1])).reshape(shape[:-1])


def _rows_after(graph: Graph, rows: Array | None, views: Sequence[Op], width: int) -> Array | None:
    """The numbers of rows after views that keep rows of ``width`` whole; None if they do not. Reshapes at the end may add axes of
    size 1 behind them."""
    for i, view in enumerate(views):
        shape = sizes_of(graph, view.value)
        if rows is None or shape is None:
            return None
        if view.kind == "Transpose":
            perm = view.attrs.perm or tuple(range(len(shape)))[::-1]
            rows = rows.transpose(perm[:-1]) if perm[-1] == len(shape) - 1 else None
        elif shape[-1] == width:
            rows = rows.reshape(shape[:-1])
        else:
            return rows if all(v.kind in RESHAPES for v in views[i:]) else None
    return rows


def _source(graph: Graph, found: _Bias, q: tuple[int, ...]) -> Value | Miss:
    """The rows that all terms multiply, one for each query, also for queries without a bias."""
    x = found.terms[0].x
    if any(t.x != x for t in found.terms):
        return Miss("the terms of its bias are products of different tensors")
    first, last = found.around[:2]
    if not first and not last:
        return x
    part = producer(graph, x, {"Slice"})
    whole = None if part is None else sizes_of(graph, operand(part))
    limits = None if part is None else slice_limits(graph, part)
    if part is None or whole is None or whole[:-1] != q[:3] or limits is None or len(limits) != 1:
        return Miss("the queries with a bias are not a Slice of all queries")
    ((axis, begin, end, step),) = limits
    if (axis, step) != (2, 1) or range(*slice(begin, end).indices(q[2])) != range(first, q[2] - last):
        return Miss("the queries with a bias are not a Slice of all queries")
    return operand(part)


# ---------------------------------------------------------------- what replaces it


def _taken(patch: Patch, x: Value, found: _Bias, q: tuple[int, ...], spare: int) -> Value:
    """The terms of each query (batch, head, query, terms): zero for queries without a bias, and ``spare`` more that are zero."""
    tables, indices, width = list[Array](), list[Array](), 0
    for term in found.terms:
        count, depth, keys = term.stack.shape
        table, columns = np.unique(term.stack.transpose(0, 2, 1).reshape(-1, depth), axis=0, return_inverse=True)
        indices.append(columns.reshape(count, keys)[term.positions] + width)
        tables.append(table)
        width += len(table)
    matrix = np.pad(np.concatenate(tables).T, ((0, 0), (0, ALIGNED - width % ALIGNED)))  # at least one column of zeros
    taken = np.pad(np.concatenate(indices, 1), (found.around[:2], (0, spare)), constant_values=width)
    y = patch.add("MatMul", [x, patch.constant(matrix, "positions")], MatMulAttrs())
    product = reshaped(patch, y, (*q[:3], matrix.shape[1]))
    index = patch.add("Expand", [
        patch.constant(taken.astype(np.int32), "columns"),
        patch.constant(np.asarray([*q[:2], *taken.shape], np.int64), "shape"),
    ])  # fmt: skip
    return patch.add("GatherElements", [product, index], GatherAttrs(-1))


def _ones(found: _Bias, terms: int) -> Array:
    """For each key with a bias, one at its position along each axis (keys, terms)."""
    places, first = np.indices(found.keys).reshape(len(found.keys), -1), 0
    ones = np.zeros((places.shape[1], terms))
    for term in found.terms:
        ones[np.arange(len(ones)), first + places[term.axis]] = 1.0
        first += term.stack.shape[2]
    return ones
