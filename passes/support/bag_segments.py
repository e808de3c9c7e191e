"""Embedding bags with computed bounds as one segment reduction of gathered rows: each bag ends where the next one begins."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.segment_sum import SegmentSumAttrs
from optdnn.passes.support.bag_products import OpenBags, from_the_front, number_like
from optdnn.passes.support.facts import reshaped, sliced
from optdnn.types import INT32

_REDUCTIONS = {"ReduceSum": "add", "ReduceMean": "add", "ReduceMax": "max"}


def segments_of_bags(
    patch: Patch,
    table: Value,
    indices: Value,
    weights: Value | None,
    bounds: Value,
    kind: str,
    open_bags: OpenBags | None = None,
) -> Value:
    """Add the reduction of the rows ``table[indices]``, each multiplied by its weight, shape (bags, *row).

    Bag ``k`` has the rows from ``bounds[k]`` to ``bounds[k + 1]``. The table has a float type, and all sizes are known. The sum or
    mean of no rows is 0, the maximum -inf. Indices that are out of range read the first or the last row."""
    (rows, *dims), (count,), (ends,) = (patch.type(v).static_shape for v in (table, indices, bounds))
    if kind == "ReduceMax" and open_bags is not None:
        last = patch.constant(np.append(False, open_bags.where), "open")
        bounds = patch.add("Where", [last, number_like(patch, bounds, open_bags.count), bounds])
    first = _in_range(patch, bounds, count, count)
    tables, arrays = [table], [_in_range(patch, indices, rows, rows - 1)]
    stages: tuple[Stage, ...] = ()
    if weights is not None:
        tables.append(reshaped(patch, weights, (count,)))
        arrays.append(patch.constant(np.arange(count, dtype=np.int32), "places"))
        stages = (Stage("Mul", (~0, 1)),)
    factors = []
    if kind == "ReduceMean":
        sizes = patch.add("Cast", [_sizes(patch, first, bounds, ends, open_bags)], CastAttrs(patch.type(table).dtype))
        factors = [reshaped(patch, sizes, (ends - 1, *[1] * len(dims)))]
    attrs = SegmentSumAttrs(
        stages,
        indices=tuple(range(len(tables))),
        axes=(0,) * len(tables),
        views=(tuple(range(1, len(dims) + 1)), (-1,) * len(dims))[: len(tables)],
        factors=("Div",) * len(factors),
        reduction=_REDUCTIONS[kind],
    )
    return patch.add("SegmentSum", [*tables, *arrays, first, *factors], attrs)


def or_zeros(patch: Patch, reduced: Value, bounds: Value) -> Value:
    """The reduced bags, shape (bags, *row), with zeros for those that end where they begin."""
    (ends,), (bags, *dims) = patch.type(bounds).static_shape, patch.type(reduced).static_shape
    same = patch.add("Equal", [sliced(patch, bounds, 0, ends - 1, 0), sliced(patch, bounds, 1, ends, 0)])
    same = reshaped(patch, same, (bags, *[1] * len(dims)))
    return patch.add("Where", [same, number_like(patch, reduced, 0), reduced])


def _in_range(patch: Patch, places: Value, count: int, most: int) -> Value:
    """Positions as int32 from 0 to ``most``; ``count`` is added to negative ones."""
    found = patch.add("Max", [from_the_front(patch, places, count), number_like(patch, places, 0)])
    found = patch.add("Min", [found, number_like(patch, places, most)])
    return patch.add("Cast", [found], CastAttrs(INT32))


def _sizes(patch: Patch, first: Value, bounds: Value, ends: int, open_bags: OpenBags | None) -> Value:
    """The divisors of the bags' means. That of an empty bag has no meaning."""
    sizes = patch.add("Sub", [sliced(patch, first, 1, ends, 0), sliced(patch, first, 0, ends - 1, 0)])
    if open_bags is None:
        return sizes
    starts = sliced(patch, bounds, 0, ends - 1, 0)
    count, one = (number_like(patch, bounds, n) for n in (open_bags.count, 1))
    open_sizes = patch.add("Cast", [patch.add("Max", [patch.add("Sub", [count, starts]), one])], CastAttrs(INT32))
    return patch.add("Where", [patch.constant(open_bags.where, "open"), open_sizes, sizes])
