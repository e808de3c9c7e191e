"""Embedding bags whose bounds are computed (a recommender's offsets are an input) become one product of matrices. On GPUs
they become one segment reduction, if each bag ends where the next one begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.bag_bodies import (
    cut_of,
    known_table,
    list_outside,
    lookup,
    part_of,
    part_of_a_list,
    table_of,
    trips_of,
    value_outside,
    weighted_rows,
    weights_of,
)
from optdnn.passes.support.bag_products import product_of_bags, refuse_product
from optdnn.passes.support.bag_segments import segments_of_bags
from optdnn.passes.support.facts import reshaped
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


@rule("loop_of_given_bags", {"Loop"})
def loop_of_given_bags(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Loop whose iterations reduce the rows that a run of indices selects. The bounds of the runs are computed."""
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
    found = weighted_rows(body)
    if found is None:
        return None
    reduce, gather, factor = found
    if gather is None:
        return None
    cut = cut_of(graph, op, gather.input(1))
    listed = None if cut is None else list_outside(graph, op, cut)
    if cut is None or listed is None:
        return None
    weights = None if factor is None else weights_of(graph, op, factor, cut)
    starts, ends = (value_outside(op, g.inputs[0]) if (g := lookup(op, cut.input(i))) else None for i in (1, 2))
    if starts is None or ends is None or (factor is not None and weights is None):
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
