"""The data of a Hopper convolution's launch: packed weights, and the parameter block as ``kernels/conv_common.cuh`` declares it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.launch import ParameterBlock
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.types import Array


def pack_weights(problem: Problem, weights: Sequence[Array]) -> Array:
    """OIHW weights of each source -> ``[channels, k_steps * block]`` in the kernel's K order, zero-filled. Keeps the dtype.

    Where results have 8 bits, there are rows to a multiple of 16, and of each 16 row r + 8 h is channel 2 r + h: a thread of
    the kernel then holds neighbouring channels."""
    rows: list[Array] = []
    for weight in weights:
        out, channels, taps_h, taps_w = weight.shape
        packed = np.zeros((out, taps_h, taps_w, -(-channels // problem.block) * problem.block), weight.dtype)
        packed[..., :channels] = weight.transpose(0, 2, 3, 1)
        rows.append(packed.reshape(out, -1))
    joined = np.concatenate(rows, axis=1)
    if problem.out_item == 1:
        full = np.zeros((-(-len(joined) // 16) * 16, joined.shape[1]), joined.dtype)
        full[: len(joined)] = joined
        joined = full.reshape(-1, 8, 2, joined.shape[1]).transpose(0, 2, 1, 3).reshape(full.shape)
    return np.ascontiguousarray(joined)


MAX_CONSTANTS = 8
"""Of a quantized epilogue's stages."""


def put_requantize(block: ParameterBlock, stages: Sequence[render.Stage], requantize: Requantize | None) -> None:
    """The numbers at the end of a parameter block, with the constants of the stages."""
    r = requantize or Requantize()
    constants = render.constants_of(stages) if requantize is not None else []
    if len(constants) > MAX_CONSTANTS:
        raise InternalError(f"a quantized epilogue has at most {MAX_CONSTANTS} constants, not {len(constants)}")
    block.f32(r.residual_scale, r.residual_offset, r.low, r.high).i32(r.zero)
    block.f32(*constants, *[0.0] * (MAX_CONSTANTS - len(constants)))


@dataclass(frozen=True)
class Scatter:
    """Where results go that are blocks of pixels: ``Scatter`` of ``kernels/conv_scatter.cuh``. Pairs are of (height, width);
    ``at``: elements from an image, a row and a column to the next."""

    strides: tuple[int, int]
    crops: tuple[int, int]
    channels: int
    size: tuple[int, int]
    at: tuple[int, int, int]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The fields of the kernels' struct."""
        return (*self.strides, *self.crops, self.channels, *self.size, *self.at)


class _Source(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in (
        "channel_blocks", "taps_h", "taps_w", "dilation_h", "dilation_w", "stride_h", "stride_w", "pad_h", "pad_w",
    )]  # fmt: skip


class _Ahead(ctypes.Structure):
    _fields_ = [("from_", ctypes.c_void_p), ("bytes", ctypes.c_uint32)]


class _Params(ctypes.Structure):
    _fields_ = [
        ("maps", ctypes.c_ubyte * (5 * 128)),
        ("bias", ctypes.c_void_p), ("output", ctypes.c_void_p), ("residual", ctypes.c_void_p),
        *[(name, ctypes.c_int) for name in (
            "channels", "pixel_count", "out_h", "out_w", "channel_tiles", "tiles", "k_steps", "reverse",
        )],
        ("source", _Source * 2), ("scatter", ctypes.c_int * 10),
        *[(name, ctypes.c_float) for name in ("residual_scale", "residual_offset", "low", "high")],
        ("zero", ctypes.c_int), ("constants", ctypes.c_float * MAX_CONSTANTS),
        ("before", ctypes.c_void_p), ("gate", ctypes.c_void_p),
        *[(name, ctypes.c_int) for name in ("gate_pitch", "image_pixels", "images", "gate_channels")],
        ("partial", ctypes.c_void_p), ("arrived", ctypes.c_void_p),
        ("ahead", _Ahead * 2),
        ("batch_tiles", ctypes.c_int), ("inner_batches", ctypes.c_int),
        ("band_channels", ctypes.c_int), ("band_inputs", ctypes.c_int),
    ]  # fmt: skip


BEFORE = _Params.before.offset
"""Where the addresses of a prologue's constants and of its gate are."""
PARTIAL = _Params.partial.offset
"""Where the addresses of stream-K's workspace are: partial sums, then counts (zeros between launches)."""
AHEAD = tuple(_Params.ahead.offset + i * ctypes.sizeof(_Ahead) for i in range(2))
"""Where weights of later launches may be named: an address of eight bytes, then how many bytes there are to bring into L2."""
_PARAMS_BYTES = -(-ctypes.sizeof(_Params) // 64) * 64


@dataclass(frozen=True)
class Pointers:
    """Device addresses: NHWC sources, packed weights, fp32 bias (padded to a multiple of 4; of 8-bit operands: pairs of scale and
    bias), NHWC output, NHWC residual; of a prologue, pairs of scale and shift per input channel (whole K steps), and the gate; of
    stream-K, the workspace (:func:`optdnn.kernels.conv.implicit_gemm.workspace`)."""

    sources: tuple[int, ...]
    weights: int
    bias: int
    output: int
    residual: int = 0
    before: int = 0
    gate: int = 0
    partial: int = 0
    arrived: int = 0


def weight_rows(problem: Problem) -> int:
    """Rows of the packed weights."""
    return problem.channels if problem.out_item > 1 else -(-problem.channels // 16) * 16


def parameters(
    problem: Problem, pointers: Pointers, maps: Sequence[bytes], requantize: Requantize | None = None
) -> Any:
    """The kernels' parameter block (a ctypes structure), but for the tile counts. ``maps``: weights, pixels, pixels, output,
    residual."""
    params = _Params()
    ctypes.memmove(params.maps, b"".join(maps), 5 * 128)
    params.bias, params.output, params.residual = pointers.bias, pointers.output, pointers.residual or None
    params.channels, params.pixel_count = problem.channels, problem.pixels
    params.out_h, params.out_w = problem.out_size
    params.k_steps = problem.k_steps
    params.band_channels, params.band_inputs = problem.band_channels, problem.sources[0].channels
    params.before, params.gate = pointers.before or None, pointers.gate or None
    params.partial, params.arrived = pointers.partial or None, pointers.arrived or None
    params.gate_pitch = params.gate_channels = problem.sources[0].channels
    params.image_pixels, params.images = math.prod(problem.out_size), problem.batch
    for slot, source in zip(params.source, problem.sources, strict=False):
        slot.channel_blocks = -(-source.channels // problem.block)
        slot.taps_h, slot.taps_w = source.kernel
        slot.dilation_h, slot.dilation_w = source.dilation
        slot.stride_h, slot.stride_w = source.stride
        slot.pad_h, slot.pad_w = source.padding[0], source.padding[1]
    if requantize is not None:
        for name in ("residual_scale", "residual_offset", "low", "high", "zero"):
            setattr(params, name, getattr(requantize, name))
        constants = render.constants_of(problem.epilogue)
        if len(constants) > MAX_CONSTANTS:
            raise InternalError(f"a quantized epilogue has at most {MAX_CONSTANTS} constants, not {len(constants)}")
        params.constants[: len(constants)] = constants
    return params


def put_scatter(params: Any, scatter: Scatter) -> None:
    """Say in the parameter block where results go."""
    params.scatter[:] = scatter.numbers


def raw_bytes(params: Any) -> bytes:
    """The block as the kernel takes it: tensor maps make it a multiple of 64 bytes."""
    return bytes(params).ljust(_PARAMS_BYTES, b"\0")
