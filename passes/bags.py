"""Embedding bags that exporters write as a Loop over the bags become one Gather and one reduction.

A bag is a run of indices; the rows of a table that they name are added up. Where all bags are of one size, and lie side by side,
the indices are a matrix with a bag in each row. Where the bounds of the bags are computed (a recommender's offsets are an input), a
product adds up the rows: its left operand says which index belongs to which bag.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import integers, ints, producer, reshaped, scalar, shape_of
from optdnn.passes.unroll import goes_on, number_of
from optdnn.types import Array, is_float, normalize_axis

REDUCTIONS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax"})
VIEWS = frozenset({"Unsqueeze", "Reshape", "Squeeze"})
MOST_MEMBERS = 1 << 26
"""Bags times indices in the matrix of members: 128 MiB at 16 bits."""


@dataclass(frozen=True)
class _Bags:
    """A body that reduces rows: its operators, and where each bag begins and ends. ``gather``: its bags are of indices."""

    reduce: Op
    gather: Op | None
    cut: Op
    starts: Array
    ends: Array


@rule("loop_of_bags", {"Loop"})
def loop_of_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop whose iterations reduce a run of rows, or the rows that a run of indices names."""
    trips = _trips(graph, op)
    bags = None if trips is None else _bags(graph, op, trips)
    if trips is None or bags is None:
        return None
    listed = _outer(op, bags.cut.input(0))
    shape = None if listed is None else shape_of(graph, listed)
    if listed is None or not shape or not all(isinstance(d, int) for d in shape):
        return None
    gathered = _table(graph, op, bags.gather) if bags.gather is not None else None
    if bags.gather is not None and (gathered is None or len(shape) != 1):
        return None
    count, *dims = (int(d) for d in shape)  # type: ignore[arg-type]
    starts, ends = (np.clip(np.where(x < 0, x + count, x), 0, count) for x in (bags.starts, bags.ends))
    size = int(ends[0] - starts[0])
    if (
        size < 1
        or not np.array_equal(ends, starts + size)
        or not np.array_equal(starts, starts[0] + size * np.arange(trips))
    ):
        return Miss("its bags are of different sizes, or do not lie side by side")

    def build(patch: Patch) -> None:
        rows = reshaped(patch, _part(patch, listed, int(starts[0]), size * trips, count), (trips, size, *dims))
        if bags.gather is not None and gathered is not None:
            weights = patch.constant(gathered, "table") if isinstance(gathered, np.ndarray) else gathered
            rows = patch.add("Gather", [weights, rows], bags.gather.attrs)
        patch.replace(op.value, patch.add(bags.reduce.kind, [rows, integers(patch, [1], "axes")], bags.reduce.attrs))

    return Match((op,), build)


def _trips(graph: Graph, op: Op) -> int | None:
    """How often a Loop runs that carries nothing and yields one result of each iteration."""
    trips, going, body = number_of(graph, op.input(0)), op.input(1), op.attrs.body.graph
    if op.attrs.carried or len(body.outputs) != 2 or not trips or trips < 1:
        return None
    return trips if goes_on(body) and (going is None or number_of(graph, going)) else None


def _bags(graph: Graph, op: Op, trips: int) -> _Bags | None:
    body = op.attrs.body.graph
    reduce = _reduction(body)
    gather = None if reduce is None else producer(body, reduce.input(0), {"Gather"})
    if reduce is None or (gather is not None and not _of_rows(body, gather)):
        return None
    cut = _cut(graph, op, reduce.input(0) if gather is None else gather.input(1))
    if cut is None:
        return None
    starts, ends = (_each(graph, op, cut.input(i), trips) for i in (1, 2))
    return None if starts is None or ends is None else _Bags(reduce, gather, cut, starts, ends)


def _reduction(body: Graph) -> Op | None:
    """What the body yields, where it reduces rows."""
    reduce = producer(body, body.op(body.outputs[1]).inputs[0], REDUCTIONS)
    return None if reduce is None or ints(body, reduce.input(1)) != (0,) else reduce


