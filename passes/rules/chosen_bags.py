"""Embedding bags of PyTorch's newer exporter: their bounds are computed, and an If gives zeros for an empty bag.

On GPUs they become one segment reduction, elsewhere a product of matrices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.bag_bodies import iterated, part_of, part_of_a_list, takes_rows, trips_of, value_outside
from optdnn.passes.support.bag_products import OpenBags, product_of_bags, refuse_product
from optdnn.passes.support.bag_segments import or_zeros, segments_of_bags
from optdnn.passes.support.chosen_bags import ChosenBag, chosen_bag
from optdnn.passes.support.facts import operand, producer, reshaped, shape_of, sliced
from optdnn.types import is_float, normalize_axis


@dataclass(frozen=True)
class _Bags:
    """``trips`` bags: the reduction (``kind``) of ``rows[source[start + k] : source[end + k]]``."""

    rows: Value
    kind: str
    source: Value
    start: int
    end: int
    trips: int = 1
    open: OpenBags | None = None


@rule("loop_of_chosen_bags", {"Loop"})
def loop_of_chosen_bags(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Loop whose iterations reduce a run of gathered rows, or give zeros."""
    trips = trips_of(graph, op)
    body = op.attrs.body.graph
    choice = None if trips is None else producer(body, operand(body.op(body.outputs[1])), {"If"})
    bag = None if choice is None else chosen_bag(body, choice)
    if trips is None or bag is None:
        return None
    found = _of_all_iterations(graph, op, bag, trips)
    if found is None:
        return Miss("its bags are not in the order of their bounds")
    build = _reduction(graph, found, context)
    if isinstance(build, Miss):
        return build
    shape = op.outputs[0].type.static_shape
    return Match((op,), lambda patch: patch.replace(op.value, reshaped(patch, build(patch), shape)))


def _of_all_iterations(graph: Graph, op: Op, bag: ChosenBag, trips: int) -> _Bags | None:
    """The bags of a Loop, whose iterations compute ``bag``; None if their bounds are not consecutive elements of one list."""
    rows = value_outside(op, bag.rows)
    (source, start), (other, end) = (_first_element(graph, op, v, trips) for v in (bag.start, bag.end))
    if rows is None or source is None or source != other or start is None or end is None:
        return None
    found = _Bags(rows, bag.kind, source, start, end, trips)
    if bag.open is None or bag.open.counter is None:
        return found if bag.open is None else None
    counted = iterated(graph, op, bag.open.counter, trips)
    if counted is None or counted.size != trips:
        return None
    where = counted.reshape(-1) == bag.open.at
    if bag.kind == "ReduceMax" and where[:-1].any():
        return None  # the next bag begins where this one would have ended
    return replace(found, open=OpenBags(bag.open.count, where))


def _first_element(graph: Graph, op: Op, value: Value, trips: int) -> tuple[Value | None, int | None]:
    """The list outside of the loop from which iteration ``k`` takes element ``first + k``, and ``first``; None for other values."""
    gather = producer(op.attrs.body.graph, value, {"Gather"})
    source = None if gather is None else value_outside(op, operand(gather))
    places = None if gather is None else iterated(graph, op, operand(gather, 1), trips)
    shape = shape_of(graph, source)
    if source is None or shape is None or len(shape) != 1 or not isinstance(shape[0], int):
        return None, None
    if places is None or places.shape != (trips, 1):
        return None, None
    first = int(places[0, 0])
    consecutive = first >= 0 and np.array_equal(places[:, 0], np.arange(first, first + trips))
    return source, first if consecutive else None


