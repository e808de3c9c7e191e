"""One kernel size for convolutions with different kernel sizes: the smaller kernels are padded with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ops.conv import ConvAttrs
from optdnn.types import Array


def common_kernel(convs: Sequence[tuple[ConvAttrs, Array]]) -> tuple[ConvAttrs, list[Array]] | None:
    """Common attributes, and the padded weights (out, in, *kernel), of convolutions that differ only in kernel size and padding.

    None if a convolution is dilated or its padding is not known."""
    first, rank = convs[0][0], convs[0][1].ndim - 2
    if any(a.auto_pad != "NOTSET" or set(a.dilations) != {1} for a, _ in convs):
        return None
    axes = range(rank)
    begin = [min(-a.pads[i] for a, _ in convs) for i in axes]
    end = [max(w.shape[2 + i] - a.pads[i] for a, w in convs) for i in axes]
    after = [first.pads[rank + i] + end[i] - (convs[0][1].shape[2 + i] - first.pads[i]) for i in axes]
    wide = []
    for attrs, weight in convs:
        inside = [slice(-attrs.pads[i] - begin[i], weight.shape[2 + i] - attrs.pads[i] - begin[i]) for i in axes]
        taps = np.zeros((*weight.shape[:2], *(b - a for a, b in zip(begin, end, strict=True))), weight.dtype)
        taps[(slice(None), slice(None), *inside)] = weight
        wide.append(taps)
    return replace(first, pads=(*(-n for n in begin), *after)), wide