def _of_rows(body: Graph, gather: Op) -> bool:
    return normalize_axis(gather.attrs.axis, len(body.type(gather.inputs[0]).dims)) == 0


def _cut(graph: Graph, op: Op, value: Value | None) -> Op | None:
    """The Slice that takes a run of elements, with a step of one, along the first axis."""
    cut = producer(op.attrs.body.graph, value, {"Slice"})
    if cut is None:
        return None
    if any(v is not None and _ints(graph, op, v) != only for v, only in ((cut.input(3), (0,)), (cut.input(4), (1,)))):
        return None
    return cut


def _table(graph: Graph, op: Op, gather: Op) -> Value | Array | None:
    """What the body gathers rows of: a value outside, or a constant of its own."""
    table = _outer(op, gather.input(0))
    return op.attrs.body.graph.constant_value(gather.input(0)) if table is None else table


def _outer(op: Op, value: Value | None) -> Value | None:
    """The value outside of the loop that the body reads as ``value``."""
    body = op.attrs.body.graph
    places = {Value(i): k for k, i in enumerate(body.inputs)}
    at = None if value is None else places.get(value)
    return None if at is None or at < 2 else op.inputs[at]


def _ints(graph: Graph, op: Op, value: Value) -> tuple[int, ...] | None:
    """The integers that the body reads as ``value``, its own or those of outside; None where they are not known."""
    found = ints(op.attrs.body.graph, value)
    return ints(graph, _outer(op, value)) if found is None else found


def _each(graph: Graph, op: Op, value: Value | None, trips: int) -> Array | None:
    """The number that each iteration takes from a constant list, by the iteration's own number."""
    body, gather = op.attrs.body.graph, _lookup(op, value)
    if gather is None:
        return None
    source = gather.inputs[0]
    known = body.constant_value(source)
    if known is None and (outer := _outer(op, source)) is not None:
        known = graph.constant_value(outer)
    one = (
        known is not None
        and known.ndim
        and known.size == len(known)
        and not normalize_axis(gather.attrs.axis, known.ndim)
    )
    return known.reshape(-1)[:trips].astype(np.int64) if known is not None and one and known.size >= trips else None


def _lookup(op: Op, value: Value | None) -> Op | None:
    """The Gather that takes the element with the iteration's own number from a list."""
    body = op.attrs.body.graph
    while value is not None and body.op(value).kind in VIEWS:
        value = body.op(value).inputs[0]
    gather = producer(body, value, {"Gather"})
    return gather if gather is not None and gather.inputs[1] == Value(body.inputs[0]) else None


def _part(patch: Patch, rows: Value, start: int, count: int, length: int) -> Value:
    """``count`` of ``length`` rows, from ``start`` on."""
    if count == length:
        return rows
    return patch.add("Slice", [rows, *(integers(patch, [n], "bags") for n in (start, start + count, 0))])


# ---------------------------------------------------------------- bags whose bounds are computed


@dataclass(frozen=True)
class _GivenBags:
    """A body that adds up the rows that a run of ``listed`` indices names, each times its element of ``weights``.

    A run begins and ends at the iteration's element of ``starts`` and ``ends``. All values are outside of the loop."""

    reduce: Op
    gather: Op
    listed: Value
    weights: Value | None
    starts: Value
    ends: Value


