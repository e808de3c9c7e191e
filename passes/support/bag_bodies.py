"""What the body of a loop over embedding bags reads: bounds, indices, and the rows of a table (:mod:`optdnn.passes.bags`)."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.support.facts import integers, ints, operand, producer
from optdnn.passes.unroll import goes_on, number_of
from optdnn.types import Array, normalize_axis

REDUCTIONS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax"})
VIEWS = frozenset({"Unsqueeze", "Reshape", "Squeeze"})


def trips_of(graph: Graph, op: Op) -> int | None:
    """How often a Loop runs that carries nothing and yields one result of each iteration."""
    trips, going, body = number_of(graph, op.input(0)), op.input(1), op.attrs.body.graph
    if op.attrs.carried or len(body.outputs) != 2 or not trips or trips < 1:
        return None
    return trips if goes_on(body) and (going is None or number_of(graph, going)) else None


def reduction(body: Graph) -> Op | None:
    """What the body yields, where it reduces rows."""
    reduce = producer(body, body.op(body.outputs[1]).inputs[0], REDUCTIONS)
    return None if reduce is None or ints(body, reduce.input(1)) != (0,) else reduce


def takes_rows(body: Graph, gather: Op) -> bool:
    """Whether a Gather is along the first axis."""
    return normalize_axis(gather.attrs.axis, len(body.type(operand(gather)).dims)) == 0


def cut_of(graph: Graph, op: Op, value: Value | None) -> Op | None:
    """The Slice that takes a run of elements, with a step of one, along the first axis."""
    cut = producer(op.attrs.body.graph, value, {"Slice"})
    if cut is None:
        return None
    if any(v is not None and ints_of(graph, op, v) != only for v, only in ((cut.input(3), (0,)), (cut.input(4), (1,)))):
        return None
    return cut


def table_of(graph: Graph, op: Op, gather: Op) -> Value | Array | None:
    """What the body gathers rows of: a value outside, or a constant of its own."""
    table = value_outside(op, gather.input(0))
    return op.attrs.body.graph.constant_value(gather.input(0)) if table is None else table


def value_outside(op: Op, value: Value | None) -> Value | None:
    """The value outside of the loop that the body reads as ``value``."""
    body = op.attrs.body.graph
    places = {Value(i): k for k, i in enumerate(body.inputs)}
    at = None if value is None else places.get(value)
    return None if at is None or at < 2 else op.inputs[at]


def ints_of(graph: Graph, op: Op, value: Value) -> tuple[int, ...] | None:
    """The integers that the body reads as ``value``, its own or those of outside; None where they are not known."""
    found = ints(op.attrs.body.graph, value)
    return ints(graph, value_outside(op, value)) if found is None else found


def lookup(op: Op, value: Value | None) -> Op | None:
    """The Gather that takes the element with the iteration's own number from a list."""
    body = op.attrs.body.graph
    while value is not None and body.op(value).kind in VIEWS:
        value = body.op(value).inputs[0]
    gather = producer(body, value, {"Gather"})
    return gather if gather is not None and gather.inputs[1] == Value(body.inputs[0]) else None


def part_of(patch: Patch, rows: Value, start: int, count: int, length: int) -> Value:
    """``count`` of ``length`` rows, from ``start`` on."""
    if count == length:
        return rows
    return patch.add("Slice", [rows, *(integers(patch, [n], "bags") for n in (start, start + count, 0))])
