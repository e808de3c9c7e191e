"""A linear recurrence ``s[t] = a[t] * s[t - 1] + b[t]`` as one launch that loops over the steps."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.ops.pointwise_scan import PointwiseScanAttrs

STEP_S = 5e-8
"""Seconds of a step of a looping launch (PointwiseScan): latency."""
ROUND_S, ELEMENT_S = 4e-6, 4e-12
"""Seconds of a round of prefixes: its launches, and for each element of the states. A round reads and writes seven such tensors."""


def is_looped(count: int, size: float) -> bool:
    """Whether a recurrence of ``count`` steps with ``size`` elements of all states is faster as one loop than as rounds on whole
    tensors. Up to 1,024 steps it always is, or nearly: there, rounds would gain 10 us at most, and round their products."""
    rounds = (count - 1).bit_length()
    return count * STEP_S <= max(1024 * STEP_S, rounds * (ROUND_S + size * ELEMENT_S))


def looped(patch: Patch, factors: Value, terms: Value, axis: int, count: int) -> Value:
    """All states along ``axis``, as the terms have it, by one loop over the steps that starts from zeros.

    The factors have the rank of the terms; their other axes may have size 1."""
    t = patch.type(terms)
    others = tuple(k for k in range(len(t.dims)) if k != axis)
    zero = patch.constant(np.zeros([t.static_shape[k] for k in others], t.dtype), "state")
    attrs = PointwiseScanAttrs(
        stages=(Stage("Mul", (1, 0)), Stage("Add", (~1, 2))),
        states=1,
        steps=count,
        axes=(axis, axis),
        starts=(0, 0),
        views=(others, others),
        following=(~2,),
        results=(~2,),
        result_axes=(axis,),
        result_kept=(False,),
    )
    return patch.add("PointwiseScan", [zero, factors, terms], attrs)
