"""Indices that are known before a run: are they within the operand that they address?

Gather, GatherElements, GatherND, ScatterElements and ScatterND read or write at the positions in operand 1. Libraries do not
always check these. So an index that is known to be out of range is an error of the model on every target (:func:`refuse_outside`).
Before such an operator goes to a library, :func:`all_inside` tells whether all positions are proven to be in range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.dim import DimLike, bounds
from optdnn.errors import ShapeError
from optdnn.ops.base import Call, Known
from optdnn.types import TensorType, normalize_axis

ALONG_AXIS = frozenset({"Gather", "GatherElements", "PackedGather", "ScatterElements"})
"""Kinds with indices along one axis: the attribute ``axis``, or the first axis without it."""
TUPLES = frozenset({"GatherND", "ScatterND"})
"""Kinds with tuples of indices, one for each of the leading axes."""


def addressed(kind: str, attrs: Any, x: TensorType, indices: TensorType) -> tuple[DimLike, ...] | None:
    """The upper bounds (exclusive) of a tuple of positions, or of the single position; None if they are unknown."""
    if x.shape is None or indices.shape is None:
        return None
    if kind in ALONG_AXIS:
        return (x.shape[normalize_axis(getattr(attrs, "axis", 0), len(x.shape))],)
    depth = indices.shape[-1] if indices.shape else None
    if not isinstance(depth, int):
        return None
    batch = attrs.batch_dims if kind == "GatherND" else 0
    return x.shape[batch : batch + depth]


def refuse_outside(call: Call) -> None:
    """Raise ShapeError for an index of ``call`` (one of the kinds above) that is out of range for all sizes."""
    x, value = call.type(0), call.value(1)
    sizes = addressed(call.kind, call.attrs, x, call.type(1))
    if value is None or sizes is None:
        return
    first = getattr(call.attrs, "axis" if call.kind in ALONG_AXIS else "batch_dims", 0)
    for axis, (size, positions) in enumerate(zip(sizes, _extremes(value, len(sizes)), strict=True), first):
        for v in positions:
            if bounds(v - size)[0] >= 0 or bounds(v + size)[1] < 0:
                raise ShapeError(f"{call.kind} index {v} is out of range for axis {axis} of {x}")


def all_inside(kind: str, attrs: Any, types: Sequence[TensorType | None], value: Known | None) -> bool:
    """Whether every position of ``value`` (operand 1) is in range of operand 0 for all sizes of symbols, and the shapes
    of the operands match."""
    x, indices = types[0], types[1]
    if value is None or x is None or indices is None:
        return False
    sizes = addressed(kind, attrs, x, indices)
    if sizes is None or not _shapes_fit(kind, attrs, x, indices):
        return False
    return all(
        bounds(v - size)[1] < 0 and bounds(v + size)[0] >= 0
        for size, positions in zip(sizes, _extremes(value, len(sizes)), strict=True)
        for v in positions
    )


def _shapes_fit(kind: str, attrs: Any, x: TensorType, indices: TensorType) -> bool:
    if kind in ("GatherElements", "ScatterElements"):
        axis = normalize_axis(attrs.axis, len(x.dims))
        pairs = [(a, b) for k, (a, b) in enumerate(zip(indices.dims, x.dims, strict=True)) if k != axis]
        return all(bounds(b - a)[0] >= 0 for a, b in pairs)
    batch = attrs.batch_dims if kind == "GatherND" else 0
    return all(bounds(a - b) == (0, 0) for a, b in zip(indices.dims[:batch], x.dims[:batch], strict=True))


def _extremes(value: Known, columns: int) -> list[list[DimLike]]:
    """For each position of a tuple: the smallest and the largest value if all are integers, otherwise every value."""
    if not value.size:
        return [[] for _ in range(columns)]
    rows = value.reshape(-1, columns)
    if rows.dtype == object:
        return [
            list(dict.fromkeys(v if not isinstance(v, np.integer) else int(v) for v in column)) for column in rows.T
        ]
    return [[int(low), int(high)] for low, high in zip(rows.min(axis=0), rows.max(axis=0), strict=True)]
