"""Sums of segments that tf2onnx computes by a table of rows become one ScatterND.

TensorFlow's ``unsorted_segment_sum`` (also ``max``, ``min``, ``prod``, and the counts of ``mean``) adds the rows that have the same
id. tf2onnx sorts the ids, and makes a table with the numbers of the rows of each segment. Its width is the size of the largest
segment, so it depends on data. Places of the table without a row have the number of an additional row that changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import ScatterNDAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, operand, producer, reshaped
from optdnn.passes.support.paths import value_before
from optdnn.types import BOOL, Array, DType, is_float

REDUCTIONS: Mapping[str, str] = {"ReduceSum": "add", "ReduceProd": "mul", "ReduceMax": "max", "ReduceMin": "min"}
"""Kinds of reductions and their names in ScatterND."""
_FIRST, _LAST_OF_TWO = 0, (1, -1)


@dataclass(frozen=True)
class Table:
    """The numbers of the rows of each segment: the ids of the rows, and the number of segments."""

    ids: Value
    segments: int


@rule("segment_table", frozenset(REDUCTIONS))
def segment_table(graph: Graph, op: Op) -> Match | Miss | None:
    """``reduce(gather(rows and one neutral row, table))`` becomes a ScatterND of the rows into neutral ones."""
    gather = producer(graph, operand(op), {"Gather"})
    table = None if gather is None or gather.attrs.axis != _FIRST else _table(graph, operand(gather, 1))
    if gather is None or table is None:
        return None
    axes = graph.known(op.input(1))
    if axes is None or axes.tolist() != [1] or op.attrs.keepdims:
        return Miss("it does not reduce the rows of each segment")
    t = graph.type(operand(gather))
    if t.dtype == BOOL:
        return None
    parts = _parts(graph, operand(gather))
    if not t.is_static or parts is None or (t.static_shape[0] - 1,) != graph.type(table.ids).dims:
        return Miss("the sizes of its rows are not known, or it has no additional row")
    rows, additional = parts
    neutral = _neutral(op.kind, t.dtype)
    if (additional != neutral).any():
        return Miss("the additional row changes results")

    def build(patch: Patch) -> Value:
        start = patch.constant(np.full((table.segments, *t.static_shape[1:]), neutral, t.dtype), "start")
        places = reshaped(patch, table.ids, (-1, 1))
        own = rows if isinstance(rows, Value) else patch.constant(rows, "rows")
        return patch.add("ScatterND", [start, places, own], ScatterNDAttrs(REDUCTIONS[op.kind]))

    return Match((op,), build)


def _neutral(kind: str, dtype: DType) -> float | int:
    """The number that changes no result of a reduction."""
    if kind in ("ReduceSum", "ReduceProd"):
        return int(kind == "ReduceProd")
    if is_float(dtype):
        return -np.inf if kind == "ReduceMax" else np.inf
    limits = np.iinfo(dtype)
    return int(limits.min if kind == "ReduceMax" else limits.max)


def _parts(graph: Graph, data: Value) -> tuple[Value | Array, Array] | None:
    """The rows, and the additional row after them."""
    constant = graph.constant_value(data)
    if constant is not None:
        return constant[:-1], constant[-1:]
    join = producer(graph, data, {"Concat"})
    additional = None if join is None or len(join.inputs) != 2 else graph.constant_value(join.inputs[1])
    if join is None or additional is None or join.attrs.axis != _FIRST or len(additional) != 1:
        return None
    return operand(join), additional


def _table(graph: Graph, value: Value) -> Table | None:
    """The table that tf2onnx makes of ids. It has the number of a row at (id, position within the segment), -1 elsewhere."""
    written = producer(graph, value, {"ScatterND"})
    filled = None if written is None else producer(graph, operand(written), {"ConstantOfShape"})
    if written is None or filled is None or written.attrs.reduction != "none" or filled.attrs.value != -1:
        return None
    sizes, places = producer(graph, operand(filled), {"Concat"}), producer(graph, operand(written, 1), {"Concat"})
    if sizes is None or places is None or len(sizes.inputs) != 2 or len(places.inputs) != 2:
        return None
    segments = graph.known(operand(sizes))
    ids, positions = (value_before(graph, operand(places, slot), RESHAPES) for slot in (0, 1))
    order, at = graph.op(ids), graph.op(positions)
    if segments is None or segments.dtype == object or segments.size != 1 or places.attrs.axis not in _LAST_OF_TWO:
        return None
    if (
        order.kind != "TopK"
        or at.kind != "Mod"
        or ids != Value(order.id, 0)
        or operand(written, 2) != Value(order.id, 1)
    ):
        return None
    given, a = graph.type(operand(order)), order.attrs
    if given.rank != 1 or not given.is_static or a.largest or not a.sorted or graph.type(ids).dims != given.dims:
        return None
    size = producer(graph, operand(at, 1), {"Gather"})
    counts = None if size is None else graph.op(operand(size))
    numbers = graph.constant_value(operand(at))
    if size is None or counts is None or counts.kind != "Unique" or operand(counts) != ids or numbers is None:
        return None
    most = producer(graph, operand(sizes, 1), {"ReduceMax"})
    read = (operand(size), operand(size, 1), None if most is None else operand(most))
    if read != (Value(counts.id, 3), Value(counts.id, 2), Value(counts.id, 3)) or at.attrs.fmod:
        return None
    if not np.array_equal(numbers, np.arange(given.static_shape[0])):
        return None
    return Table(operand(order), int(segments.reshape(-1)[0]))
