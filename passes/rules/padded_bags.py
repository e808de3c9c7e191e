"""Embedding bags of PyTorch's newer exporter with a padding index: a Loop lists the positions of a bag that are no padding, and
an If gives zeros for an empty list.

Bags of one size become rows of a matrix, in which padding does not count. On GPUs, bags with other bounds become one segment
reduction of the rows. The elements of a list of bounds must be from 0 to the number of rows, as PyTorch requires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.bag_bodies import iterated, part_of, trips_of, value_outside
from optdnn.passes.support.bag_products import from_the_front, number_like
from optdnn.passes.support.bag_segments import segments_of_bags
from optdnn.passes.support.facts import integers, operand, producer, reshaped
from optdnn.passes.support.padded_bags import PaddedBag, Place, is_list, padded_bag, place_in_a_list
from optdnn.types import is_float, normalize_axis

LEAST = 2
"""Fewest bags that become one reduction."""


@dataclass(frozen=True)
class _Bounds:
    """The bounds of bags, each of which ends where the next one begins: numbers, or elements of a list at ``places``."""

    numbers: tuple[int, ...] = ()
    source: Value | None = None
    places: range = range(0)

    def inside(self, graph: Graph, rows: Value) -> bool:
        """Whether known bounds are positions of ``rows``, and others elements of their list."""
        length = graph.type(self.source or rows).static_shape[0]
        last = (*self.numbers, *self.places)[-1]
        found: bool = last < length if self.source else last <= length
        return found


@rule("loop_of_padded_bags", {"Loop"})
def loop_of_padded_bags(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Loop whose iterations reduce the rows of a bag that are no padding."""
    trips = trips_of(graph, op)
    body = op.attrs.body.graph
    bag = None if trips is None else padded_bag(body, operand(body.op(body.outputs[1])))
    if trips is None or bag is None:
        return None
    rows, indices = value_outside(op, bag.rows), value_outside(op, bag.indices)
    if rows is None or indices is None:
        return None
    found = replace(bag, rows=rows, indices=indices)
    starts, ends = ([_place(graph, op, v, k, trips) for k in range(trips)] for v in (bag.start, bag.end))
    bounds = _bounds(list(zip(starts, ends, strict=True)), entered=bag.entered)
    usable = _usable(graph, found, bounds, context)
    if isinstance(usable, Miss):
        return usable
    shape = op.outputs[0].type.static_shape
    return Match((op,), lambda patch: reshaped(patch, _reduced(patch, found, usable, trips), shape))


@rule("concat_of_padded_bags", {"Concat"})
def concat_of_padded_bags(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """The bags of a loop that the importer unrolled."""
    if len(op.inputs) < LEAST or normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)):
        return None
    found = [padded_bag(graph, v) for v in op.inputs]
    bags = [b for b in found if b is not None]
    if len(bags) < len(found) or len({b.shared for b in bags}) > 1:
        return None
    first = bags[0]
    places = [(place_in_a_list(graph, b.start), place_in_a_list(graph, b.end)) for b in bags]
    bounds = _bounds(places, entered=any(b.entered for b in bags))
    usable = _usable(graph, first, bounds, context)
    if isinstance(usable, Miss):
        return usable
    ops = (op, *(o for b in bags for o in b.ops))
    return Match(ops, lambda patch: _reduced(patch, first, usable, len(bags)))


def _usable(graph: Graph, bag: PaddedBag, bounds: _Bounds | None, context: PassContext) -> _Bounds | Miss:
    """The bounds of bags that one reduction can compute; a Miss for others."""
    types = [graph.type(v) for v in (bag.rows, bag.indices)]
    if not all(t.is_static for t in types) or not is_float(types[0].dtype):
        return Miss("its table has no floats, or its sizes are not known")
    if bounds is None or not bounds.inside(graph, bag.rows):
        return Miss("its bags do not follow one another inside of the rows")
    if not _equal(bounds) and not context.on_gpu:
        return Miss("its bags have different sizes")
    return bounds


