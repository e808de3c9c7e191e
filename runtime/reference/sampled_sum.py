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
) -> tuple[Array, ...]:
    """Images (N, C, H, W) and places (N, groups, R, P, 2) alternate, then weights; the result is (N, C, R)
    (:class:`optdnn.ops.sampled_sum.SampledSumAttrs`)."""
    (n, c), (groups, rows) = operands[0].shape[:2], operands[1].shape[1:3]
    found: list[Array] = []
    for x, at in zip(operands[0:-1:2], operands[1::2], strict=False):
        image, places = x.reshape(n * groups, c // groups, *x.shape[2:]), at.reshape(n * groups, *at.shape[2:])
        found += grid_sample(image, places, mode=mode, padding_mode=padding_mode, align_corners=align_corners)
    samples = np.concatenate(found, 3)
    if len(operands) % 2:
        weights = np.broadcast_to(operands[-1], (n, groups, rows, samples.shape[3]))
        samples = samples * weights.reshape(n * groups, 1, *weights.shape[2:])
    return (samples.sum(3, dtype=samples.dtype).reshape(n, c, rows),)


KERNELS: dict[str, Kernel] = {"SampledSum": sampled_sum}
