"""Embedding bags of PyTorch's newer exporter become one product. Their bounds are computed; an If gives zeros for an empty bag."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.bag_bodies import iterated, part_of, takes_rows, trips_of, value_outside
from optdnn.passes.support.bag_products import OpenBags, product_of_bags, refuse_product
from optdnn.passes.support.chosen_bags import ChosenBag, chosen_bag
from optdnn.passes.support.facts import ints, operand, producer, reshaped, shape_of
from optdnn.types import normalize_axis


@dataclass(frozen=True)
class _Bags:
    """``trips`` bags: the sum or mean (``kind``) of ``rows[source[start + k] : source[end + k]]``."""

    rows: Value
    kind: str
    source: Value
    start: int
    end: int
    trips: int = 1
    open: OpenBags | None = None


@rule("loop_of_chosen_bags", {"Loop"})
def loop_of_chosen_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop whose iterations sum or average a run of gathered rows, or give zeros."""
    trips = trips_of(graph, op)
    body = op.attrs.body.graph
    choice = None if trips is None else producer(body, operand(body.op(body.outputs[1])), {"If"})
    bag = None if choice is None else chosen_bag(body, choice)
    if trips is None or bag is None:
        return None
    found = _of_all_iterations(graph, op, bag, trips)
    if found is None:
        return Miss("its bags are not in the order of their bounds")
    build = _as_product(graph, found)
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
    return replace(found, open=OpenBags(bag.open.count, counted.reshape(trips, 1) == bag.open.at))


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
def concat_of_given_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """The bags of a loop that the importer unrolled.

    The exporter writes the last of several means as a sum and a division; that part of the Concat stays."""
    if normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)):
        return None
    found = itertools.takewhile(lambda b: b is not None, (_given_bag(graph, v) for v in op.inputs))
    choices = [b for b in found if b is not None]
    if len(choices) < 2:
        return None
    first, *bags = (bag for _, bag in choices)
    trips = 1 + len(bags)
    if any((b.rows, b.kind, b.source) != (first.rows, first.kind, first.source) for b in bags):
        return Miss("its parts reduce different values")
    if any((b.start, b.end) != (first.start + k, first.end + k) for k, b in enumerate(bags, 1)):
        return Miss("its bags are not in the order of their bounds")
    build = _as_product(graph, replace(first, trips=trips))
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
    if choice is None or bag is None or bag.open is not None:
        return None
    (source, start), (other, end) = _element(graph, bag.start), _element(graph, bag.end)
    if source != other or start < 0 or end < 0:
        return None
    return choice, _Bags(bag.rows, bag.kind, source, start, end)


def _as_product(graph: Graph, bags: _Bags) -> Callable[[Patch], Value] | Miss:
    """Adds the product that computes the bags, shape (bags, *row); a Miss if none can."""
    looked = _looked_up(graph, bags.rows)
    if looked is None:
        return Miss("its bags do not sum or average gathered rows of a table, with at most one factor per row")
    gather, weights = looked
    (count, *dims), (length,) = (graph.type(v).static_shape for v in (gather.value, bags.source))
    reason = refuse_product(graph.constant_value(gather.inputs[0]), bags.trips, count)
    if reason is not None:
        return Miss(reason)

    def build(patch: Patch) -> Value:
        starts, ends = (part_of(patch, bags.source, at, bags.trips, length) for at in (bags.start, bags.end))
        y = product_of_bags(patch, gather.value, weights, (starts, ends), bags.kind, bags.trips, bags.open)
        return reshaped(patch, y, (bags.trips, *dims))

    return build


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