def _place(graph: Graph, op: Op, value: Value | int, trip: int, trips: int) -> Place | None:
    """A bound of the bag of an iteration of a Loop; None if it is not known."""
    if isinstance(value, int):
        return None, value
    if (numbers := iterated(graph, op, value, trips)) is not None:
        return None, int(numbers.reshape(-1)[trip])
    gather = producer(op.attrs.body.graph, value, {"Gather"})
    source = None if gather is None else value_outside(op, operand(gather))
    places = None if gather is None else iterated(graph, op, operand(gather, 1), trips)
    if source is None or places is None or places.size != trips or not is_list(graph, source):
        return None
    return source, int(places.reshape(-1)[trip])


def _bounds(found: Sequence[tuple[Place | None, Place | None]], *, entered: bool) -> _Bounds | None:
    """The bounds of bags from the start and the end of each; None if a bag does not end where the next one begins.

    ``entered``: bags have at least one position."""
    known = [(start, end) for start, end in found if start is not None and end is not None]
    if len(known) < len(found) or len({place[0] for pair in known for place in pair}) != 1:
        return None
    source, first = known[0][0]
    starts, ends = ([pair[k][1] for pair in known] for k in (0, 1))
    if source is not None:
        follows = starts == list(range(first, first + len(known))) and ends == [n + 1 for n in starts] and not entered
        return _Bounds(source=source, places=range(first, first + len(known) + 1)) if follows and first >= 0 else None
    numbers = (*starts, ends[-1])
    least = 1 if entered else 0
    follows = list(numbers[1:]) == ends and first >= 0 and all(int(n) >= least for n in np.diff(numbers))
    return _Bounds(numbers) if follows else None


def _equal(bounds: _Bounds) -> bool:
    """Whether all bags have one known size, at least 1."""
    sizes = {*np.diff(bounds.numbers).tolist()} if bounds.numbers else set()
    return len(sizes) == 1 and 0 not in sizes


def _reduced(patch: Patch, bag: PaddedBag, bounds: _Bounds, count: int) -> Value:
    """Add the reduction of all bags, shape (bags, *row)."""
    length, *dims = patch.type(bag.rows).static_shape
    rows, indices = bag.rows, bag.indices
    lead: tuple[int, ...] = (length,)
    if _equal(bounds):
        lead = (count, bounds.numbers[1] - bounds.numbers[0])
        rows, indices = (part_of(patch, v, bounds.numbers[0], math.prod(lead), length) for v in (rows, indices))
        rows = reshaped(patch, rows, (*lead, *dims))
    if bag.count is not None:
        indices = from_the_front(patch, indices, bag.count)
    padding = patch.add("Equal", [indices, number_like(patch, indices, bag.padding)])
    padding = reshaped(patch, padding, (*lead, *[1] * len(dims)))
    dtype = patch.type(rows).dtype
    nothing = np.array(-np.inf if bag.kind == "ReduceMax" else 0, dtype)
    rows = patch.add("Where", [padding, patch.constant(nothing, "nothing"), rows])
    total = _of_bags(patch, rows, bounds, count, "ReduceMax" if bag.kind == "ReduceMax" else "ReduceSum")
    if bag.kind == "ReduceSum":
        return total
    ones = patch.add("Cast", [patch.add("Not", [padding])], CastAttrs(dtype))
    kept = _of_bags(patch, ones, bounds, count, "ReduceSum")
    if bag.kind == "ReduceMean":
        return patch.add("Div", [total, patch.add("Max", [kept, number_like(patch, kept, 1)])])
    empty = patch.add("Equal", [kept, number_like(patch, kept, 0)])
    return patch.add("Where", [empty, number_like(patch, total, 0), total])


def _of_bags(patch: Patch, rows: Value, bounds: _Bounds, count: int, kind: str) -> Value:
    """Add the sum or the maximum of each bag's rows: shape (bags, size, *row) for equal bags, else (rows, *row)."""
    if _equal(bounds):
        return patch.add(kind, [rows, integers(patch, [1], "axes")], ReduceAttrs(keepdims=False))
    places = patch.constant(np.arange(patch.type(rows).static_shape[0], dtype=np.int64), "places")
    return segments_of_bags(patch, rows, places, None, _limits(patch, bounds, count), kind)


def _limits(patch: Patch, bounds: _Bounds, count: int) -> Value:
    """The list of the bounds, shape (bags + 1,)."""
    if bounds.source is None:
        return integers(patch, bounds.numbers, "bounds")
    (length,) = patch.type(bounds.source).static_shape
    return part_of(patch, bounds.source, bounds.places[0], count + 1, length)
