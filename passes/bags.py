"""Embedding bags that exporters write as a Loop over the bags become one Gather and one reduction.

A bag is a run of indices; the rows of a table that they name are added up. Where all bags are of one size, and lie side by side,
the indices are a matrix with a bag in each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import integers, ints, producer, reshaped, scalar, shape_of
from optdnn.passes.unroll import goes_on, number_of
from optdnn.types import Array, normalize_axis

REDUCTIONS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax"})


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
    trips = number_of(graph, op.input(0))
    body = op.attrs.body.graph
    if op.attrs.carried or len(body.outputs) != 2 or not trips or trips < 1:
        return None
    going = op.input(1)
    if not goes_on(body) or (going is not None and not number_of(graph, going)):
        return None
    bags = _bags(graph, op, trips)
    if bags is None:
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


def _bags(graph: Graph, op: Op, trips: int) -> _Bags | None:
    body = op.attrs.body.graph
    reduce = producer(body, body.op(body.outputs[1]).inputs[0], REDUCTIONS)
    if reduce is None or ints(body, reduce.input(1)) != (0,):
        return None
    gather = producer(body, reduce.input(0), {"Gather"})
    if gather is not None and normalize_axis(gather.attrs.axis, len(body.type(gather.inputs[0]).dims)):
        return None
    cut = producer(body, reduce.input(0) if gather is None else gather.input(1), {"Slice"})
    if cut is None:
        return None
    if any(v is not None and _ints(graph, op, v) != only for v, only in ((cut.input(3), (0,)), (cut.input(4), (1,)))):
        return None
    starts, ends = (_each(graph, op, cut.input(i), trips) for i in (1, 2))
    return None if starts is None or ends is None else _Bags(reduce, gather, cut, starts, ends)


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
    body = op.attrs.body.graph
    while value is not None and body.op(value).kind in ("Unsqueeze", "Reshape", "Squeeze"):
        value = body.op(value).inputs[0]
    gather = producer(body, value, {"Gather"})
    if gather is None or gather.inputs[1] != Value(body.inputs[0]):
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


def _part(patch: Patch, rows: Value, start: int, count: int, length: int) -> Value:
    """``count`` of ``length`` rows, from ``start`` on."""
    if count == length:
        return rows
    return patch.add("Slice", [rows, *(integers(patch, [n], "bags") for n in (start, start + count, 0))])


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
    rules = (loop_of_bags, concat_of_bags)
