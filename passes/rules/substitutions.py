"""Forward substitution that exporters unroll row by row becomes products of matrices.

Chunks of a gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid: Yang et al., 2024) invert a triangular matrix: for each row i in
turn, ``T[i, :i] = A[i, :i] + A[i, :i] T[:i, :i]``. Where A is 0 on the diagonal and above it, the product may also take all columns
of A and all rows, as in chunks of the delta rule (DeltaNet: Yang et al., 2024). Let L be the part of A below the diagonal, U the
rest, and ``S = (I - L)^-1``. Then ``T = S (L + L U)`` below the diagonal, which is ``S - I`` if U is 0.

S is computed for blocks along the diagonal. Two products double the size of the blocks: ``S + S L_b S``, where L_b is the part of L
below the first block of each pair and left of the second one. This takes six rounds for 64 rows. It is as stable as the
substitution by rows, since each block is substituted into the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import plain_attrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import ints, is_filled, operand
from optdnn.passes.support.paths import value_before
from optdnn.passes.support.triangular import chosen, inverse_of_rest, times
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array, is_float

LEAST = 8
"""Least number of rows: with fewer, the rounds are not fewer than the rows."""
MOVES = frozenset({"Concat", "Gather", "Slice", "Squeeze", "Unsqueeze"})


@rule("substitution", {"Concat"})
def substitution(graph: Graph, op: Op) -> Match | Miss | None:
    """A square matrix whose rows, except the first, are replaced one after the other."""
    result = op.outputs[0].type
    if (
        not result.is_static
        or not is_float(result.dtype)
        or len(result.dims) < 2
        or result.static_shape[-1] != result.static_shape[-2]
    ):
        return None
    size = result.static_shape[-1]
    if size < LEAST:
        return None
    ops, value, row, whole = list[Op](), op.value, size - 1, False
    while row:
        found = _step(graph, value, row)
        if found is None:
            return None
        before, inside, all_columns = found
        ops += inside
        value, row, whole = before, row - 1, whole or all_columns
    start, lower = value, _is_lower(graph, value, size)
    if whole and not lower:
        return Miss("its rows are multiplied by all rows, and it is not known to be 0 on the diagonal and above it")

    def build(patch: Patch) -> Value:
        return _substituted(patch, start, size, result.dtype, lower)

    return Match((op, *(o for o in ops if o.id != op.id)), build)


def _step(graph: Graph, value: Value, row: int) -> tuple[Value, list[Op], bool] | None:
    """The matrix before its row ``row`` was replaced, the operators that replace the row, and whether its product takes all
    columns; None for another form."""
    shape = graph.type(value).static_shape
    leaves, ops = _leaves(graph, value, shape)
    before = next((v for v in leaves if graph.type(v).shape == shape), None)
    added = next((v for v in leaves if v != before), None)
    if before is None or added is None or len(leaves) != 2:
        return None
    add = graph.op(added)
    if add.kind != "Add" or graph.type(added).shape != (*shape[:-2], row):
        return None
    size = shape[-1]
    numbers = np.arange(size * size).reshape((*(1,) * (len(shape) - 2), size, size))
    new = -1 - np.arange(row).reshape((*(1,) * (len(shape) - 2), row))
    wanted = numbers.copy()
    wanted[..., row, :row] = new
    if not _holds(graph, value, {before: numbers, added: new}, wanted):
        return None
    for own, summed in (add.inputs, reversed(add.inputs)):
        assert own is not None
        assert summed is not None
        inner = _row_times(graph, summed, before, numbers, row)
        if inner is not None and _holds(graph, own, {before: numbers}, numbers[..., row, :row]):
            return before, [*ops, add, *inner[0]], inner[1]
    return None


def _row_times(graph: Graph, value: Value, before: Value, numbers: Array, row: int) -> tuple[list[Op], bool] | None:
    """The operators of ``before[row, :row] before[:row, :row]``, or, with True, of ``before[row] before[:, :row]``.

    They are a sum of products; None for another form."""
    total = graph.op(value)
    axes = ints(graph, total.input(1)) if total.kind == "ReduceSum" else None
    rank = numbers.ndim
    if axes is None or total.attrs.keepdims or len(axes) != 1 or axes[0] % rank != rank - 2:
        return None
    product = graph.op(operand(total))
    if product.kind != "Mul":
        return None
    for count in (row, numbers.shape[-1]):
        column, block = numbers[..., row, :count, None], numbers[..., :count, :row]
        for first, second in (product.inputs, reversed(product.inputs)):
            assert first is not None
            assert second is not None
            if _holds(graph, first, {before: numbers}, column) and _holds(graph, second, {before: numbers}, block):
                return [total, product], count != row
    return None


def _leaves(graph: Graph, value: Value, shape: tuple[int, ...]) -> tuple[list[Value], list[Op]]:
    """The values whose elements ``value`` consists of, and the operators that move these elements.

    The search ends at values with the same ``shape``, and at values that another operator computes."""
    found, ops, wanted, seen = list[Value](), list[Op](), [value], set[Value]()
    while wanted:
        v = wanted.pop()
        op = graph.op(v)
        if v in seen or graph.constant_value(v) is not None:
            continue
        seen.add(v)
        if op.kind in MOVES and (v == value or graph.type(v).shape != shape):
            ops.append(op)
            wanted += [u for u in op.inputs if u is not None]
        else:
            found.append(v)
    return found, ops


def _holds(graph: Graph, value: Value, given: Mapping[Value, Array], wanted: Array) -> bool:
    """Whether ``value`` consists of the ``wanted`` elements. ``given``: value -> the numbers that stand for its elements.

    The numbers have leading axes of size 1: all matrices of a batch must be treated alike."""
    found = _evaluated(graph, value, given, 0)
    return found is not None and found.shape == wanted.shape and bool((found == wanted).all())


def _evaluated(graph: Graph, value: Value, given: Mapping[Value, Array], depth: int) -> Array | None:
    """The numbers of the elements of ``value``; None if an operator between does more than move elements."""
    if value in given:
        return given[value]
    constant, op = graph.constant_value(value), graph.op(value)
    if constant is not None:
        return constant
    if op.kind not in MOVES or depth > 8:
        return None
    operands: list[Any] = []
    for v in op.inputs:
        array = None if v is None else _evaluated(graph, v, given, depth + 1)
        if array is None and v is not None:
            return None
        operands.append(array)
    return np.asarray(run_kernel(op.kind, operands, plain_attrs(op.definition, op.attrs))[0])


def _is_lower(graph: Graph, value: Value, size: int) -> bool:
    """Whether a matrix is known to be 0 on the diagonal and above it."""
    op = graph.op(value_before(graph, value, {"Neg"}))
    if op.kind == "Trilu":
        above = ints(graph, op.input(1)) or (0,)
        return not op.attrs.upper and above[0] < 0
    mask = graph.constant_value(op.inputs[0]) if op.kind == "Where" else None
    if mask is None or (mask.ndim > 2 and any(n > 1 for n in mask.shape[:-2])):
        return False
    taken = np.broadcast_to(mask.reshape(mask.shape[-2:]), (size, size))[np.triu_indices(size)]
    return any(is_filled(graph.known(operand(op, slot)), 0) and bool(np.all(taken == (slot == 1))) for slot in (1, 2))


def _substituted(patch: Patch, a: Value, size: int, dtype: Any, lower: bool) -> Value:
    """Add the substitution: the substituted rows below the diagonal, and ``a`` elsewhere. ``lower``: ``a`` is 0 elsewhere."""
    rows, columns = np.indices((size, size))
    below, zero = rows > columns, patch.constant(np.array(0, dtype), "zero")
    inverse = inverse_of_rest(patch, a, size, dtype)
    if not lower:
        left = chosen(patch, below, a, zero)
        more = patch.add("Add", [left, times(patch, left, chosen(patch, below, zero, a))])
        inverse = times(patch, inverse, chosen(patch, below, more, zero))
    return chosen(patch, below, inverse, a)
