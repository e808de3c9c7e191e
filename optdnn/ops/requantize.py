"""The constants of a quantized operator: the way from sums of 8-bit products to stored results.

A sum ``a`` of products becomes ``x = float(a) * m[c]``, ``x = x + b[c]`` and so on through the stages, and finally
``saturate(round_half_even(x) + zero)``. Each step is one fp32 rounding; nothing is contracted. If every stage allows it (bias,
addition, ReLU, Clip, ...), x counts steps of the result: ``m``, ``b`` and the other constants are divided by the result's scale
beforehand, in float64, and rounded once. Otherwise a multiplication by the reciprocal comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.runtime.cuda.compile import render
from optdnn.types import Array

LARGEST = 3.4028234663852886e38
"""The largest finite fp32 number, for missing bounds."""
BOUNDS = {"int8": (-128, 127), "uint8": (0, 255), "float8_e4m3fn": (-448, 448), "float16": (-LARGEST, LARGEST)}
"""Least and greatest value of an element type. Numbers beyond fp16 become infinite, as in a Cast; they do not saturate."""
MAX_CONSTANTS = 12
"""Most constants of a quantized epilogue's stages: the kernels' parameter blocks have room for them."""
_BYTE_BIAS = {"int8": 8388608.0 + 128.0, "uint8": 8388608.0}


def byte_bias(dtype: str) -> float:
    """The value that a byte of this type gains when it is widened by the mantissa of 2^23 (0 for types that are widened
    otherwise)."""
    return _BYTE_BIAS.get(dtype, 0.0)


@dataclass(frozen=True)
class Requantize:
    """The per-tensor constants of a quantized epilogue: ``Requantize`` of ``conv_element.cuh``."""

    residual_scale: float = 1.0
    residual_offset: float = 0.0
    low: float = -128.0
    high: float = 127.0
    zero: int = 0


@dataclass(frozen=True)
class QuantParams:
    """A quantized tensor's element type, scale and zero point: real = (stored - zero) * scale."""

    dtype: str
    scale: float
    zero: int = 0


@dataclass(frozen=True, eq=False)
class Scaling:
    """``stages`` are the problem's; ``channel`` is fp32 ``[channels, 2]``: scale and bias. What a ``channel_add`` adds,
    or a ``channel_mul`` or ``prelu`` multiplies by, follows if there is one: ``[channels, 3]``."""

    stages: tuple[render.Stage, ...]
    channel: Array
    requantize: Requantize


_HOMOGENEOUS = frozenset({"bias", "add", "mul", "relu", "clip", "leaky_relu", "prelu", "mul_const", "add_const"})
"""Stages that a positive factor passes through (with their constants divided by it)."""


def scaling(
    stages: Sequence[render.Stage],
    scale: Array,
    bias: Array,
    *,
    out: QuantParams | None,
    residual: QuantParams | None = None,
    numbers: Array | None = None,
) -> Scaling:
    """``stages`` without the leading bias, in real units; ``scale`` (input's times weight's) and ``bias`` per channel, float64.
    ``numbers``: what the stage ``channel_add`` adds to each channel, or ``channel_mul`` or ``prelu`` multiplies it by.

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
    more = [] if numbers is None else [numbers]
    channel = np.stack([scale / unit, bias / unit, *more], 1).astype(np.float32)
    return Scaling((("bias",), *kept), np.ascontiguousarray(channel), requantize)


def pad_channels(channel: Array) -> Array:
    """Per-channel values, two or four per channel, padded with zeros to a multiple of 16 channels, as the kernels read them."""
    out = np.zeros((-(-len(channel) // 16) * 16, 2 if channel.shape[1] == 2 else 4), np.float32)
    out[: len(channel), : channel.shape[1]] = channel
    return out
