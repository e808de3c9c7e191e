"""Attention over a number of keys that depends on data becomes attention over the largest possible number, with a mask.

Mochi (Genmo, 2024) attends to the words of a prompt that its mask selects: ``NonZero(mask)``, a Gather, a Concat with the tokens of
the video. Token pruning writes the same. Softmax over ``n`` keys is softmax over all keys with ``-inf`` added to the scores of the
others, so keys, scores and values have known sizes. ``pad_rows`` does the same for queries, which are rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from optdnn.dim import INF, Dim, bounds
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.shape import ShapeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, integers, is_pointwise, operand, shape_of
from optdnn.passes.support.rows import RowOp, copy_of, row_op
from optdnn.types import normalize_axis

MOST_BYTES = 1 << 30
"""Most bytes of the scores with all keys."""


@dataclass(frozen=True)
class _Attention:
    """``weighted = softmax(scores) @ values``, with ``scores`` a product with the keys and pointwise operators after it.

    ``after``: these operators, the last one first, each with the slot of the scores. ``count``: the number of keys."""

    product: Op
    after: tuple[tuple[Op, int], ...]
    softmax: Op
    weighted: Op
    count: Dim


@rule("bounded_keys", {"Softmax"})
def bounded_keys(graph: Graph, op: Op) -> Match | Miss | None:
    """Keys and values get the largest possible number of rows, and a mask excludes those that are none."""
    shape, weighted = op.outputs[0].type.shape, graph.sole_user(op.value)
    if shape is None or len(shape) < 2 or normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1:
        return None
    count, given = shape[-1], {s for d in graph.symbols().values() for s in d.symbols()}
    if not isinstance(count, Dim) or count.symbols() <= given:
        return None
    if weighted is None or weighted.kind != "MatMul" or weighted.inputs[0] != op.value:
        return None
    after = tuple(_pointwise(graph, operand(op), count))
    product = graph.op(operand(*after[-1]) if after else operand(op))
    if product.kind != "MatMul" or graph.sole_user(product.value) is None:
        return Miss("the scores are no product with the keys")
    queries, keys = shape_of(graph, operand(product)), shape_of(graph, operand(product, 1))
    values = shape_of(graph, operand(weighted, 1))
    if queries is None or keys is None or values is None or min(len(keys), len(values)) < 2:
        return None
    if (keys[-1], values[-2]) != (count, count) or _varies(queries[-1:]) or _varies(keys[:-1]) or _varies(values[:-2]):
        return Miss("other sizes of the keys or of the values depend on data")
    least, most = bounds(count)
    if most >= INF:
        return Miss(f"the number of keys, {count}, has no bound")
    if least < 1:
        return Miss("there may be no key")
    rows = [bounds(d)[1] for d in shape[:-1]]
    if np.prod([float(n) for n in rows]) * most * op.outputs[0].type.dtype.itemsize > MOST_BYTES:
        return Miss(f"the scores of {most} keys would take too much memory")
    found = _Attention(product, after, op, weighted, count)
    return Match((weighted, op, *(o for o, _ in after), product), lambda patch: _build(patch, found, int(most)))


def _pointwise(graph: Graph, value: Value, count: Dim) -> Iterator[tuple[Op, int]]:
    """The pointwise operators before ``value``, the last one first. One operand of each has ``count`` columns, the others one."""
    while is_pointwise(op := graph.op(value)) and graph.sole_user(value) is not None:
        shapes = [() if v is None else shape_of(graph, v) for v in op.inputs]
        slots = [slot for slot, shape in enumerate(shapes) if shape is None or (shape and shape[-1] != 1)]
        read = shapes[slots[0]] if len(slots) == 1 else None
        if read is None or read[-1] != count:
            return
        yield op, slots[0]
        value = operand(op, slots[0])


def _varies(sizes: tuple[object, ...]) -> bool:
    return any(isinstance(d, Dim) for d in sizes)


def _build(patch: Patch, found: _Attention, most: int) -> Value:
    graph, product, weighted = patch.graph, found.product, found.weighted
    keys, number = _all_rows(patch, operand(product, 1), found.count, most)
    made = patch.add("MatMul", [operand(product), keys], product.attrs, src=product.src)
    for op, slot in reversed(found.after):
        inputs = [made if k == slot else v for k, v in enumerate(op.inputs)]
        made = patch.add(op.kind, inputs, op.attrs, src=op.src)
    dtype = graph.type(found.softmax.value).dtype
    there = patch.add("Less", [patch.constant(np.arange(most), "places"), number], src=product.src)
    nothing, excluded = (patch.constant(np.array(v, dtype), "mask") for v in (0, -np.inf))
    mask = patch.add("Where", [there, nothing, excluded], src=product.src)
    scores = patch.add("Add", [made, mask], src=product.src)
    weights = patch.add("Softmax", [scores], found.softmax.attrs, src=found.softmax.src)
    values, _ = _all_rows(patch, operand(weighted, 1), found.count, most)
    return patch.add("MatMul", [weights, values], weighted.attrs, src=weighted.src)


def _all_rows(patch: Patch, value: Value, count: Dim, most: int) -> tuple[Value, Value]:
    """``value`` with ``most`` rows: zeros after those that there are; and their number (int64 [1]).

    The zeros are added before operators that only this value reads."""
    graph, chain, at = patch.graph, list[tuple[RowOp, int]](), value
    while (step := _step(graph, at, count)) is not None:
        chain.append(step)
        at = operand(step[0].op, step[1])
    made, number = _padded(patch, at, count, most)
    for r, slot in reversed(chain):
        made = Value(copy_of(patch, r, {operand(r.op, slot): made}, most).id, 0)
    return made, number


def _step(graph: Graph, value: Value, count: Dim) -> tuple[RowOp, int] | None:
    """The operator that computes ``value``, and the slot of its only operand with rows, if it computes each row by itself."""
    op = graph.op(value)
    if graph.sole_user(value) is None or not (op.kind in RESHAPES or op.kind == "Transpose" or is_pointwise(op)):
        return None
    found = row_op(graph, op, count)
    slots = [] if found is None else [k for k, rows in enumerate(found.operand_rows) if rows is not None]
    return None if found is None or len(slots) != 1 else (found, slots[0])


def _padded(patch: Patch, value: Value, count: Dim, most: int) -> tuple[Value, Value]:
    """``value`` with zeros after its rows, and their number. A Concat gets the zeros in its last part, if only this part varies."""
    graph, op = patch.graph, patch.graph.op(value)
    dims = graph.type(value).dims
    (axis,) = (k for k, d in enumerate(dims) if d == count)
    if op.kind == "Concat" and normalize_axis(op.attrs.axis, len(dims)) == axis:
        others = [graph.type(v).dims[axis] for v in op.inputs[:-1] if v is not None]
        if not _varies(tuple(others)):
            front = sum(int(d) for d in others if isinstance(d, int))
            last, number = _filled(patch, operand(op, len(op.inputs) - 1), axis, most - front)
            total = patch.add("Add", [number, integers(patch, (front,), "front")], src=op.src)
            return patch.add("Concat", [*op.inputs[:-1], last], ConcatAttrs(axis), src=op.src), total
    return _filled(patch, value, axis, most)


def _filled(patch: Patch, value: Value, axis: int, most: int) -> tuple[Value, Value]:
    """A Pad with zeros up to ``most`` rows, and the number of rows before it."""
    t, src = patch.type(value), patch.graph.op(value).src
    number = patch.add("Shape", [value], ShapeAttrs(axis, axis + 1), src=src)
    missing = patch.add("Sub", [integers(patch, (most,), "rows"), number], src=src)
    rank = len(t.dims)
    pads = [integers(patch, (0,) * (rank + axis), "begins"), missing]
    if axis < rank - 1:
        pads.append(integers(patch, (0,) * (rank - axis - 1), "ends"))
    wide = patch.add("Concat", pads, ConcatAttrs(0), src=src)
    zero = patch.constant(np.zeros((), t.dtype), "zero")
    return patch.add("Pad", [value, wide, zero], PadAttrs(), src=src), number
