"""The data of a Hopper convolution's launch: packed weights, and the parameter block as ``conv_common.cuh`` declares it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.builder import TensorView
from optdnn.kernels.conv.padding import put_edges
from optdnn.kernels.conv.problem import Depth, Problem, Source
from optdnn.kernels.conv.row_forms import MOMENT_CHANNELS, MOMENT_ROWS
from optdnn.kernels.launch import Parameters
from optdnn.ops.requantize import MAX_CONSTANTS, Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.launches.plan import TensorMap
from optdnn.types import Array


def pack_weights(problem: Problem, weights: Sequence[Array]) -> Array:
    """OIHW (of a volume OIDHW) weights of each source -> ``[channels, k_steps * block]`` in the kernel's K order, zero-filled. Keeps the
    dtype.

    For 8-bit results, rows are padded to a multiple of 16, and in each 16 rows, row r + 8 h is channel 2 r + h. A thread of the
    kernel then holds neighboring channels."""
    rows: list[Array] = []
    for source, given in zip(problem.sources, weights, strict=True):
        weight = given if source.depth is None else together_weights(given, source.depth)
        out, channels, *depth, taps_h, taps_w = weight.shape
        packed = np.zeros((out, taps_h, taps_w, *depth, -(-channels // problem.block) * problem.block), weight.dtype)
        packed[..., :channels] = weight.transpose(0, *((3, 4, 2, 1) if depth else (2, 3, 1)))
        rows.append(packed.reshape(out, -1))
    joined = np.concatenate(rows, axis=1)
    if problem.out_item == 1:
        joined = permuted_rows(joined)
    return np.ascontiguousarray(joined)


def permuted_rows(matrix: Array) -> Array:
    """``[channels, depth]`` with rows padded to a multiple of 16 and permuted: in each 16 rows, row r + 8 h is channel 2 r + h."""
    full = np.zeros((-(-len(matrix) // 16) * 16, matrix.shape[1]), matrix.dtype)
    full[: len(matrix)] = matrix
    return np.ascontiguousarray(full.reshape(-1, 8, 2, matrix.shape[1]).transpose(0, 2, 1, 3).reshape(full.shape))


def put_requantize(parameters: Parameters, stages: Sequence[render.Stage], requantize: Requantize | None) -> None:
    """Append the fields of a quantized epilogue to a parameter block, with the constants of its stages."""
    r = requantize or Requantize()
    constants = render.constants_of(stages) if requantize is not None else []
    if len(constants) > MAX_CONSTANTS:
        raise InternalError(f"a quantized epilogue has at most {MAX_CONSTANTS} constants, not {len(constants)}")
    parameters.f32(r.residual_scale, r.residual_offset, r.low, r.high).i32(r.zero)
    parameters.f32(*constants, *[0.0] * (MAX_CONSTANTS - len(constants)))


@dataclass(frozen=True)
class Scatter:
    """Destination of results that are blocks of pixels: ``Scatter`` of ``conv_scatter.cuh``. Pairs are (height, width).
    ``at``: elements from an image, a row and a column to the next."""

    strides: tuple[int, int]
    crops: tuple[int, int]
    channels: int
    size: tuple[int, int]
    at: tuple[int, int, int]

    @classmethod
    def of(cls, out: TensorView, strides: tuple[int, int], crops: tuple[int, int], together: int) -> Scatter | None:
        """The destination in an NCHW image, if ``together`` neighboring channels are one access; else None."""
        (_, channels, *size), (n, c, h, w) = out.shape, out.strides
        if c != 1 or any(s % together for s in (channels, out.offset, n, h, w)):
            return None
        return cls(strides, crops, channels, (size[0], size[1]), (n, h, w))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The fields of the kernels' struct."""
        return (*self.strides, *self.crops, self.channels, *self.size, *self.at)


DYNAMIC = ("data_scale", "data_zero")
"""Operands of a problem whose pixels another launch quantizes: their scale and zero point."""
AHEAD = (928, 944)
"""Byte offsets of fields that may name weights of later launches: an address of eight bytes, then the number of bytes
to load into L2."""


