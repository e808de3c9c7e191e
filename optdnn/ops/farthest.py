"""FarthestPoints: points of a cloud that are far from each other (PointNet++: Qi et al., 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import EXACT, Attrs, Call, Cost, Result
from optdnn.ops.checks import elements, floating
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export
from optdnn.ops.values import require_ints
from optdnn.types import FP64, INT64, DType, TensorType

THREADS = 1024
"""Most threads of a cloud's block on a GPU."""
MOST_REGISTERS = 40
"""Most registers of a thread for points and distances."""
FLOPS = 10
"""Operations for a coordinate: a difference, its square, and a share of the comparisons."""


def block_of(points: int) -> int:
    """Threads of a cloud's block: a power of two, so that the number of its warps is one, too."""
    return min(THREADS, max(32, 1 << (points - 1).bit_length()))


def fits(points: int, size: int, dtype: DType) -> bool:
    """Whether a block holds the points and distances of a cloud in registers."""
    each = -(-points // block_of(points))
    return each * (size + 1) * (2 if dtype == FP64 else 1) <= MOST_REGISTERS


@dataclass(frozen=True)
class FarthestPointsAttrs(Attrs):
    """``count``: how many points are chosen after the first one."""

    count: int


def _infer(call: Call) -> Result:
    """Points [B, N, D], squared distances to the points chosen before [B, N], and the first point of each cloud [B]."""
    x, nearest, first = floating(call), call.type(1), call.type(2)
    require_ints(call, 2)
    if len(x.dims) != 3 or nearest != x.with_shape(x.dims[:2]) or first.dims != x.dims[:1] or call.attrs.count < 1:
        raise ShapeError(f"FarthestPoints of {x}: {call.attrs.count} points, distances {nearest}, first points {first}")
    return Result((TensorType(INT64, (x.dims[0], call.attrs.count)),))


def _cost(call: Call, result: Result) -> Cost:
    return Cost(FLOPS * call.attrs.count * elements(call.type(0)))


def _export(a: FarthestPointsAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """The points one after another."""
    x, nearest, found = inputs
    clouds, _, size = e.type(x).dims
    chosen: list[str] = []
    for _ in range(a.count):
        (row,) = e.node("Unsqueeze", [found, e.const(np.array([1, 2]), "axes")])
        (row,) = e.node("Expand", [row, e.const(np.array([clouds, 1, size]), "shape")])
        (point,) = e.node("GatherElements", [x, row], axis=1)
        (way,) = e.node("Sub", [x, point])
        (square,) = e.node("Mul", [way, way])
        (distance,) = e.node("ReduceSum", [square, e.const(np.array([2]), "axes")], keepdims=0)
        (nearest,) = e.node("Min", [nearest, distance])
        (found,) = e.node("ArgMax", [nearest], axis=1, keepdims=0)
        chosen += e.node("Unsqueeze", [found, e.const(np.array([1]), "axes")])
    return e.node("Concat", chosen, axis=1)


DEFS: tuple[OpDef, ...] = (OpDef("FarthestPoints", _infer, FarthestPointsAttrs, {}, _export, cost=_cost, tol=EXACT),)
