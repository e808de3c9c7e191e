"""Embedding bags whose bounds are computed (a recommender's offsets are an input) become one product of matrices. On GPUs
they become one segment reduction, if each bag ends where the next one begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rule
from optdnn.passes.support.bag_bodies import (
    VIEWS,
    cut_of,
    known_table,
    lookup,
    part_of,
    part_of_a_list,
    reduction,
    table_of,
    takes_rows,
    trips_of,
    value_outside,
)
from optdnn.passes.support.bag_products import product_of_bags, refuse_product
from optdnn.passes.support.bag_segments import segments_of_bags
from optdnn.passes.support.facts import producer, reshaped, shape_of
from optdnn.types import is_float


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


class LoopOfGivenBags(Rule):
    """A Loop whose iterations reduce the rows that a run of indices selects. The bounds of the runs are computed."""

    name = "loop_of_given_bags"
    kinds = frozenset({"Loop"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        trips = trips_of(graph, op)
        bags = None if trips is None else _given_bags(graph, op, trips)
        if trips is None or bags is None:
            return None
        table = table_of(graph, op, bags.gather)
        if table is None:
            return None
        known = known_table(graph, table)
        (count,) = graph.type(bags.listed).static_shape
        bounds = _one_list(graph, bags, trips) if context.on_gpu else None
        if bounds is None and (reason := refuse_product(known, bags.reduce.kind, trips, count)) is not None:
            return Miss(reason)
        result = op.outputs[0].type
        if not result.is_static or not is_float(result.dtype):
            return Miss("its table has no floats, or its sizes are not known")

        def build(patch: Patch) -> None:
            source = patch.constant(table, "table") if isinstance(table, np.ndarray) else table
            if bounds is not None:
                listed, first = bounds
                limits = part_of(patch, listed, first, trips + 1, graph.type(listed).static_shape[0])
                total = segments_of_bags(patch, source, bags.listed, bags.weights, limits, bags.reduce.kind)
            else:
                rows = patch.add("Gather", [source, bags.listed], bags.gather.attrs)
                total = product_of_bags(patch, rows, bags.weights, (bags.starts, bags.ends), bags.reduce.kind, trips)
            patch.replace(op.value, reshaped(patch, total, result.static_shape))

        return Match((op,), build)


def _one_list(graph: Graph, bags: _GivenBags, trips: int) -> tuple[Value, int] | None:
    """The list that holds the bounds of all bags, and the place of the first one, if each bag ends where the next one begins."""
    (listed, first), (other, second) = (part_of_a_list(graph, v) or (v, 0) for v in (bags.starts, bags.ends))
    shape = graph.type(listed).shape
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int) or shape[0] <= first + trips:
        return None
    return (listed, first) if listed == other and second == first + 1 and graph.type(bags.listed).dims[0] else None


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
