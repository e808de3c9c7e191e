"""A linear recurrence ``s[t] = a[t] * s[t - 1] + b[t]`` as one launch that loops over the steps."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.ops.pointwise_scan import PointwiseScanAttrs

LOOPED = 512
"""Most steps of one looping launch (PointwiseScan). A step takes some 50 ns, a round of prefixes some 4 us."""


def is_looped(count: int) -> bool:
    """Whether a recurrence of ``count`` steps is faster as one loop than as rounds on whole tensors."""
    return count <= LOOPED


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