def parameters(
    problem: Problem,
    maps: Sequence[TensorMap[str]],
    tiles: tuple[int, int],
    optional: Collection[str],
    *,
    gate: tuple[int, int] | None = None,
    scatter: Scatter | None = None,
    requantize: Requantize | None = None,
    frames: Sequence[int] = (),
) -> Parameters:
    """The kernels' parameter block: ``Params`` of ``conv_common.cuh``.

    ``maps``: weights, pixels, pixels, output, residual; ``tiles``: over the channels, and in all. ``optional`` lists
    the optional operands that exist, out of ``residual``, ``before`` (pairs of scale and shift per input channel),
    ``gate``, ``partial`` and ``arrived`` (:func:`optdnn.kernels.conv.implicit_gemm.workspace`), ``moments``, ``given``
    and ``columns`` (``conv_moments.cuh``), and ``angles`` (``conv_turns.cuh``). ``gate``: the pitch and the channels of
    the gate. ``frames``: if an image is several frames, the channels of a frame, and elements from a frame, a row and a
    column to the next.
    """

    def present(*names: str) -> list[str | None]:
        return [name if name in optional else None for name in names]

    channel_tiles, count = tiles
    made = Parameters().tensor_map(*maps).pointer("channel", "output", *present("residual"))
    made.i32(
        problem.channels, problem.pixels, *problem.out_size, channel_tiles, count, problem.k_steps, 0
    )  # 0: not in reverse
    for k in range(2):
        source = problem.sources[k] if k < len(problem.sources) else None
        made.i32(*(_source(problem, source) if source is not None else [0] * 9))
    made.i32(*(scatter.numbers if scatter is not None else [0] * 10))
    if requantize is None:
        made.i32(*[0] * (5 + MAX_CONSTANTS))
    else:
        put_requantize(made, problem.epilogue, requantize)
    inside = problem.sources[0].channels
    pitch, gate_channels = gate or (inside, inside)
    made.pointer(*present("before", "gate")).i32(
        pitch, problem.image_rows or math.prod(problem.out_size), problem.batch, gate_channels
    )
    made.pointer(*present("partial", "arrived"))
    for _ in AHEAD:
        made.pointer(None).u32(0, 0)  # the number of bytes, and padding of the struct
    made.i32(count // problem.count, (problem.stack or (1, 1))[0], problem.band_channels, inside)
    made.i32(*(pitch or problem.channels for pitch in problem.pitches))
    if problem.volume:
        made.i32(*(n for k in range(2) for n in _depth(problem, k)))
        made.i32(*(frames or [0] * 4))
    if problem.moments or problem.row_norm is not None:
        normed = inside if problem.residual_norm is None else problem.channels
        made.pointer(*present("moments", "given", "columns")).i32(normed // MOMENT_CHANNELS)
        made.f32(0.0 if problem.row_norm is None else problem.row_norm.epsilon)
    if problem.norm is not None and problem.norm.image:
        made.i32(problem.norm.image // MOMENT_ROWS)
    if problem.row_bias:
        made.pointer("row_bias")
    if problem.row_scale:
        made.pointer("row_scales")
    if problem.dynamic:
        made.pointer(*DYNAMIC)
    put_edges(made, problem)
    if problem.parts:
        made.pointer("factors", *(("input_scales",) if problem.equalized else ()))
    if problem.turn is not None:
        made.pointer(*present("angles")).i32(problem.turn.channels, problem.turn.positions)
    return made


TOGETHER_CHANNELS = 64
"""Channels of an image that holds several frames of the result."""


def together_weights(weight: Array, depth: Depth) -> Array:
    """OIDHW weights of a frame -> those of images of ``depth.together`` frames. Each frame has its part of the rows,
    with zeros at the taps of the other frames. Keeps the dtype."""
    if depth.together == 1:
        return weight
    out, channels, taps, *kernel = weight.shape
    made = np.zeros(
        (depth.together, TOGETHER_CHANNELS // depth.together, channels, depth.all_taps, *kernel), weight.dtype
    )
    for frame in range(depth.together):
        made[frame, :out, :, frame * depth.stride : frame * depth.stride + taps] = weight
    return made.reshape(TOGETHER_CHANNELS, *made.shape[2:])


def together_bias(bias: Array, together: int) -> Array:
    """The bias, repeated for each frame's part of the channels."""
    made = np.zeros((together, TOGETHER_CHANNELS // together), bias.dtype)
    made[:, : len(bias)] = bias
    return made.reshape(-1)


def _depth(problem: Problem, k: int) -> list[int]:
    """The fields of a source's depth; zeros if it has none."""
    source = problem.sources[k] if k < len(problem.sources) else None
    if source is None or source.depth is None:
        return [0] * 5
    d = source.depth
    return [problem.blocks(source) // d.all_taps, d.images, d.stride * d.together, d.first, d.dilation]


def _source(problem: Problem, source: Source) -> list[int]:
    """The fields of a source in the parameter block."""
    return [problem.blocks(source), *source.kernel, *source.dilation, *source.stride, *source.padding[:2]]
