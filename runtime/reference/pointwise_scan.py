"""NumPy kernel of PointwiseScan: a recurrence of pointwise steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.runtime.reference.base import ComposedKernel, Run, picked
from optdnn.types import BF16, FP16, FP32, Array


def pointwise_scan(
    run: Run, *operands: Array, stages: Sequence[Any], states: int, steps: int, axes: Sequence[int], starts: Sequence[int],
    views: Sequence[Sequence[int]], following: Sequence[int], results: Sequence[int], result_axes: Sequence[int],
    result_kept: Sequence[bool], backward: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """The results of all steps, stacked (:class:`optdnn.ops.pointwise_scan.PointwiseScanAttrs` describes the attributes)."""
    values, sequences, others = operands[:states], operands[states : states + len(axes)], operands[states + len(axes) :]
    rows: list[list[Array]] = [[] for _ in results]
    for t in range(steps):
        parts = [
            x.take(start - t if backward else start + t, axis).reshape([1 if i < 0 else x.shape[i] for i in view])
            for x, axis, start, view in zip(sequences, axes, starts, views, strict=True)
        ]
        slots = (*values, *parts, *others)
        registers = _registers(run, slots, stages)
        values = tuple(registers[~a] if a < 0 else slots[a] for a in following)
        for row, a, axis, keep in zip(rows, results, result_axes, result_kept, strict=True):
            part = registers[~a] if a < 0 else slots[a]
            row.append(part if keep else np.expand_dims(part, axis))
    return tuple(
        np.concatenate(row[::-1] if backward else row, axis) for row, axis in zip(rows, result_axes, strict=True)
    )


def _registers(run: Run, slots: Sequence[Array], stages: Sequence[Any]) -> list[Array]:
    """Operand 0 and the result of every stage, 16-bit floats in fp32."""
    registers = [slots[0]]
    for stage in stages:
        made = run(stage.kind, picked(stage.args, registers, slots), stage.attrs)[0]
        registers.append(made.astype(FP32) if made.dtype in (FP16, BF16) else made)
    return registers


COMPOSED: dict[str, ComposedKernel] = {"PointwiseScan": pointwise_scan}
