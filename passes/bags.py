"""Embedding bags that exporters write as a Loop over the bags become one Gather and one reduction.

A bag is a run of indices. The table's rows at these indices are added up. If all bags have the same size and are adjacent, the
indices form a matrix with one bag per row. So do the weights of the rows, if there are any (product-key memories: Lample et al.,
2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.chosen_bags import concat_of_given_bags, loop_of_chosen_bags
from optdnn.passes.rules.given_bags import loop_of_given_bags
from optdnn.passes.rules.padded_bags import concat_of_padded_bags, loop_of_padded_bags
from optdnn.passes.support.bag_bodies import (
    REDUCTIONS,
    cut_of,
    lookup,
    part_of,
    table_of,
    trips_of,
    value_outside,
    weighted_rows,
    weights_of,
)
from optdnn.passes.support.facts import integers, ints, reshaped, scalar, shape_of
from optdnn.passes.support.parts import span
from optdnn.types import Array, normalize_axis


@dataclass(frozen=True)
class _Bags:
    """A loop body that reduces rows: its operators, and the begin and end of each bag. ``gather``: None for bags of rows.

    ``weights``: a list outside of the loop, a factor for each row; None for rows without factors."""

    reduce: Op
    gather: Op | None
    weights: Value | None
    cut: Op
    starts: Array
    ends: Array


@rule("loop_of_bags", {"Loop"})
def loop_of_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop whose iterations reduce a run of rows, or the rows at a run of indices."""
    trips = trips_of(graph, op)
    bags = None if trips is None else _bags(graph, op, trips)
    if trips is None or bags is None:
        return None
    listed = value_outside(op, bags.cut.input(0))
    shape = None if listed is None else shape_of(graph, listed)
    if listed is None or not shape or not all(isinstance(d, int) for d in shape):
        return None
    gathered = table_of(graph, op, bags.gather) if bags.gather is not None else None
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
        return Miss("its bags have different sizes, or are not adjacent")
    first = int(starts[0])

    def build(patch: Patch) -> None:
        rows = reshaped(patch, part_of(patch, listed, first, size * trips, count), (trips, size, *dims))
        if bags.gather is not None and gathered is not None:
            table = patch.constant(gathered, "table") if isinstance(gathered, np.ndarray) else gathered
            rows = patch.add("Gather", [table, rows], bags.gather.attrs)
        if bags.weights is not None:
            factors = part_of(patch, bags.weights, first, size * trips, count)
            rows = patch.add("Mul", [rows, reshaped(patch, factors, (trips, size, 1))])
        patch.replace(op.value, patch.add(bags.reduce.kind, [rows, integers(patch, [1], "axes")], bags.reduce.attrs))

    return Match((op,), build)


def _bags(graph: Graph, op: Op, trips: int) -> _Bags | None:
    body = op.attrs.body.graph
    found = weighted_rows(body)
    if found is None:
        return None
    reduce, gather, factor = found
    source = gather.input(1) if gather is not None else reduce.input(0)
    cut = cut_of(graph, op, source)
    if cut is None:
        return None
    weights = None if factor is None else weights_of(graph, op, factor, cut)
    if factor is not None and (
        weights is None or graph.type(weights).shape != shape_of(graph, value_outside(op, cut.input(0)))
    ):
        return None
    starts, ends = (_each(graph, op, cut.input(i), trips) for i in (1, 2))
    return None if starts is None or ends is None else _Bags(reduce, gather, weights, cut, starts, ends)


def _each(graph: Graph, op: Op, value: Value | None, trips: int) -> Array | None:
    """The numbers that the iterations take from a constant list, each at the number of its iteration; else None."""
    body, gather = op.attrs.body.graph, lookup(op, value)
    if gather is None:
        return None
    source = gather.inputs[0]
    known = body.constant_value(source)
    if known is None and (outside := value_outside(op, source)) is not None:
        known = graph.constant_value(outside)
    one = (
        known is not None
        and known.ndim
        and known.size == len(known)
        and not normalize_axis(gather.attrs.axis, known.ndim)
    )
    return known.reshape(-1)[:trips].astype(np.int64) if known is not None and one and known.size >= trips else None


# ---------------------------------------------------------------- iterations that the importer wrote out


@dataclass(frozen=True)
class _Bag:
    """A reduction of rows ``start`` to ``end`` of a value."""

    source: Value
    kind: str
    start: int
    end: int


@rule("concat_of_bags", {"Concat"})
def concat_of_bags(graph: Graph, op: Op) -> Match | Miss | None:
    """Reductions of adjacent runs of rows, all of one size, become one reduction."""
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
        return Miss("its bags have different sizes, or are not adjacent")

    def build(patch: Patch) -> Value:
        length, *dims = (int(d) for d in graph.type(first.source).static_shape)
        rows = part_of(patch, first.source, first.start, size * len(bags), length)
        split = reshaped(patch, rows, (len(bags), size, *dims))
        return patch.add(first.kind, [split, integers(patch, [1], "axes")], ReduceAttrs(keepdims=False))

    return Match((op,), build)


def _bag(graph: Graph, value: Value | None) -> _Bag | None:
    """A part of a Concat as a bag: ``Reduce(x[start:end])`` over rows, which keeps one row, or a sum divided by its row count."""
    op = None if value is None else graph.op(value)
    count = None
    if op is not None and op.kind == "Div":
        count, total = scalar(graph, op.input(1)), op.inputs[0]
        same = shape_of(graph, total) == op.outputs[0].type.shape  # the divisor adds no axis
        op = None if count is None or total is None or not same else graph.op(total)
    if op is None or op.kind not in REDUCTIONS or not op.attrs.keepdims or ints(graph, op.input(1)) != (0,):
        return None
    cut = graph.op(op.inputs[0])  # type: ignore[arg-type]
    source = cut.input(0)
    if cut.kind != "Slice" or source is None or not graph.type(source).is_static:
        return None
    rows, *dims = graph.type(source).static_shape
    found = span(graph, cut, rows, -1 - len(dims))
    if found is None or found[2] != 1:
        return None
    start, end, _ = found
    if start >= end or (count is not None and (op.kind != "ReduceSum" or count != end - start)):
        return None
    return _Bag(source, "ReduceMean" if count is not None else op.kind, start, end)


class Bags(RulePass):
    name = "bags"
    rules = (
        loop_of_bags,
        loop_of_given_bags,
        loop_of_chosen_bags,
        concat_of_bags,
        concat_of_given_bags,
        loop_of_padded_bags,
        concat_of_padded_bags,
    )
