"""Embedding bags with computed bounds as a product of matrices.

The left operand has a row for each bag and a column for each index: its elements are the weights of the indices in the bag, and 0
elsewhere. For means, they are divided by the size of the bag. The table must be a constant of finite numbers, since 0 times an
infinity or a NaN is not 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.support.bag_bodies import part_of
from optdnn.passes.support.facts import reshaped
from optdnn.types import Array, is_float

MOST_MEMBERS = 1 << 26
"""Largest number of elements (bags times indices) of the left operand: 128 MiB at 16 bits."""


@dataclass(frozen=True)
class OpenBags:
    """Bags that PyTorch's newer exporter writes in another way, as the last one: a mean is the sum divided by ``count`` minus the
    start; a maximum is that of all rows from the start to ``count``.

    ``where``: whether each bag is one, shape (bags,)."""

    count: int
    where: Array


def refuse_product(table: Array | None, kind: str, bags: int, count: int) -> str | None:
    """The reason why a product cannot reduce the rows of a table; None if it can."""
    if kind == "ReduceMax":
        return "it takes the maximum of bags whose bounds are computed, which no product can express"
    if table is None or not is_float(table.dtype) or not np.isfinite(table).all():
        return "its table is not a constant of finite numbers: a product would spread a NaN to other bags"
    if not count:
        return "there are no indices"
    if bags * count > MOST_MEMBERS:
        return f"it has {bags} bags and {count} indices: their matrix would be larger than {MOST_MEMBERS} elements"
    return None


def product_of_bags(
    patch: Patch,
    rows: Value,
    weights: Value | None,
    bounds: tuple[Value, Value],
    kind: str,
    trips: int,
    open_bags: OpenBags | None = None,
) -> Value:
    """Add the product: the sum or mean of the rows of each of ``trips`` bags. ``bounds``: the lists of their starts and ends."""
    shape = patch.type(rows).static_shape
    starts, ends = (_column(patch, v, trips) for v in bounds)
    run = (from_the_front(patch, starts, shape[0]), from_the_front(patch, ends, shape[0]))
    cast = CastAttrs(patch.type(rows).dtype)
    members = _members(patch, weights, run, cast, shape[0])
    if kind == "ReduceMean":
        sizes = _sizes(patch, run, shape[0])
        if open_bags is not None:
            open_sizes = patch.add("Sub", [number_like(patch, starts, open_bags.count), starts])
            sizes = patch.add("Where", [patch.constant(open_bags.where[:, None], "open"), open_sizes, sizes])
        divisors = patch.add("Max", [sizes, number_like(patch, starts, 1)])
        members = patch.add("Div", [members, patch.add("Cast", [divisors], cast)])
    return patch.add("MatMul", [members, reshaped(patch, rows, (shape[0], int(np.prod(shape[1:]))))], MatMulAttrs())


def number_like(patch: Patch, value: Value, number: int) -> Value:
    """A constant of the type of ``value``."""
    return patch.constant(np.array(number, patch.type(value).dtype), "bags")


def _column(patch: Patch, bounds: Value, trips: int) -> Value:
    """The first ``trips`` bounds, shape (trips, 1)."""
    column = reshaped(patch, bounds, (int(patch.type(bounds).static_shape[0]), 1))
    return part_of(patch, column, 0, trips, int(patch.type(column).static_shape[0]))


def from_the_front(patch: Patch, places: Value, count: int) -> Value:
    """Positions with ``count`` added to the negative ones, which count from the end."""
    negative = patch.add("Less", [places, number_like(patch, places, 0)])
    return patch.add("Where", [negative, patch.add("Add", [places, number_like(patch, places, count)]), places])


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
    """The number of indices of each bag; 0 or less for an empty bag, whose mean is defined as 0."""
    begin = patch.add("Max", [bounds[0], number_like(patch, bounds[0], 0)])
    end = patch.add("Min", [bounds[1], number_like(patch, bounds[1], count)])
    return patch.add("Sub", [end, begin])
