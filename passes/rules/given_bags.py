"""Embedding bags whose bounds are computed (a recommender's offsets are an input) become one product of matrices.

The left operand has a row for each bag and a column for each index: its elements are the weights of the indices in the bag, and 0
elsewhere. The table must be a constant of finite numbers, since 0 times an infinity or a NaN is not 0.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.bag_bodies import (
    VIEWS,
    cut_of,
    lookup,
    part_of,
    reduction,
    table_of,
    takes_rows,
    trips_of,
    value_outside,
)
from optdnn.passes.support.facts import ints, is_filled, operand, producer, reshaped, shape_of
from optdnn.types import Array, is_float, normalize_axis

MOST_MEMBERS = 1 << 26
"""Largest number of elements (bags times indices) of the left operand: 128 MiB at 16 bits."""


@dataclass(frozen=True)
class _GivenBags:
    """A loop body that reduces gathered rows. Iteration ``k`` gathers by ``listed[starts[k]:ends[k]]``.

    If there are ``weights``, each row is multiplied by the weight of its index. All values are outside of the loop."""

    reduce: Op
    gather: Op
    listed: Value
    weights: Value | None
    starts: Value
    ends: Value


@rule("loop_of_given_bags", {"Loop"})
def loop_of_given_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop whose iterations sum or average the rows that a run of indices selects. The bounds of the runs are computed."""
    trips = trips_of(graph, op)
    bags = None if trips is None else _given_bags(graph, op, trips)
    if trips is None or bags is None:
        return None
    if bags.reduce.kind == "ReduceMax":
        return Miss("it takes the maximum of bags whose bounds are computed, which no product can express")
    table = table_of(graph, op, bags.gather)
    known = table if isinstance(table, np.ndarray) or table is None else graph.constant_value(table)
    (count,) = graph.type(bags.listed).static_shape
    reason = _no_product(known, trips, count)
    if table is None or known is None or reason is not None:
        return Miss(reason or "")
    kept = (1,) if bags.reduce.attrs.keepdims else ()

    def build(patch: Patch) -> None:
        source = patch.constant(table, "table") if isinstance(table, np.ndarray) else table
        rows = patch.add("Gather", [source, bags.listed], bags.gather.attrs)
        starts, ends = (_bounds(patch, v, trips, count) for v in (bags.starts, bags.ends))
        total = _product(patch, rows, bags.weights, (starts, ends), bags.reduce.kind)
        patch.replace(op.value, reshaped(patch, total, (trips, *kept, *known.shape[1:])))

    return Match((op,), build)


def _no_product(table: Array | None, bags: int, count: int) -> str | None:
    """The reason why a product cannot sum the rows of a table; None if it can."""
    if table is None or not is_float(table.dtype) or not np.isfinite(table).all():
        return "its table is not a constant of finite numbers: a product would spread a NaN to other bags"
    if not count:
        return "there are no indices"
    if bags * count > MOST_MEMBERS:
        return f"it has {bags} bags and {count} indices: their matrix would be larger than {MOST_MEMBERS} elements"
    return None


def _product(patch: Patch, rows: Value, weights: Value | None, bounds: tuple[Value, Value], kind: str) -> Value:
    """Add the product: the sum or mean of the rows of each bag, one row per bag."""
    shape = patch.type(rows).static_shape
    cast = CastAttrs(patch.type(rows).dtype)
    members = _members(patch, weights, bounds, cast, shape[0])
    flat = reshaped(patch, rows, (shape[0], int(np.prod(shape[1:]))))
    total = patch.add("MatMul", [members, flat], MatMulAttrs())
    if kind == "ReduceMean":
        total = patch.add("Div", [total, patch.add("Cast", [_sizes(patch, bounds, shape[0])], cast)])
    return total


