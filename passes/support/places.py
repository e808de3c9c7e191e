"""The places of the elements of a vector that are not zero, as a list of known length."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import ScatterElementsAttrs
from optdnn.ops.index import CumulativeAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.support.facts import in_shape
from optdnn.types import BOOL, INT64

MOST_PLACES = 1 << 14
"""Most elements whose places are listed by a scan."""


def ones_of(patch: Patch, x: Value) -> Value:
    """1 for each element that is not zero, and 0 for the others."""
    if patch.type(x).dtype != BOOL:
        zero = patch.constant(np.zeros((), patch.type(x).dtype), "zero")
        x = patch.add("Not", [patch.add("Equal", [x, zero])])
    return patch.add("Cast", [x], CastAttrs(INT64))


def total_of(patch: Patch, ones: Value) -> Value:
    """The number of ones: int64 [1]."""
    return in_shape(patch, patch.add("ReduceSum", [ones, None], ReduceAttrs(keepdims=False)), (1,))


def places_of(patch: Patch, ones: Value, total: Value) -> Value:
    """The places of the ones in a vector of known size, in their order, and behind them the other places: int64 [size]."""
    (size,) = patch.type(ones).static_shape
    places = patch.constant(np.arange(size), "places")
    before = patch.add("CumSum", [ones, patch.constant(np.array(0, np.int64), "axis")], CumulativeAttrs())
    one = patch.constant(np.array([1], np.int64), "one")
    behind = patch.add("Sub", [patch.add("Add", [total, places]), before])
    chosen = patch.add("Cast", [ones], CastAttrs(BOOL))
    at = patch.add("Where", [chosen, patch.add("Sub", [before, one]), behind])
    empty = patch.constant(np.zeros(size, np.int64), "empty")
    return patch.add("ScatterElements", [empty, at, places], ScatterElementsAttrs(0))
