"""Recognizes what the body of a loop over embedding bags reads: bounds, indices and table rows (:mod:`optdnn.passes.bags`)."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.support.facts import ints, operand, producer, shape_of, sliced
from optdnn.passes.support.paths import value_before
from optdnn.passes.unroll import goes_on, number_of
from optdnn.types import Array, normalize_axis

REDUCTIONS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax"})
VIEWS = frozenset({"Unsqueeze", "Reshape", "Squeeze"})


def trips_of(graph: Graph, op: Op) -> int | None:
    """The number of iterations of a Loop that carries no state and yields one result per iteration; None for other loops."""
    trips, going, body = number_of(graph, op.input(0)), op.input(1), op.attrs.body.graph
    if op.attrs.carried or len(body.outputs) != 2 or not trips or trips < 1:
        return None
    return trips if goes_on(body) and (going is None or number_of(graph, going)) else None


def reduction(body: Graph) -> Op | None:
    """The reduction over the first axis whose result the body yields, or None."""
    reduce = producer(body, body.op(body.outputs[1]).inputs[0], REDUCTIONS)
    return None if reduce is None or ints(body, reduce.input(1)) != (0,) else reduce


def weighted_rows(body: Graph) -> tuple[Op, Op | None, Value | None] | None:
    """The reduction of the body, the Gather whose rows it reduces, and the factor of these rows; else None.

    The Gather is None if the rows are a part of a value. The factor is None if the rows are reduced as they are. Rows with a
    factor are rows of a matrix."""
    reduce = reduction(body)
    if reduce is None:
        return None
    product = producer(body, reduce.input(0), {"Mul"})
    rows, factor = (reduce.input(0), None) if product is None else product.inputs
    if product is not None and producer(body, rows, {"Gather"}) is None:
        rows, factor = factor, rows
    gather = producer(body, rows, {"Gather"})
    if gather is not None and not takes_rows(body, gather):
        return None
    if factor is not None and (gather is None or len(gather.outputs[0].type.dims) != 2):
        return None
    return reduce, gather, factor


def takes_rows(body: Graph, gather: Op) -> bool:
    """Whether a Gather selects along the first axis."""
    return normalize_axis(gather.attrs.axis, len(body.type(operand(gather)).dims)) == 0


def cut_of(graph: Graph, op: Op, value: Value | None) -> Op | None:
    """The Slice that computes ``value`` in the body, if it is along the first axis with step 1."""
    cut = producer(op.attrs.body.graph, value, {"Slice"})
    if cut is None:
        return None
    if any(v is not None and ints_of(graph, op, v) != only for v, only in ((cut.input(3), (0,)), (cut.input(4), (1,)))):
        return None
    return cut


def table_of(graph: Graph, op: Op, gather: Op) -> Value | Array | None:
    """The table whose rows the body gathers: a value outside of the loop, or a constant of the body."""
    table = value_outside(op, gather.input(0))
    return op.attrs.body.graph.constant_value(gather.input(0)) if table is None else table


def known_table(graph: Graph, table: Value | Array) -> Array | None:
    """The numbers of a table, as :func:`table_of` gives it; None if they are computed."""
    return table if isinstance(table, np.ndarray) else graph.constant_value(table)


def value_outside(op: Op, value: Value | None) -> Value | None:
    """The value outside of the loop that the body reads as ``value``."""
    body = op.attrs.body.graph
    slots = {Value(i): k for k, i in enumerate(body.inputs)}
    slot = None if value is None else slots.get(value)
    return None if slot is None or slot < 2 else op.inputs[slot]


def ints_of(graph: Graph, op: Op, value: Value) -> tuple[int, ...] | None:
    """The integers that the body reads as ``value``, from inside or outside of the body; None if they are not known."""
    found = ints(op.attrs.body.graph, value)
    return ints(graph, value_outside(op, value)) if found is None else found


def lookup(op: Op, value: Value | None) -> Op | None:
    """The Gather that takes the iteration's element of a list, if ``value`` is a view of its result; else None."""
    body = op.attrs.body.graph
    gather = None if value is None else producer(body, value_before(body, value, VIEWS), {"Gather"})
    return gather if gather is not None and gather.inputs[1] == Value(body.inputs[0]) else None


def iterated(graph: Graph, op: Op, value: Value, trips: int) -> Array | None:
    """A value of the body in each iteration, if it is the iteration's number or its row of a constant table; else None."""
    body, number = op.attrs.body.graph, Value(op.attrs.body.graph.inputs[0])
    if value == number:
        return np.arange(trips)
    gather = producer(body, value, {"Gather"})
    if gather is None or gather.inputs[1] != number or not takes_rows(body, gather):
        return None
    table = table_of(graph, op, gather)
    rows = None if table is None else known_table(graph, table)
    return None if rows is None or len(rows) < trips else rows[:trips]


def list_outside(graph: Graph, op: Op, cut: Op) -> Value | None:
    """The list of known length, outside of the loop, whose part a Slice takes."""
    listed = value_outside(op, cut.input(0))
    shape = None if listed is None else shape_of(graph, listed)
    return listed if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None


def weights_of(graph: Graph, op: Op, factor: Value | None, cut: Op) -> Value | None:
    """The list outside of the loop whose run is the ``factor``, a column, of the rows; the run has the bounds of ``cut``."""
    view = producer(op.attrs.body.graph, factor, VIEWS)
    own = None if view is None else cut_of(graph, op, view.input(0))
    if view is None or own is None or (own.input(1), own.input(2)) != (cut.input(1), cut.input(2)):
        return None
    column = view.outputs[0].type.shape
    return list_outside(graph, op, own) if column is not None and len(column) == 2 and column[1] == 1 else None


def part_of_a_list(graph: Graph, value: Value) -> tuple[Value, int] | None:
    """The list of known length that a value is a part of, and where the part begins; None for other values."""
    cut = producer(graph, value, {"Slice"})
    shape = None if cut is None else shape_of(graph, operand(cut))
    start = None if cut is None else ints(graph, cut.input(1))
    if cut is None or shape is None or len(shape) != 1 or not isinstance(shape[0], int) or start is None:
        return None
    if cut.input(4) is not None and ints(graph, cut.input(4)) != (1,):
        return None
    return operand(cut), range(shape[0])[start[0] :].start


def part_of(patch: Patch, rows: Value, start: int, count: int, length: int) -> Value:
    """Add a Slice of ``count`` rows of ``rows``, from ``start`` on; no Slice if these are all ``length`` rows."""
    if count == length:
        return rows
    return sliced(patch, rows, start, start + count, 0)
