"""The data of a Hopper convolution's launch: packed weights, and the parameter block as ``kernels/conv_common.cuh`` declares it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.launch import Parameters
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.launches.plan import TensorMap
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


def put_requantize(parameters: Parameters, stages: Sequence[render.Stage], requantize: Requantize | None) -> None:
    """The numbers at the end of a parameter block, with the constants of the stages."""
    r = requantize or Requantize()
    constants = render.constants_of(stages) if requantize is not None else []
    if len(constants) > MAX_CONSTANTS:
        raise InternalError(f"a quantized epilogue has at most {MAX_CONSTANTS} constants, not {len(constants)}")
    parameters.f32(r.residual_scale, r.residual_offset, r.low, r.high).i32(r.zero)
    parameters.f32(*constants, *[0.0] * (MAX_CONSTANTS - len(constants)))


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


AHEAD = (912, 928)
"""Where weights of later launches may be named: an address of eight bytes, then how many bytes there are to bring into L2."""


def parameters(
    problem: Problem,
    maps: Sequence[TensorMap[str]],
    tiles: tuple[int, int],
    optional: Collection[str],
    *,
    gate: tuple[int, int] | None = None,
    scatter: Scatter | None = None,
    requantize: Requantize | None = None,
) -> Parameters:
    """The kernels' parameter block: ``Params`` of ``kernels/conv_common.cuh``.

    ``maps``: weights, pixels, pixels, output, residual; ``tiles``: over the channels, and in all. ``optional`` names those of the
    operands ``residual``, ``before`` (pairs of scale and shift per input channel), ``gate``, ``partial`` and ``arrived``
    (:func:`optdnn.kernels.conv.implicit_gemm.workspace`) that there are. ``gate``: the pitch and the channels of the gate.
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
    made.pointer(*present("before", "gate")).i32(pitch, math.prod(problem.out_size), problem.batch, gate_channels)
    made.pointer(*present("partial", "arrived"))
    for _ in AHEAD:
        made.pointer(None).u32(0, 0)  # the size, and what fills the struct up
    made.i32(count // problem.count, (problem.stack or (1, 1))[0], problem.band_channels, inside)
    return made.i32(*(pitch or problem.channels for pitch in problem.pitches))


def _source(problem: Problem, source: Source) -> list[int]:
    """The fields of a source."""
    blocks = -(-source.channels // problem.block)
    return [blocks, *source.kernel, *source.dilation, *source.stride, *source.padding[:2]]