@rule("concat_of_given_bags", {"Concat"})
def concat_of_given_bags(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """The bags of a loop that the importer unrolled.

    The exporter writes the last one of several means or maxima in another way (:class:`OpenBags`)."""
    if normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)):
        return None
    found = itertools.takewhile(lambda b: b is not None, (_given_bag(graph, v) for v in op.inputs))
    choices = [b for b in found if b is not None]
    if len(choices) < 2:
        return None
    *closed, last = (bag for _, bag in choices)
    first, bags, trips = closed[0], [*closed[1:], last], len(choices)
    if any((b.rows, b.kind, b.source) != (first.rows, first.kind, first.source) for b in bags):
        return Miss("its parts reduce different values")
    if any((b.start, b.end) != (first.start + k, first.end + k) for k, b in enumerate(bags, 1)):
        return Miss("its bags are not in the order of their bounds")
    if any(b.open is not None for b in closed):
        return Miss("a bag before its last one has an end of its own")
    written = None if last.open is None else OpenBags(last.open.count, np.arange(trips) == trips - 1)
    build = _reduction(graph, replace(first, trips=trips, open=written), context)
    if isinstance(build, Miss):
        return build

    def joined(patch: Patch) -> Value:
        y = build(patch)
        return y if trips == len(op.inputs) else patch.add("Concat", [y, *op.inputs[trips:]], op.attrs)

    return Match((op, *(choice for choice, _ in choices)), joined)


def _given_bag(graph: Graph, value: Value | None) -> tuple[Op, _Bags] | None:
    """The bag that ``value``, a part of a Concat, sums or averages; None if ``value`` has another form."""
    choice = producer(graph, value, {"If"}, alone=True)
    bag = None if choice is None else chosen_bag(graph, choice)
    if choice is None or bag is None or (bag.open is not None and bag.open.counter is not None):
        return None
    (source, start), (other, end) = _element(graph, bag.start), _element(graph, bag.end)
    if source != other or start < 0 or end < 0:
        return None
    own = None if bag.open is None else OpenBags(bag.open.count, np.array([True]))
    return choice, _Bags(bag.rows, bag.kind, source, start, end, open=own)


def _reduction(graph: Graph, bags: _Bags, context: PassContext) -> Callable[[Patch], Value] | Miss:
    """Adds the reduction that computes the bags, shape (bags, *row); a Miss if none can."""
    looked = _looked_up(graph, bags.rows)
    if looked is None:
        return Miss("its bags do not reduce gathered rows of a table, with at most one factor per row")
    if bags.end != bags.start + 1:
        return Miss("its bags do not end where the next ones begin")
    gather, weights = looked
    table, indices = operand(gather), operand(gather, 1)
    (count, *dims), (length,) = (graph.type(v).static_shape for v in (gather.value, bags.source))
    if not count:
        return Miss("there are no indices")
    if not context.on_gpu and (reason := refuse_product(graph.constant_value(table), bags.kind, bags.trips, count)):
        return Miss(reason)

    def build(patch: Patch) -> Value:
        bounds = part_of(patch, bags.source, bags.start, bags.trips + 1, length)
        if context.on_gpu:
            y = segments_of_bags(patch, table, indices, weights, bounds, bags.kind, bags.open)
            return y if bags.kind != "ReduceMax" else or_zeros(patch, y, bounds)
        ends = sliced(patch, bounds, 1, bags.trips + 1, 0)
        y = product_of_bags(patch, gather.value, weights, (bounds, ends), bags.kind, bags.trips, bags.open)
        return reshaped(patch, y, (bags.trips, *dims))

    return build


def _looked_up(graph: Graph, rows: Value) -> tuple[Op, Value | None] | None:
    """The Gather that computes ``rows``, which must have known sizes, and the column of factors of the rows (or None)."""
    product = producer(graph, rows, {"Mul"})
    parts = [rows] if product is None else [operand(product, k) for k in (0, 1)]
    if not graph.type(rows).is_static or not is_float(graph.type(rows).dtype):
        return None
    shape = graph.type(rows).static_shape
    for k, part in enumerate(parts):
        gather = producer(graph, part, {"Gather"})
        if gather is None or not takes_rows(graph, gather) or graph.type(operand(gather, 1)).shape != shape[:1]:
            continue
        column = None if product is None else graph.type(parts[1 - k]).shape
        if graph.type(part).shape == shape and column in (None, (shape[0], *[1] * (len(shape) - 1))):
            return gather, None if product is None else parts[1 - k]
    return None


def _element(graph: Graph, value: Value) -> tuple[Value, int]:
    """The list that a value is one element of, and the element's position; position -1 if the value is no such element."""
    found = part_of_a_list(graph, value) if graph.type(value).shape == (1,) else None
    return (value, -1) if found is None else found
