"""Embedding bags whose bounds are computed (a recommender's offsets are an input) become one product of matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.bag_bodies import (
    VIEWS,
    cut_of,
    lookup,
    reduction,
    table_of,
    takes_rows,
    trips_of,
    value_outside,
)
from optdnn.passes.support.bag_products import product_of_bags, refuse_product
from optdnn.passes.support.facts import producer, reshaped, shape_of


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
    reason = refuse_product(known, trips, count)
    if table is None or known is None or reason is not None:
        return Miss(reason or "")
    kept = (1,) if bags.reduce.attrs.keepdims else ()

    def build(patch: Patch) -> None:
        source = patch.constant(table, "table") if isinstance(table, np.ndarray) else table
        rows = patch.add("Gather", [source, bags.listed], bags.gather.attrs)
        total = product_of_bags(patch, rows, bags.weights, (bags.starts, bags.ends), bags.reduce.kind, trips)
        patch.replace(op.value, reshaped(patch, total, (trips, *kept, *known.shape[1:])))

    return Match((op,), build)


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
