"""NumPy kernel of SegmentSum: sums of rows computed from gathered rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.runtime.reference.base import ComposedKernel, Run, picked
from optdnn.types import Array

_REDUCTIONS: dict[str, tuple[np.ufunc, float]] = {
    "add": (np.add, 0.0), "max": (np.maximum, -np.inf), "min": (np.minimum, np.inf),
}  # fmt: skip


def segment_sum(
    run: Run, *operands: Array, stages: Sequence[Any], indices: Sequence[int], axes: Sequence[int],
    views: Sequence[Sequence[int]], factors: Sequence[str] = (), epilogue: Sequence[Any] = (),
    reduction: str = "add",
) -> tuple[Array, ...]:  # fmt: skip
    """One sum, maximum or minimum per segment (:class:`optdnn.ops.segment_sum.SegmentSumAttrs` describes the attributes)."""
    begin, rank = len(indices), max(map(len, views))
    arrays = operands[begin : begin + max(indices) + 1]
    first, *scales = operands[begin + len(arrays) :]
    tables = []
    for x, index, axis, view in zip(operands, indices, axes, views, strict=False):
        rows = x.take(arrays[index], axis) if index >= 0 else x[None]
        order = [axis if index >= 0 else 0, *(i if index >= 0 else i + 1 for i in view if i >= 0)]
        left = [i for i in range(rows.ndim) if i not in order]
        shape = [1 if i < 0 else x.shape[i] for i in view]
        whole = rows.transpose([*order, *left]).reshape([rows.shape[order[0]], *[1] * (rank - len(view)), *shape])
        tables.append(whole)
    rows = _computed(run, tables[0], stages, tables)
    lengths = np.maximum(np.diff(first), 0)
    rows = np.broadcast_to(rows, (len(arrays[0]), *rows.shape[1:]))
    join, neutral = _REDUCTIONS[reduction]
    total = np.full((len(lengths), *rows.shape[1:]), neutral, rows.dtype)
    places = np.arange(lengths.sum()) + np.repeat(first[:-1] - (np.cumsum(lengths) - lengths), lengths)
    join.at(total, np.repeat(np.arange(len(lengths)), lengths), rows[places])
    for kind, scale in zip(factors, scales, strict=False):
        total = run(kind, [total, scale], {})[0]
    total[lengths == 0] = neutral
    return (_computed(run, total, epilogue, operands),)


def _computed(run: Run, start: Array, stages: Sequence[Any], operands: Sequence[Array]) -> Array:
    """The last register of stages that start from ``start``."""
    registers = [start]
    for stage in stages:
        registers.append(run(stage.kind, picked(stage.args, registers, operands), stage.attrs)[0])
    return registers[-1]


COMPOSED: dict[str, ComposedKernel] = {"SegmentSum": segment_sum}
