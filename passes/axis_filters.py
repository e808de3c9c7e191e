"""Filters as long as an axis become products with a banded matrix.

SuDoRM-RF (Tzinis et al., 2020) estimates masks by a convolution of one image, whose filters of 513 taps slide along an axis of 512
features. Kernels for convolutions on tensor cores multiply at least eight channels at once, but this image has one. TMA takes no
padding of 256. Position ``o`` of the result is the sum of ``w[t]`` times position ``o * stride - pad + t * dilation``. So the
convolution is a product with a matrix that has a row for each filter and position of the result, and a column for each channel and
position of the input.

An infinity or NaN of the input reaches all positions of the result, also those whose filter does not reach it: 0 times it is NaN.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.widths import has_stages_or_factors
from optdnn.passes.support.facts import operand, reshaped, sizes_of
from optdnn.types import Array

LEAST_TAPS = 32
"""Fewest taps of a filter. Kernels run shorter ones well."""
CHANNELS_AT_ONCE = 8
"""Channels that kernels of convolutions load and multiply together, at least."""
MOST_ELEMENTS = 1 << 22
"""Most elements of the matrix: 8 MiB at 16 bits."""


@rule("axis_filter", {"Conv"})
def axis_filter(graph: Graph, op: Op) -> Match | Miss | None:
    """A Conv of few channels with long filters along its first spatial axis, and of one element along the others."""
    a, weight = op.attrs, graph.constant_value(op.input(1))
    shape, result = sizes_of(graph, operand(op)), sizes_of(graph, op.value)
    if weight is None or shape is None or result is None or a.group != 1 or weight.shape[2] < LEAST_TAPS:
        return None
    channels, filters, rank = shape[1], weight.shape[0], len(shape) - 2
    alone = {*weight.shape[3:], *a.strides[1:]} <= {1} and not any(a.pads[i] for i in range(2 * rank) if i % rank)
    if not alone or a.auto_pad != "NOTSET" or has_stages_or_factors(op) or 0 in (*shape, *result):
        return None
    inside, outside = channels * shape[2], filters * result[2]
    if inside > weight.shape[2] * CHANNELS_AT_ONCE * math.ceil(channels / CHANNELS_AT_ONCE):
        return Miss("its axis is much longer than its filters: most of the matrix would be zeros")
    if outside * inside > MOST_ELEMENTS:
        return Miss(f"its matrix would have more than {MOST_ELEMENTS} elements")
    bias = op.input(2)
    known = None if bias is None else graph.constant_value(bias)
    if bias is not None and known is None:
        return Miss("its bias is computed")

    def build(patch: Patch) -> Value:
        matrix, others = _banded(op, weight.reshape(weight.shape[:3]), shape[2], result[2]), math.prod(shape[3:])
        added = None if known is None else np.repeat(known, result[2])
        if others == 1:  # positions of an item are a row
            x = reshaped(patch, operand(op), (shape[0], inside))
            y = patch.add("MatMul", [x, patch.constant(np.ascontiguousarray(matrix.T), "bands")], MatMulAttrs())
        else:
            x = reshaped(patch, operand(op), (shape[0], inside, others))
            y = patch.add("MatMul", [patch.constant(matrix, "bands"), x], MatMulAttrs())
            added = None if added is None else added[:, None]
        if added is not None:
            y = patch.add("Add", [y, patch.constant(added, "bias")])
        return reshaped(patch, y, result)

    return Match((op,), build)


def _banded(op: Op, weight: Array, size: int, result: int) -> Array:
    """The matrix [filters x result, channels x size] of a Conv with filters [filters, channels, taps] along an axis of ``size``
    positions, whose result has ``result`` positions."""
    filters, channels, taps = weight.shape
    matrix = np.zeros((filters, result, channels, size), weight.dtype)
    at = np.arange(result)
    for tap in range(taps):
        read = at * op.attrs.strides[0] - op.attrs.pads[0] + tap * op.attrs.dilations[0]
        inside = (read >= 0) & (read < size)
        matrix[:, at[inside], :, read[inside]] = weight[:, :, tap]
    return matrix.reshape(filters * result, channels * size)


class AxisFilters(RulePass):
    name = "axis_filters"
    rules = (axis_filter,)
