"""NumPy kernel of SampledSum: weighted sums of image values sampled between pixels."""

from __future__ import annotations

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.grid_sample import grid_sample
from optdnn.types import Array


def sampled_sum(
    *operands: Array,
    mode: str = "linear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
    groups: int = 1,
) -> tuple[Array, ...]:
    """Images (N, C, H, W) and places (N * groups, R, P, 2) alternate, then weights; the result is (N * groups, C / groups, R)
    (:class:`optdnn.ops.sampled_sum.SampledSumAttrs`)."""
    found: list[Array] = []
    for x, places in zip(operands[0:-1:2], operands[1::2], strict=False):
        image = x.reshape(x.shape[0] * groups, x.shape[1] // groups, *x.shape[2:])
        found += grid_sample(image, places, mode=mode, padding_mode=padding_mode, align_corners=align_corners)
    samples = np.concatenate(found, 3)
    if len(operands) % 2:
        samples = samples * operands[-1]
    return (samples.sum(3, dtype=samples.dtype),)


KERNELS: dict[str, Kernel] = {"SampledSum": sampled_sum}
