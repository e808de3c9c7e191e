"""The stem of 8-bit networks: a strided convolution of few channels becomes a convolution over blocks of neighboring pixels."""

from __future__ import annotations

import numpy as np

from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.space_to_depth import space_to_depth, space_to_depth_weights
from optdnn.types import Array

LANES = 16
"""Channels per pixel of an image with neighboring pixels that are read together."""


def overlapped(source: Source, together: int) -> Source:
    """A strided few-channel source as a source over blocks of pixels: ``together`` neighbors in a row are the channels of one pixel.

    The blocks of :func:`.space_to_depth` have 16 channels, half of the K step of 8-bit wgmma. Neighboring pixels are
    neighbors in memory. A pixel of ``together`` x 16 channels that begins every 16 bytes therefore turns ``together`` taps into one.
    Padding to the left and right then has to be part of the image: :func:`row_padding`.
    """
    made = space_to_depth(source)
    taps = -(-made.kernel[1] // together)
    top, left, bottom, right = made.padding
    width = left + made.width + right + taps * together - made.kernel[1] - (together - 1)
    return Source(
        made.height, width, LANES * together, (made.kernel[0], taps), (1, 1), (top, 0, bottom, 0), (1, together), LANES
    )


def row_padding(source: Source, together: int) -> tuple[int, int, int]:
    """Rows of the image that :func:`overlapped` reads: number of zero pixels before a row, of image pixels, and of all pixels of a row."""
    made, wide = space_to_depth(source), overlapped(source, together)
    return made.padding[1], made.width, wide.width + together - 1


def overlapped_weights(source: Source, weight: Array, together: int) -> Array:
    """OIHW weights of ``source`` -> OIHW weights of ``overlapped(source, together)``."""
    blocks = space_to_depth_weights(source, weight)
    out, lanes, taps_h, taps_w = blocks.shape
    taps = -(-taps_w // together)
    padded = np.zeros((out, lanes, taps_h, taps * together), blocks.dtype)
    padded[..., :taps_w] = blocks
    split = padded.reshape(out, lanes, taps_h, taps, together)
    return np.ascontiguousarray(split.transpose(0, 4, 1, 2, 3)).reshape(out, together * lanes, taps_h, taps)
