"""The numbers of a quantized epilogue, and the stem's trick: what Hopper convolutions of 8-bit operands need beside a problem.

A sum ``a`` of products becomes ``x = float(a) * m[c]``, ``x = x + b[c]`` and so on through the stages, and at last
``saturate(round_half_even(x) + zero)``: each step is one fp32 rounding, nothing is contracted. Where every stage allows it
(bias, addition, ReLU, Clip, ...), ``m``, ``b`` and the other constants are divided by the result's scale beforehand, in float64 and
rounded once, so that x counts steps of the result; otherwise a multiplication by the reciprocal comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv.parameters import Requantize
from optdnn.kernels.conv.problem import Source, space_to_depth, space_to_depth_weights
from optdnn.runtime.cuda.compile import render
from optdnn.types import Array

BOUNDS = {"int8": (-128, 127), "uint8": (0, 255), "float8_e4m3fn": (-448, 448)}
"""Least and greatest value of an element type."""
LARGEST = 3.4028234663852886e38
"""Of the finite fp32 numbers: where there is no bound."""
LANES = 16
"""Channels per pixel of an image whose neighbouring pixels are read together."""
_BYTE_BIAS = {"int8": 8388608.0 + 128.0, "uint8": 8388608.0}


def byte_bias(dtype: str) -> float:
    """What widening a byte of this type by the mantissa of 2^23 adds to it (0 for what is widened otherwise)."""
    return _BYTE_BIAS.get(dtype, 0.0)


@dataclass(frozen=True)
class Affine:
    """A quantized tensor's element type, scale and zero point: real = (stored - zero) * scale."""

    dtype: str
    scale: float
    zero: int = 0


@dataclass(frozen=True, eq=False)
class Scaling:
    """``stages`` are the problem's; ``channel`` is fp32 ``[channels, 2]``: scale and bias."""

    stages: tuple[render.Stage, ...]
    channel: Array
    requantize: Requantize


_HOMOGENEOUS = frozenset({"bias", "add", "mul", "relu", "clip", "leaky_relu", "mul_const", "add_const"})
"""Stages that a positive factor passes through (with their constants divided by it)."""


def scaling(
    stages: Sequence[render.Stage], scale: Array, bias: Array, *, out: Affine | None, residual: Affine | None = None
) -> Scaling:
    """``stages`` without the leading bias, in real units; ``scale`` (input's times weight's) and ``bias`` per channel, float64.

    ``out`` None: the result stays a 16-bit float in real units.
    """
    factor = 1.0 if out is None else out.scale
    names = [str(stage[0]) for stage in stages]
    folded = factor != 1.0 and set(names) <= _HOMOGENEOUS
    unit = factor if folded else 1.0
    low, high = (-LARGEST, LARGEST) if out is None else (float(b - out.zero) for b in BOUNDS[out.dtype])
    kept: list[render.Stage] = []
    for name, *values in stages:
        by = unit if name in ("clip", "add_const") else 1.0
        kept.append((name, *(float(np.float32(float(v) / by)) for v in values)))
    if out is not None and not folded and factor != 1.0:
        kept.append(("mul_const", float(np.float32(1.0 / factor))))
    while out is not None and kept and kept[-1][0] in ("relu", "clip"):
        name, *bounds = kept.pop()
        floor, ceiling = (0.0, LARGEST) if name == "relu" else (float(v) for v in bounds)
        low, high = min(max(floor, low), high), min(max(ceiling, low), high)
    by = 1.0 if residual is None or "mul" in names else unit
    requantize = Requantize(
        1.0 if residual is None else float(np.float32(residual.scale / by)),
        0.0 if residual is None else byte_bias(residual.dtype) + residual.zero,
        float(low), float(high), 0 if out is None else out.zero,
    )  # fmt: skip
    channel = np.stack([scale / unit, bias / unit], 1).astype(np.float32)
    return Scaling((("bias",), *kept), np.ascontiguousarray(channel), requantize)


def pad_channels(channel: Array) -> Array:
    """The per-channel pairs filled up with zeros to a multiple of 16 channels, as the kernels read them."""
    out = np.zeros((-(-len(channel) // 16) * 16, 2), np.float32)
    out[: len(channel)] = channel
    return out


# ---------------------------------------------------------------- the stem


def overlapped(source: Source, together: int) -> Source:
    """A strided few-channel source as one over blocks of pixels of which ``together`` neighbours in a row are one pixel's channels.

    The blocks of :func:`.conv_problem.space_to_depth` have 16 channels, half of what 8-bit wgmma takes in one step. As
    neighbouring pixels are neighbours in memory, a pixel ``together`` x 16 channels wide that begins every 16 bytes makes one tap
    of ``together``. Padding to the left and right is then part of the image: :func:`row_padding`.
    """
    made = space_to_depth(source)
    if made.channels != LANES:
        raise InternalError(f"pixels of {made.channels} channels are not read together")
    taps = -(-made.kernel[1] // together)
    top, left, bottom, right = made.padding
    width = left + made.width + right + taps * together - made.kernel[1] - (together - 1)
    return Source(
        made.height, width, LANES * together, (made.kernel[0], taps), (1, 1), (top, 0, bottom, 0), (1, together), LANES
    )


def row_padding(source: Source, together: int) -> tuple[int, int, int]:
    """Of the image that :func:`overlapped` reads: pixels of zeros before a row, pixels that hold the image, pixels of a row."""
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
