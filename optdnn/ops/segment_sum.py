"""SegmentSum: sums, maxima or minima of rows computed from gathered rows; the rows of each result are consecutive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Call, Cost, Result, Stage
from optdnn.ops.checks import elements, extent
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export
from optdnn.ops.fused import export_stages, infer_stages, stages_flops
from optdnn.types import INT32, TensorType, broadcast_dims

NEUTRAL = {"add": 0.0, "max": -math.inf, "min": math.inf}
"""Reduction -> its result for no rows."""


@dataclass(frozen=True)
class SegmentSumAttrs(Attrs):
    """``y[n]`` is the sum of rows ``first[n]`` to ``first[n + 1]``, multiplied or divided by row ``n`` of factors.

    There are no rows if ``first[n + 1]`` is not greater. Computed indices, and a computed ``first``, must be in range.

    Operands: tables, index arrays (int32 [E]), ``first`` (int32 [N + 1]), factors, and the operands of ``epilogue``. ``stages``
    compute a row ``e`` from the tables; register 0 is table 0. Table ``k`` contributes position ``index[e]`` along ``axes[k]``,
    from the index array with number ``indices[k]``; if that is -1, the whole table for every row. ``views[k]``: the axes of a row
    as axes of the table, in their order; -1: an axis of size 1. ``factors``: "Mul" or "Div" for each factor. The sum of no rows is
    zero, whatever the factors are. Stages of ``epilogue`` name operand slots of the whole operator; they transform each result and
    keep its type.

    ``reduction``: "add", or "max" or "min" of the rows, without factors; for no rows the latter are infinite (:data:`NEUTRAL`).
    """

    stages: tuple[Stage, ...]
    indices: tuple[int, ...]
    axes: tuple[int, ...]
    views: tuple[tuple[int, ...], ...]
    factors: tuple[str, ...] = ()
    epilogue: tuple[Stage, ...] = ()
    reduction: str = "add"

    @property
    def arrays(self) -> int:
        """The number of index arrays."""
        return max(self.indices) + 1


def row_types(attrs: Any, types: Sequence[TensorType | None]) -> list[TensorType]:
    """The types of the tables as a row reads them. Raises ShapeError for an absent operand or an axis that a table lacks."""
    found = []
    for k, view in enumerate(attrs.views):
        t = types[k]
        if t is None or t.shape is None or max((*view, attrs.axes[k])) >= len(t.shape):
            raise ShapeError(f"SegmentSum needs operand {k}, of known rank, with the axes that it reads")
        found.append(TensorType(t.dtype, tuple(1 if i < 0 else t.shape[i] for i in view)))
    return found


def _infer(call: Call) -> Result:
    a = call.attrs
    if a.reduction not in NEUTRAL or (a.factors and a.reduction != "add"):
        raise ShapeError(f"a SegmentSum of the reduction {a.reduction!r}, with {len(a.factors)} factors")
    given = row_types(a, call.types)
    begin = len(a.indices)
    for k in range(begin, begin + a.arrays + 1):
        if call.type(k).dtype != INT32 or call.type(k).rank != 1:
            raise ShapeError(f"operand {k} of a SegmentSum is {call.type(k)}; indices are int32[n]")
        if k < begin + a.arrays and call.type(k).shape != call.type(begin).shape:
            raise ShapeError("the index arrays of a SegmentSum differ in length")
    row = infer_stages(a.stages, given[0], given)
    count = call.type(begin + a.arrays).dims[0] - 1
    result = TensorType(row.dtype, (count, *row.dims))
    for k in range(len(a.factors)):
        t = call.type(begin + a.arrays + 1 + k)
        if t.rank != result.rank or broadcast_dims(t.dims, result.dims) != result.dims or t.dtype != result.dtype:
            raise ShapeError(f"a factor of a SegmentSum, {t}, is no factor of {result}")
    leaving = infer_stages(a.epilogue, result, call.types)
    if leaving != result:
        raise ShapeError(f"the epilogue of a SegmentSum turns {result} into {leaving}; it must keep the type")
    return Result((leaving,))


def _cost(call: Call, result: Result) -> Cost:
    given = row_types(call.attrs, call.types)
    rows = extent(call.type(len(call.attrs.indices)).dims[0])
    row = infer_stages(call.attrs.stages, given[0], given)
    after = stages_flops(call.attrs.epilogue, result.types[0], call.types)
    return Cost(rows * (stages_flops(call.attrs.stages, given[0], given) + elements(row)) + after)


def _export(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """Gathers, the stages, a reduction, and the factors."""
    given, begin = row_types(attrs, [e.type(name) for name in inputs]), len(attrs.indices)
    rank = max(len(t.dims) for t in given)
    (count,), (rows,) = (e.type(inputs[at]).static_shape for at in (begin + attrs.arrays, begin))

    def integers(*values: Any) -> str:
        return e.const(np.array(values, np.int64))

    tables: list[str] = []
    for name, index, axis, view, t in zip(inputs, attrs.indices, attrs.axes, attrs.views, given, strict=False):
        length = rows if index >= 0 else 1
        if index >= 0:
            (name,) = e.node("Gather", [name, inputs[begin + index]], 1, axis=axis)
        order = ([axis] if index >= 0 else []) + [i for i in view if i >= 0]
        rest = [i for i in range(len(e.type(inputs[len(tables)]).dims)) if i not in order]
        (name,) = e.node("Transpose", [name], 1, perm=[*rest, *order])
        shape = (length, *[1] * (rank - len(t.dims)), *t.dims)
        (name,) = e.node("Reshape", [name, integers(*shape)], 1)
        e.declare(name, TensorType(t.dtype, shape))
        tables.append(name)
    message = export_stages(attrs.stages, tables[0], e.type(tables[0]), tables, e)
    shape = e.type(message).static_shape[1:]
    (message,) = e.node("Expand", [message, integers(rows, *shape)], 1)
    e.declare(message, TensorType(given[0].dtype, (rows, *shape)))
    neutral = e.const(np.full((count - 1, *shape), NEUTRAL[attrs.reduction], given[0].dtype))
    scaled = _export_reduction(attrs.reduction, message, inputs[begin + attrs.arrays], neutral, e)
    for kind, name in zip(attrs.factors, inputs[begin + attrs.arrays + 1 :], strict=False):
        (scaled,) = e.node(kind, [scaled, name], 1)
    if attrs.factors:
        starts, ends = _bounds(inputs[begin + attrs.arrays], count, e)
        (some,) = e.node("Less", [starts, ends], 1)
        (some,) = e.node("Reshape", [some, integers(count - 1, *[1] * len(shape))], 1)
        (scaled,) = e.node("Where", [some, scaled, neutral], 1)
    return [export_stages(attrs.epilogue, scaled, TensorType(given[0].dtype, (count - 1, *shape)), inputs, e)]


def _export_reduction(reduction: str, message: str, first: str, neutral: str, e: Export) -> str:
    """A Scatter of the rows ``message`` if each is in one segment, in order; else a reduction of the rows in each segment."""
    (rows, *shape), (count,) = e.type(message).static_shape, e.type(first).static_shape
    starts, ends = _bounds(first, count, e)
    known, places = e.value(first), e.const(np.arange(rows, dtype=np.int64)[:, None])
    (begun,) = e.node("LessOrEqual", [starts, places], 1)
    if known is not None and known[0] == 0 and known[-1] == rows and (np.diff(known) >= 0).all():
        # The segment of row e is the number of segments that begin at or before it, minus one.
        (before,) = e.node("Cast", [begun], 1, to=np.dtype(np.int64))
        (segment,) = e.node("ReduceSum", [before, e.const(np.array([1]))], 1, keepdims=1)
        (segment,) = e.node("Sub", [segment, e.const(np.array([1]))], 1)
        (total,) = e.node("ScatterND", [neutral, segment, message], 1, reduction=reduction)
        return total
    (going,) = e.node("Less", [places, ends], 1)
    (member,) = e.node("And", [begun, going], 1)
    (member,) = e.node("Reshape", [member, e.const(np.array([rows, count - 1, *[1] * len(shape)]))], 1)
    (row,) = e.node("Reshape", [message, e.const(np.array([rows, 1, *shape]))], 1)
    (found,) = e.node("Where", [member, row, neutral], 1)
    kind = {"add": "ReduceSum", "max": "ReduceMax", "min": "ReduceMin"}[reduction]
    (total,) = e.node(kind, [found, e.const(np.array([0]))], 1, keepdims=0)
    return total


def _bounds(first: str, count: int, e: Export) -> tuple[str, str]:
    """The starts and the ends of the segments, in int64."""

    def part(start: int, end: int) -> str:
        (found,) = e.node("Slice", [wide, e.const(np.array([start])), e.const(np.array([end]))], 1)
        return found

    (wide,) = e.node("Cast", [first], 1, to=np.dtype(np.int64))
    return part(0, count - 1), part(1, count)


DEFS: tuple[OpDef, ...] = (OpDef("SegmentSum", _infer, SegmentSumAttrs, {}, _export, cost=_cost),)