@rule("loop_of_given_bags", {"Loop"})
def loop_of_given_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop whose iterations add up the rows that a run of indices names, where the bounds of the runs are computed."""
    trips = _trips(graph, op)
    bags = None if trips is None else _given_bags(graph, op, trips)
    if trips is None or bags is None:
        return None
    if bags.reduce.kind == "ReduceMax":
        return Miss("it takes the maximum of bags whose bounds are computed")
    table = _table(graph, op, bags.gather)
    known = table if isinstance(table, np.ndarray) or table is None else graph.constant_value(table)
    if table is None or known is None or not is_float(known.dtype) or not np.isfinite(known).all():
        return Miss("the rows that its bags add up are not a constant of finite numbers: a product would spread a NaN")
    (count,), dims = graph.type(bags.listed).static_shape, known.shape[1:]
    if trips * count > MOST_MEMBERS:
        return Miss(
            f"it has {trips} bags of {count} indices: their matrix would be larger than {MOST_MEMBERS} elements"
        )

    def build(patch: Patch) -> None:
        source = patch.constant(table, "table") if isinstance(table, np.ndarray) else table
        rows = patch.add("Gather", [source, bags.listed], bags.gather.attrs)
        starts, ends = (_bounds(patch, v, trips, count) for v in (bags.starts, bags.ends))
        cast = CastAttrs(patch.type(source).dtype)
        members = _members(patch, bags, starts, ends, cast, count)
        total = patch.add("MatMul", [members, reshaped(patch, rows, (count, int(np.prod(dims))))], MatMulAttrs())
        if bags.reduce.kind == "ReduceMean":
            total = patch.add("Div", [total, patch.add("Cast", [_sizes(patch, starts, ends, count)], cast)])
        kept = (1,) if bags.reduce.attrs.keepdims else ()
        patch.replace(op.value, reshaped(patch, total, (trips, *kept, *dims)))

    return Match((op,), build)


def _given_bags(graph: Graph, op: Op, trips: int) -> _GivenBags | None:
    body = op.attrs.body.graph
    reduce = _reduction(body)
    product = None if reduce is None else producer(body, reduce.input(0), {"Mul"})
    found = (None, None) if reduce is None else (reduce.input(0), None)
    if product is not None:
        first = producer(body, product.input(0), {"Gather"})
        found = product.inputs if first is not None else product.inputs[::-1]  # type: ignore[assignment]
    gather = producer(body, found[0], {"Gather"})
    if reduce is None or gather is None or not _of_rows(body, gather):
        return None
    cut = _cut(graph, op, gather.input(1))
    listed = None if cut is None else _list_outside(graph, op, cut)
    if cut is None or listed is None:
        return None
    weights = None if product is None else _weights(graph, op, found[1], cut)
    starts, ends = (_outer(op, g.inputs[0]) if (g := _lookup(op, cut.input(i))) else None for i in (1, 2))
    if starts is None or ends is None or (product is not None and weights is None):
        return None
    for bound in (starts, ends):
        shape = graph.type(bound).shape
        if (
            shape is None
            or shape not in ((shape[0],), (shape[0], 1))
            or not isinstance(shape[0], int)
            or shape[0] < trips
        ):
            return None
    return _GivenBags(reduce, gather, listed, weights, starts, ends)


def _list_outside(graph: Graph, op: Op, cut: Op) -> Value | None:
    """The list outside of the loop, of known length, that a Slice cuts."""
    listed = _outer(op, cut.input(0))
    shape = None if listed is None else shape_of(graph, listed)
    return listed if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None


def _weights(graph: Graph, op: Op, factor: Value | None, cut: Op) -> Value | None:
    """The list outside of the loop whose run, a column, is the factor of the rows that ``cut`` names."""
    view = producer(op.attrs.body.graph, factor, VIEWS)
    own = None if view is None else _cut(graph, op, view.input(0))
    if view is None or own is None or (own.input(1), own.input(2)) != (cut.input(1), cut.input(2)):
        return None
    column = view.outputs[0].type.shape
    return _list_outside(graph, op, own) if column is not None and len(column) == 2 and column[1] == 1 else None


def _bounds(patch: Patch, bounds: Value, trips: int, count: int) -> Value:
    """The bounds as a column, one for each bag; a bound below zero counts from the end of the ``count`` indices."""
    column = reshaped(patch, bounds, (int(patch.type(bounds).static_shape[0]), 1))
    column = _part(patch, column, 0, trips, int(patch.type(column).static_shape[0]))
    zero, length = (patch.constant(np.array(n, patch.type(column).dtype), "bags") for n in (0, count))
    return patch.add("Where", [patch.add("Less", [column, zero]), patch.add("Add", [column, length]), column])


def _members(patch: Patch, bags: _GivenBags, starts: Value, ends: Value, cast: CastAttrs, count: int) -> Value:
    """For each bag and index the index's weight, or one, where the bag has the index, else zero."""
    places = patch.constant(np.arange(count, dtype=patch.type(starts).dtype)[None], "places")
    after, before = patch.add("GreaterOrEqual", [places, starts]), patch.add("Less", [places, ends])
    members = patch.add("And", [after, before])
    if bags.weights is None:
        return patch.add("Cast", [members], cast)
    weights = reshaped(patch, bags.weights, (1, count))
    return patch.add("Where", [members, weights, patch.constant(np.zeros((), cast.to), "none")])


