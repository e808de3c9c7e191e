"""Convolutions of the frames of a signal become convolutions of its blocks.

Exporters without an operator for short-time Fourier transforms (voice activity, speech synthesis), and learned filter banks,
convolve a signal of one channel with long filters and a large stride. Tensor cores multiply channels in groups of eight, so with
one channel most of the work is wasted. If a block of samples becomes the channels of one position, the sums are the same and all
channels are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import PadAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import in_shape, integers, operand, reshape_target, sliced
from optdnn.types import Array

LEAST_BLOCK = 32
"""Least stride, in samples: for smaller strides, the kernel for images of few channels is as fast."""


@dataclass(frozen=True)
class Frames:
    """``count`` frames of ``length`` samples at distances of ``step``, in a signal of ``samples`` with ``pads`` zeros around it."""

    samples: int
    count: int
    length: int
    step: int
    pads: tuple[int, int]

    @property
    def block(self) -> int:
        """The number of samples of a block: a divisor of length and step, if a large one exists; else the step, and the last block
        of a frame is padded."""
        common = math.gcd(self.length, self.step)
        return common if common >= LEAST_BLOCK else self.step

    @property
    def blocks(self) -> int:
        """The number of blocks of a frame."""
        return -(-self.length // self.block)

    @property
    def used(self) -> int:
        """The number of samples from the first block of the first frame to the last block of the last frame."""
        return (self.count - 1) * self.step + self.blocks * self.block


@rule("frames_are_blocks", {"Conv"})
def frames_are_blocks(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution of one channel with a large stride becomes a convolution of blocks of samples."""
    dims, attrs = graph.type(operand(op)).dims, op.attrs
    along = [i for i, s in enumerate(attrs.strides) if s >= LEAST_BLOCK]
    if len(along) != 1 or dims[1] != 1 or attrs.auto_pad != "NOTSET":
        return None
    weight = graph.constant_value(op.inputs[1])
    if weight is None or attrs.prologue or attrs.epilogue:
        return Miss("its filters are not constant, or it has stages")
    frames = _frames(graph, op, weight, along[0])
    if isinstance(frames, Miss):
        return frames
    x, block, results = op.outputs[0].type.dims, frames.block, len(weight)
    signal, rows = (dims[0], frames.used), (dims[0], frames.used // block, block)
    if any(reshape_target(a, b) is None for a, b in ((dims, (dims[0], 1, frames.samples)), (signal, rows))):
        return Miss("it has no elements")
    missing = frames.blocks * block - frames.length
    filters = np.pad(weight.reshape(results, frames.length), ((0, 0), (0, missing)))
    filters = np.ascontiguousarray(filters.reshape(results, frames.blocks, block).transpose(0, 2, 1))
    geometry = replace(attrs, strides=(frames.step // block,), pads=(0, 0), dilations=(1,))

    def build(patch: Patch) -> Value:
        samples = _taken(patch, in_shape(patch, operand(op), (dims[0], frames.samples)), frames)
        image = patch.add("Transpose", [in_shape(patch, samples, rows)], TransposeAttrs((0, 2, 1)))
        bias = [v for v in op.inputs[2:] if v is not None]
        y = patch.add("Conv", [image, patch.constant(filters, "filters"), *bias], geometry)
        return in_shape(patch, y, x)

    return Match((op,), build)


def _frames(graph: Graph, op: Op, weight: Array, axis: int) -> Frames | Miss:
    """The frames along a spatial axis; a Miss if another spatial axis has more than one element."""
    dims, attrs, rank = graph.type(operand(op)).dims[2:], op.attrs, weight.ndim - 2
    samples, count = dims[axis], op.outputs[0].type.dims[2 + axis]
    if not isinstance(samples, int) or not isinstance(count, int):
        return Miss("its number of samples is not known")
    others = [i for i in range(rank) if i != axis]
    if any(dims[i] != 1 or weight.shape[2 + i] != 1 or attrs.pads[i] or attrs.pads[i + rank] for i in others):
        return Miss("its operand is an image, not a signal")
    if attrs.dilations[axis] != 1:
        return Miss("its filters are dilated, so it leaves out samples of a frame")
    pads = (attrs.pads[axis], attrs.pads[axis + rank])
    return Frames(samples, count, weight.shape[2 + axis], attrs.strides[axis], pads)


def _taken(patch: Patch, x: Value, frames: Frames) -> Value:
    """The samples of all blocks: zeros are added around the signal, and samples after the last block are removed."""
    before = frames.pads[0]
    after = frames.used - before - frames.samples
    if before or after > 0:
        x = patch.add("Pad", [x, integers(patch, [0, before, 0, max(after, 0)], "pads")], PadAttrs())
    return x if after >= 0 else sliced(patch, x, 0, frames.used, 1)
