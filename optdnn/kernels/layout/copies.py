"""Small copies (and conversions), which share launches (:mod:`optdnn.kernels.pointwise.joint`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.kernels.builder import TensorView
from optdnn.kernels.pointwise import joint
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.strides import merge, offset_type
from optdnn.types import BF16, FP16, FP32

MOST_ELEMENTS = 1 << 17
"""Most elements of a copy that is small: it takes about the time of a launch."""
_FLOATS = frozenset((FP32, FP16, BF16))


@dataclass(frozen=True)
class Part:
    """A copy of ``source`` to ``target``, which have the same shape."""

    source: TensorView
    target: TensorView

    @property
    def space(self) -> tuple[list[int], list[list[int]]]:
        """The merged axes, and the strides of the target and of the source."""
        return merge(self.target.shape, [self.target.strides, self.source.strides])

    @property
    def as_pointwise(self) -> joint.Part:
        """It as a part of a launch, which may have other parts."""
        return joint.Part((self.source,), (), self.target)


def refuse(part: Part) -> str | None:
    """Why a copy cannot share a launch with others; None if it can."""
    x, y = part.source, part.target
    if not 0 < math.prod(y.shape) <= MOST_ELEMENTS:
        return "it is large enough for a launch of its own"
    if x.shape != y.shape or len(part.space[0]) > joint.MOST_AXES:
        return "its axes cannot be merged"
    if offset_type([x, y]) != "i32":
        return "its elements are too far apart"
    return None if converts(part) is not None else f"no launch converts {x.dtype} to {y.dtype} beside others"


def converts(part: Part) -> bool | None:
    """Whether a copy converts floats; None for other conversions."""
    x, y = part.source.dtype, part.target.dtype
    return x != y if (x == y and x in CPP) or {x, y} <= _FLOATS else None
