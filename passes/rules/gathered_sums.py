"""Sums of gathered elements become a product with a matrix. PyTorch exports adaptive pools with unequal windows in this form.

``x[..., rows, columns]`` gathers the elements of all windows, padded with zeros. The export selects one position of all windows at
a time, adds the selections, and divides each sum by the size of its window: about ten launches for few numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import plain_attrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, reshaped, with_rank
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array, is_float

LEAST_TERMS = 4
"""Least number of terms of a sum."""
MOST = 1 << 20
"""Most elements of the matrix."""
SPARSEST = 64
"""Most elements of the source per term of a sum. With more, almost all of the matrix would be zeros."""
MOVES = frozenset({"Gather", "GatherND", "Slice", "Transpose", "Reshape", "Squeeze", "Unsqueeze"})
"""Kinds that select and order elements of operand 0 by constants."""


@dataclass(frozen=True)
class Sums:
    """Additions, and for each term the values from the term back to the source that all terms share."""

    adds: tuple[Op, ...]
    terms: tuple[tuple[Value, ...], ...]

    def sources(self) -> list[Value]:
        """The values from which all terms are selected, in topological order."""
        shared = set(self.terms[0]).intersection(*self.terms[1:])
        return [v for v in reversed(self.terms[0]) if v in shared]


@rule("gathered_sums", {"Add"})
def gathered_sums(graph: Graph, op: Op) -> Match | Miss | None:
    """A sum of elements gathered from one tensor becomes a product with a 0/1 matrix, unless the matrix is large or too sparse."""
    sums, reader = _sums(graph, op), graph.sole_user(op.value)
    if sums is None or (reader is not None and reader.kind == "Add" and _sums(graph, reader) is not None):
        return None
    shape = op.outputs[0].type.static_shape
    refused = None
    for source in sums.sources():
        positions = [_positions(graph, source, term) for term in sums.terms]
        given = graph.type(source).static_shape
        lead = _lead(given, shape, positions)
        rows, columns, outer = math.prod(given[lead:]), math.prod(shape[lead:]), math.prod(given[:lead])
        if rows * columns <= MOST and rows <= len(positions) * SPARSEST:
            break
        refused = refused or Miss(f"a matrix of {rows} x {columns} for sums of {len(positions)} elements is no gain")
    else:
        return refused
    factor = _factor(graph, reader, op, shape, lead)
    end = op if factor is None or reader is None else reader
    matrix = np.zeros((rows, columns))
    for each in positions:
        first = each.reshape(outer, columns)[0]
        np.add.at(matrix, (first[first > 0] - 1, np.flatnonzero(first > 0)), 1.0)
    matrix = matrix if factor is None else matrix * factor

    def build(patch: Patch) -> Value:
        weights = patch.constant(matrix.astype(op.outputs[0].type.dtype), "windows")
        flat = reshaped(patch, source, (outer, rows))
        return reshaped(patch, patch.add("MatMul", [flat, weights], MatMulAttrs()), shape)

    inner = {v.op: graph.op(v) for term in sums.terms for v in term[: term.index(source)]}
    return Match((*dict.fromkeys((end, op)), *sums.adds, *inner.values()), build, end.value)


def _sums(graph: Graph, op: Op) -> Sums | None:
    """The terms that ``op`` and the Adds before it sum, if all are selections from one value; else None."""
    adds, terms, waiting = list[Op](), list[tuple[Value, ...]](), [operand(op, 1), operand(op)]
    if not is_float(op.outputs[0].type.dtype) or not op.outputs[0].type.is_static:
        return None
    while waiting:
        value = waiting.pop()
        inner = graph.op(value)
        if inner.kind == "Add" and graph.sole_user(value) is not None:
            adds.append(inner)
            waiting += [operand(inner, 1), operand(inner)]
            continue
        path = [value]
        while (before := _source(graph, graph.op(path[-1]))) is not None:
            path.append(before)
        if len(path) == 1 or (terms and path[-1] != terms[0][-1]) or not graph.type(path[-1]).is_static:
            return None
        if graph.type(value).shape != op.outputs[0].type.shape:
            return None
        terms.append(tuple(path))
    return Sums(tuple(adds), tuple(terms)) if len(terms) >= LEAST_TERMS else None


def _source(graph: Graph, op: Op) -> Value | None:
    """The value from which an operator selects or reorders elements by constants, or replaces some by zeros (Where); else None."""
    if op.kind == "Where":
        constants = [graph.constant_value(v) for v in op.inputs]
        zero = [i for i in (1, 2) if constants[i] is not None and not constants[i].any()]  # type: ignore[union-attr]
        return operand(op, 3 - zero[0]) if constants[0] is not None and len(zero) == 1 else None
    if op.kind not in MOVES or any(v is not None and graph.constant_value(v) is None for v in op.inputs[1:]):
        return None
    return op.inputs[0]


def _positions(graph: Graph, source: Value, term: tuple[Value, ...]) -> Array:
    """For each element of a term, its index in the flat source, counted from 1, or 0 for a zero."""
    shape = graph.type(source).static_shape
    found: Array = np.arange(1, math.prod(shape) + 1).reshape(shape)
    for value in reversed(term[: term.index(source)]):
        op, before = graph.op(value), term[term.index(value) + 1]
        given = [found if v == before else None if v is None else graph.constant_value(v) for v in op.inputs]
        if op.kind == "Where":  # its zero may be of a float type
            given = [a if a is None or i == 0 else a.astype(np.int64) for i, a in enumerate(given)]
        (found,) = run_kernel(op.kind, given, plain_attrs(op.definition, op.attrs))
    return found


def _lead(given: tuple[int, ...], shape: tuple[int, ...], positions: list[Array]) -> int:
    """The largest number of leading axes that source and result share, with the same sums for each entry along these axes."""
    most = next((i for i, (a, b) in enumerate(zip(given, shape, strict=False)) if a != b), min(len(given), len(shape)))
    for lead in range(most, 0, -1):
        outer, rows = math.prod(given[:lead]), math.prod(given[lead:])
        starts = np.arange(outer)[:, None] * rows
        own = [p.reshape(outer, -1) for p in positions]
        if all((np.where(p > 0, p - starts, 0) == p[:1]).all() and p[0].max(initial=0) <= rows for p in own):
            return lead
    return 0


def _factor(graph: Graph, reader: Op | None, op: Op, shape: tuple[int, ...], lead: int) -> Array | None:
    """The constant factors per element after the leading axes, if ``reader`` multiplies or divides the sum by them; else None."""
    if reader is None or reader.kind not in ("Mul", "Div") or reader.outputs[0].type.shape != op.outputs[0].type.shape:
        return None
    slot = 1 if reader.inputs[0] == op.value else 0
    known = graph.constant_value(reader.inputs[slot])
    if known is None or (reader.kind == "Div" and slot == 0):
        return None
    wide = with_rank(known, len(shape))
    if any(n != 1 for n in wide.shape[:lead]):
        return None
    factor: Array = np.broadcast_to(wide, (1,) * lead + shape[lead:]).reshape(-1).astype(np.float64)
    return 1 / factor if reader.kind == "Div" else factor
