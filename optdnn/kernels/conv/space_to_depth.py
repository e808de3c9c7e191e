"""Strided convolutions of few channels as convolutions of stride 1 over blocks of pixels."""

from __future__ import annotations

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv.problem import Source
from optdnn.types import Array


def space_to_depth(source: Source) -> Source:
    """The stride-1 source with ``stride x stride`` pixels moved into the channels, for a strided source of few channels.

    Tap t of the new filter covers taps ``stride * (t - pad') + d + pad`` of the old one, for d in 0..stride - 1, where ``pad'`` is
    the new padding. Channels are filled up with zeros to a multiple of 16.
    """
    stride = source.stride[0]
    if source.stride != (stride, stride) or source.dilation != (1, 1):
        raise InternalError("space_to_depth needs equal strides and no dilation")
    out = source.output()
    size = (-(-source.height // stride), -(-source.width // stride))
    before = [-(-pad // stride) for pad in source.padding[:2]]
    taps = [
        (k - 1 - pad) // stride + b + 1 for k, pad, b in zip(source.kernel, source.padding[:2], before, strict=True)
    ]
    after = [o - n - b + t - 1 for o, n, b, t in zip(out, size, before, taps, strict=True)]
    channels = -(-source.channels * stride * stride // 16) * 16
    return Source(size[0], size[1], channels, (taps[0], taps[1]), (1, 1), (before[0], before[1], after[0], after[1]))


def space_to_depth_weights(source: Source, weight: Array) -> Array:
    """OIHW weights of ``source`` -> OIHW weights of ``space_to_depth(source)``. Keeps the dtype; every weight appears once."""
    made, stride = space_to_depth(source), source.stride[0]
    out, channels, taps_h, taps_w = weight.shape
    packed = np.zeros((out, made.channels, *made.kernel), weight.dtype)
    for r in range(taps_h):
        for s in range(taps_w):
            row, dy = divmod(r - source.padding[0], stride)
            column, dx = divmod(s - source.padding[1], stride)
            lane = (dy * stride + dx) * channels
            packed[:, lane : lane + channels, row + made.padding[0], column + made.padding[1]] = weight[:, :, r, s]
    return packed