def _sizes(patch: Patch, starts: Value, ends: Value, count: int) -> Value:
    """How many indices each bag has, and one for an empty bag: the mean of no elements is zero."""
    zero, one, length = (patch.constant(np.array(n, patch.type(starts).dtype), "bags") for n in (0, 1, count))
    begin, end = patch.add("Max", [starts, zero]), patch.add("Min", [ends, length])
    return patch.add("Max", [patch.add("Sub", [end, begin]), one])


# ---------------------------------------------------------------- iterations that the importer wrote out


@dataclass(frozen=True)
class _Bag:
    """Rows ``start`` to ``end`` of a value, reduced."""

    source: Value
    kind: str
    start: int
    end: int


@rule("concat_of_bags", {"Concat"})
def concat_of_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """Reductions of runs of rows side by side, of one size, as one reduction."""
    if len(op.inputs) < 2 or normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)):
        return None
    found = [_bag(graph, v) for v in op.inputs]
    bags = [b for b in found if b is not None]
    if len(bags) < len(found):
        return None
    first = bags[0]
    size = first.end - first.start
    if any((b.source, b.kind) != (first.source, first.kind) for b in bags):
        return Miss("its parts reduce different values")
    if any((b.start, b.end) != (first.start + i * size, first.start + (i + 1) * size) for i, b in enumerate(bags)):
        return Miss("its bags are of different sizes, or do not lie side by side")

    def build(patch: Patch) -> Value:
        length, *dims = (int(d) for d in graph.type(first.source).static_shape)
        rows = _part(patch, first.source, first.start, size * len(bags), length)
        split = reshaped(patch, rows, (len(bags), size, *dims))
        return patch.add(first.kind, [split, integers(patch, [1], "axes")], ReduceAttrs(keepdims=False))

    return Match((op,), build)


def _bag(graph: Graph, value: Value | None) -> _Bag | None:
    """What part of a Concat reduces: ``Reduce(x[start:end])`` with one row left, or the sum over its count."""
    op = None if value is None else graph.op(value)
    count = None
    if op is not None and op.kind == "Div":
        count, total = scalar(graph, op.input(1)), op.inputs[0]
        same = shape_of(graph, total) == op.outputs[0].type.shape  # not of the divisor's rank
        op = None if count is None or total is None or not same else graph.op(total)
    if op is None or op.kind not in REDUCTIONS or not op.attrs.keepdims or ints(graph, op.input(1)) != (0,):
        return None
    cut = graph.op(op.inputs[0])  # type: ignore[arg-type]
    source = cut.input(0)
    if cut.kind != "Slice" or source is None or not graph.type(source).is_static:
        return None
    starts, ends, axes, steps = (ints(graph, cut.input(i)) for i in (1, 2, 3, 4))
    if starts is None or ends is None or len(starts) != 1 or (cut.input(3) is not None and axes != (0,)):
        return None
    if cut.input(4) is not None and steps != (1,):
        return None
    start, end, _ = slice(starts[0], ends[0]).indices(int(graph.type(source).static_shape[0]))
    if start >= end or (count is not None and (op.kind != "ReduceSum" or count != end - start)):
        return None
    return _Bag(source, "ReduceMean" if count is not None else op.kind, start, end)


class Bags(RulePass):
    name = "bags"
    rules = (loop_of_bags, loop_of_given_bags, concat_of_bags)