def _given_bags(graph: Graph, op: Op, trips: int) -> _GivenBags | None:
    """The bags of a Loop with ``trips`` iterations; None if its body has another form."""
    body = op.attrs.body.graph
    reduce = reduction(body)
    product = None if reduce is None else producer(body, reduce.input(0), {"Mul"})
    found = (None, None) if reduce is None else (reduce.input(0), None)
    if product is not None:
        first = producer(body, product.input(0), {"Gather"})
        found = product.inputs if first is not None else product.inputs[::-1]  # type: ignore[assignment]
    gather = producer(body, found[0], {"Gather"})
    if reduce is None or gather is None or not takes_rows(body, gather):
        return None
    cut = cut_of(graph, op, gather.input(1))
    listed = None if cut is None else _list_outside(graph, op, cut)
    if cut is None or listed is None:
        return None
    weights = None if product is None else _weights(graph, op, found[1], cut)
    starts, ends = (value_outside(op, g.inputs[0]) if (g := lookup(op, cut.input(i))) else None for i in (1, 2))
    if starts is None or ends is None or (product is not None and weights is None):
        return None
    if weights is not None and graph.type(weights).shape != graph.type(listed).shape:
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
    """The list of known length, outside of the loop, whose part a Slice takes."""
    listed = value_outside(op, cut.input(0))
    shape = None if listed is None else shape_of(graph, listed)
    return listed if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None


def _weights(graph: Graph, op: Op, factor: Value | None, cut: Op) -> Value | None:
    """The list outside of the loop whose run is the ``factor``, a column, of the rows; the run has the bounds of ``cut``."""
    view = producer(op.attrs.body.graph, factor, VIEWS)
    own = None if view is None else cut_of(graph, op, view.input(0))
    if view is None or own is None or (own.input(1), own.input(2)) != (cut.input(1), cut.input(2)):
        return None
    column = view.outputs[0].type.shape
    return _list_outside(graph, op, own) if column is not None and len(column) == 2 and column[1] == 1 else None


def _bounds(patch: Patch, bounds: Value, trips: int, count: int) -> Value:
    """The first ``trips`` bounds as a column; ``count`` is added to negative bounds, which count from the end of the indices."""
    column = reshaped(patch, bounds, (int(patch.type(bounds).static_shape[0]), 1))
    column = part_of(patch, column, 0, trips, int(patch.type(column).static_shape[0]))
    zero, length = (patch.constant(np.array(n, patch.type(column).dtype), "bags") for n in (0, count))
    return patch.add("Where", [patch.add("Less", [column, zero]), patch.add("Add", [column, length]), column])


def _members(patch: Patch, weights: Value | None, bounds: tuple[Value, Value], cast: CastAttrs, count: int) -> Value:
    """The left operand, shape (bags, ``count``): the weight (or 1) of each index that the bag contains, else 0."""
    starts, ends = bounds
    positions = patch.constant(np.arange(count, dtype=patch.type(starts).dtype)[None], "places")
    after, before = patch.add("GreaterOrEqual", [positions, starts]), patch.add("Less", [positions, ends])
    members = patch.add("And", [after, before])
    if weights is None:
        return patch.add("Cast", [members], cast)
    line = reshaped(patch, weights, (1, count))
    return patch.add("Where", [members, line, patch.constant(np.zeros((), cast.to), "none")])


def _sizes(patch: Patch, bounds: tuple[Value, Value], count: int) -> Value:
    """The divisor of each bag's mean: its number of indices, or 1 for an empty bag, whose mean is defined as 0."""
    starts, ends = bounds
    zero, one, length = (patch.constant(np.array(n, patch.type(starts).dtype), "bags") for n in (0, 1, count))
    begin, end = patch.add("Max", [starts, zero]), patch.add("Min", [ends, length])
    return patch.add("Max", [patch.add("Sub", [end, begin]), one])


# ---------------------------------------------------------------- iterations that the importer unrolled


@dataclass(frozen=True)
class _GivenBag:
    """The sum or mean (``kind``) of ``rows[source[start] : source[end]]``, or zeros if the bag is empty (``choice`` is an If)."""

    choice: Op
    rows: Value
    kind: str
    source: Value
    start: int
    end: int


