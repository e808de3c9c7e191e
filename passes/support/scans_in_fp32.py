"""PointwiseScans in a 16-bit network: they read and store 16-bit floats, and compute in fp32, as their kernel does anyway.

The errors of constants and states grow with the steps: a decay of 0.9988, rounded to fp16, is wrong by 25 % after 1,000 steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.pointwise_scan import PointwiseScanAttrs
from optdnn.types import FP32, DType


def in_fp32(
    attrs: PointwiseScanAttrs, narrow: Collection[int], rounded: Collection[int], dtype: DType
) -> PointwiseScanAttrs:
    """The same steps between casts: the operands ``narrow`` (no states) come in ``dtype``, and the results with the numbers
    ``rounded`` are stored in it. Others keep the types that they have in the network."""
    register = {slot: ~(k + 1) for k, slot in enumerate(narrow)}

    def moved(arg: int) -> int:
        return register.get(arg, arg) if arg >= -1 else arg - len(register)

    stages = [Stage("Cast", (slot,), CastAttrs(FP32)) for slot in register]
    stages += [replace(s, args=tuple(None if a is None else moved(a) for a in s.args)) for s in attrs.stages]
    results = list(map(moved, attrs.results))
    stored: dict[int, int] = {}
    for arg in dict.fromkeys(results[k] for k in rounded):
        stages.append(Stage("Cast", (arg,), CastAttrs(dtype)))
        stored[arg] = ~len(stages)
    return replace(
        attrs,
        stages=tuple(stages),
        following=tuple(map(moved, attrs.following)),
        results=tuple(stored.get(arg, arg) for arg in results),
    )
