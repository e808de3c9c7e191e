"""Convolutions over sequences with long strides become convolutions over blocks of positions, with stride 1.

Encoders of audio shorten a sequence by ten or twelve in one convolution. TMA walks in steps of at most eight elements, so Hopper's
kernels refuse such a stride. A block is as long as the stride, and its positions become channels: in channels-last order this is a
view. Filters get zeros where a block holds positions that they do not cover.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import resolved
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import channels_from_last, channels_to_last, in_shape, operand
from optdnn.types import Array

WALKED = 8
"""The longest stride that kernels walk in."""
VECTOR = 8
"""Channels of a vector load. Other sequences (of one channel, say) have kernels of their own."""
MOST_ZEROS = 1.0
"""Zeros that filters may get, over their elements."""


@rule("long_stride", {"Conv"})
def long_stride(graph: Graph, op: Op) -> Match | Miss | None:
    """``(N, C, L)`` with stride s becomes ``(N, s C, L / s)`` with stride 1. Filters overlap: others are products of patches."""
    x, weight = operand(op), graph.constant_value(op.input(1))
    if weight is None or weight.ndim != 3 or op.attrs.group != 1 or op.attrs.prologue:
        return None
    a = resolved(op.attrs, graph.type(x), graph.type(op.inputs[1]))  # type: ignore[arg-type]
    (stride,), (begin, _), taps = a.strides, a.pads, weight.shape[2]
    n, channels, length = graph.type(x).dims
    count = op.outputs[0].type.dims[2]
    if stride <= WALKED or taps <= stride or a.dilations != (1,):
        return None
    if channels % VECTOR:
        return Miss(f"its {channels} channels are no multiple of {VECTOR}")
    if not isinstance(length, int) or not isinstance(count, int):
        return Miss("the length of its sequence is not known")
    if length % stride:
        return Miss(f"its sequence of {length} is not made of whole blocks of {stride}")
    before = -(-begin // stride)
    first = before * stride - begin
    blocks = -(-(first + taps) // stride)
    # Not negative: filters are longer than a block, so the last block is read.
    after = count - 1 + blocks - length // stride - before
    if blocks * stride - taps > MOST_ZEROS * taps:
        return Miss(f"its filters of {taps} would become {blocks * stride} long")

    def build(patch: Patch) -> Value:
        rows = patch.add("Transpose", [x], TransposeAttrs(channels_to_last(3)), src=graph.op(x).src or None)
        wide = in_shape(patch, rows, (n, length // stride, stride * channels))
        image = patch.add("Transpose", [wide], TransposeAttrs(channels_from_last(3)))
        filters = patch.constant(_in_blocks(weight, stride, first, blocks), "blocks.weight")
        geometry = replace(a, strides=(1,), pads=(before, after))
        return patch.add("Conv", [image, filters, *op.inputs[2:]], geometry)

    return Match((op,), build)


def _in_blocks(weight: Array, stride: int, first: int, blocks: int) -> Array:
    """Filters ``(O, C, taps)`` that begin at position ``first`` of the first block, as ``(O, stride * C, blocks)``."""
    filters, channels, taps = weight.shape
    wide = np.zeros((filters, channels, blocks * stride), weight.dtype)
    wide[:, :, first : first + taps] = weight
    in_order = wide.reshape(filters, channels, blocks, stride).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(in_order.reshape(filters, stride * channels, blocks))


class LongStrides(RulePass):
    name = "long_strides"
    rules = (long_stride,)