@rule("concat_of_given_bags", {"Concat"})
def concat_of_given_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """The bags of a loop that ends by a counter, from PyTorch's newer exporter: an If gives zeros for an empty bag.

    The exporter writes the last of several means as a sum and a division; that part of the Concat stays."""
    if normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)):
        return None
    found = itertools.takewhile(lambda b: b is not None, (_given_bag(graph, v) for v in op.inputs))
    bags = [b for b in found if b is not None]
    if len(bags) < 2:
        return None
    first, trips = bags[0], len(bags)
    if any((b.rows, b.kind, b.source) != (first.rows, first.kind, first.source) for b in bags):
        return Miss("its parts reduce different values")
    if any((b.start, b.end) != (first.start + k, first.end + k) for k, b in enumerate(bags)):
        return Miss("its bags are not in the order of their bounds")
    looked = _looked_up(graph, first.rows)
    if looked is None:
        return Miss("its bags do not sum or average gathered rows of a table, with at most one factor per row")
    gather, weights = looked
    (count, *dims), (length,) = (graph.type(v).static_shape for v in (gather.value, first.source))
    reason = _no_product(graph.constant_value(gather.inputs[0]), trips, count)
    if reason is not None:
        return Miss(reason)

    def build(patch: Patch) -> Value:
        starts, ends = (part_of(patch, first.source, at, trips, length) for at in (first.start, first.end))
        bounds = (_bounds(patch, starts, trips, count), _bounds(patch, ends, trips, count))
        y = reshaped(patch, _product(patch, gather.value, weights, bounds, first.kind), (trips, *dims))
        return y if trips == len(op.inputs) else patch.add("Concat", [y, *op.inputs[trips:]], op.attrs)

    return Match((op, *(b.choice for b in bags)), build)


def _looked_up(graph: Graph, rows: Value) -> tuple[Op, Value | None] | None:
    """The Gather that computes ``rows``, which must have known sizes, and the column of factors of the rows (or None)."""
    product = producer(graph, rows, {"Mul"})
    parts = [rows] if product is None else [operand(product, k) for k in (0, 1)]
    for k, part in enumerate(parts):
        gather = producer(graph, part, {"Gather"})
        if gather is None or not takes_rows(graph, gather) or not graph.type(rows).is_static:
            continue
        column = None if product is None else parts[1 - k]
        shape = graph.type(rows).static_shape
        if graph.type(part).shape == shape and (
            column is None or graph.type(column).shape == (shape[0], *[1] * (len(shape) - 1))
        ):
            return gather, column
    return None


def _given_bag(graph: Graph, value: Value | None) -> _GivenBag | None:
    """The bag that ``value``, a part of a Concat, sums or averages; None if ``value`` has another form."""
    choice = producer(graph, value, {"If"}, alone=True)
    if choice is None or len(choice.outputs) > 1:
        return None
    empty, body = choice.attrs.then_branch.graph, choice.attrs.else_branch.graph
    reduce = producer(body, body.op(body.outputs[0]).inputs[0], {"ReduceSum", "ReduceMean"})
    cut = None if reduce is None else producer(body, reduce.input(0), {"Slice"})
    if reduce is None or cut is None or not reduce.attrs.keepdims or ints(body, reduce.input(1)) != (0,):
        return None
    if any(v is not None and ints(body, v) != only for v, only in ((cut.input(3), (0,)), (cut.input(4), (1,)))):
        return None
    outside = dict(zip(map(Value, body.inputs), choice.inputs[1 + choice.attrs.then_captured :], strict=True))
    rows, start, end = (outside.get(operand(cut, k)) for k in range(3))
    same = producer(graph, choice.inputs[0], {"Equal"})
    if rows is None or start is None or end is None or same is None or {*same.inputs} != {start, end}:
        return None
    if not is_filled(empty.constant_value(empty.op(empty.outputs[0]).inputs[0]), 0):
        return None
    (source, at), (other, to) = _element(graph, start), _element(graph, end)
    return _GivenBag(choice, rows, reduce.kind, source, at, to) if source == other and at >= 0 and to >= 0 else None


def _element(graph: Graph, value: Value) -> tuple[Value, int]:
    """The list that a value is one element of, and the element's position; position -1 if the value is no such element."""
    cut = producer(graph, value, {"Slice"})
    shape = None if cut is None else shape_of(graph, operand(cut))
    if (
        cut is None
        or shape is None
        or len(shape) != 1
        or graph.type(value).shape != (1,)
        or not isinstance(shape[0], int)
    ):
        return value, -1
    start = ints(graph, cut.input(1))
    if start is None or (cut.input(4) is not None and ints(graph, cut.input(4)) != (1,)):
        return value, -1
    return operand(cut), start[0] + shape[0] if start[0] < 0 else start[0]
