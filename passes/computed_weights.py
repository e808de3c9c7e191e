"""Convolutions whose weights are computed become products of matrices.

Hypernetworks compute their filters, and so do trackers that look for one picture in another. (The filters of StyleGAN are constant
by now: ``modulated_weights`` runs before.) Fast kernels of convolutions need constant filters, which are packed in the build; the
general kernel uses one thread per result. As a product of the filters with the pixels under each tap, a convolution of computed
filters runs on tensor cores. A transposed convolution is a convolution with the filters flipped, over pixels with zeros between
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import depends_on_inputs, integers, operand, reshaped, sizes_of

TAPS = 64
"""Most taps of a filter: each is a copy of the pixels."""
WHOLE = 8
"""Columns of the product are padded to a multiple of this, as tensor cores need."""
LEAST = 1 << 20
"""Fewest multiplications for which the product pays for its launches."""


@rule("conv_of_computed_weights", {"Conv"})
def conv_of_computed_weights(graph: Graph, op: Op) -> Match | Miss | None:
    """A Conv of any rank, with or without a bias; its groups have several channels."""
    sizes = _sizes(graph, op)
    if sizes is None or op.attrs.auto_pad != "NOTSET":
        return None
    x, w = sizes
    a, kernel, results = op.attrs, w[2:], graph.type(op.value).static_shape
    positions = list(results[2:])
    whole = [*positions[:-1], positions[-1] + (-positions[-1] % WHOLE if math.prod(positions) % WHOLE else 0)]
    filters, channels = w[0] // a.group, w[1]
    if (refusal := _refusal(graph, op, x[0] * a.group, (filters, channels, *kernel))) is not False:
        return refusal

    def build(patch: Patch) -> Value:
        columns = _columns(patch, operand(op), (x[0] * a.group, channels, *x[2:]), op, whole, whole[-1] - positions[-1])
        taps = math.prod(kernel)
        rows = reshaped(patch, operand(op, 1), (a.group, filters, channels, taps))
        rows = patch.add("Transpose", [rows], TransposeAttrs((0, 1, 3, 2)))
        rows = reshaped(patch, rows, (1, a.group, filters, taps * channels))
        # Kernels of batched products cannot repeat an operand, so it is copied. Filters are small compared with the columns.
        if x[0] > 1:
            rows = patch.add("Expand", [rows, integers(patch, [x[0], 1, 1, 1], "pictures")])
        columns = reshaped(patch, columns, (x[0], a.group, taps * channels, math.prod(whole)))
        y = patch.add("MatMul", [rows, columns], MatMulAttrs())
        y = reshaped(patch, y, (x[0], w[0], *whole))
        if whole != positions:
            y = _sliced(patch, y, [0], positions[-1:], [len(whole) + 1], [1])
        bias = op.input(2)
        if bias is None:
            return y
        return patch.add("Add", [y, reshaped(patch, bias, (1, w[0], *(1 for _ in positions)))])

    return Match((op,), build)


@rule("transposed_conv_of_computed_weights", {"ConvTranspose"})
def transposed_conv_of_computed_weights(graph: Graph, op: Op) -> Match | Miss | None:
    """A ConvTranspose becomes a Conv, which ``conv_of_computed_weights`` then rewrites."""
    sizes = _sizes(graph, op)
    if sizes is None or op.attrs.output_shape or op.attrs.auto_pad != "NOTSET":
        return None
    x, w = sizes
    a, kernel, rank = op.attrs, w[2:], len(w) - 2
    results = graph.type(op.value).static_shape
    channels, filters = w[0] // a.group, w[1]
    if (refusal := _refusal(graph, op, x[0] * a.group, (filters, channels, *kernel))) is not False:
        return refusal

    def build(patch: Patch) -> Value:
        spread = _spread(patch, operand(op), x, a.strides)
        before = [a.dilations[i] * (kernel[i] - 1) - a.pads[i] for i in range(rank)]
        after = [
            results[2 + i] + a.dilations[i] * (kernel[i] - 1) - before[i] - x[2 + i] * a.strides[i] for i in range(rank)
        ]
        spread = _padded(patch, spread, [0, 0, *(max(n, 0) for n in before)], [0, 0, *(max(n, 0) for n in after)])
        if min(*before, *after) < 0:
            ends = [min(n, 0) or np.iinfo(np.int64).max for n in after]
            spread = _sliced(patch, spread, [max(-n, 0) for n in before], ends, range(2, rank + 2), [1] * rank)
        turned = reshaped(patch, operand(op, 1), (a.group, channels, filters, *kernel))
        turned = patch.add("Transpose", [turned], TransposeAttrs((0, 2, 1, *range(3, rank + 3))))
        turned = reshaped(patch, turned, (a.group * filters, channels, *kernel))
        low = np.iinfo(np.int64).min + 1
        turned = _sliced(patch, turned, [-1] * rank, [low] * rank, range(2, rank + 2), [-1] * rank)
        attrs = ConvAttrs(strides=(1,) * rank, pads=(0,) * (2 * rank), dilations=a.dilations, group=a.group)
        return patch.add("Conv", [spread, turned, *([] if op.input(2) is None else [operand(op, 2)])], attrs)

    return Match((op,), build)


def _sizes(graph: Graph, op: Op) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of the image and of the computed weights; None if a size is unknown or 0, or for other convolutions."""
    if op.attrs.prologue or op.attrs.epilogue or not depends_on_inputs(graph, operand(op, 1)):
        return None
    x, w, y = (sizes_of(graph, value) for value in (operand(op), operand(op, 1), op.value))
    return None if x is None or w is None or y is None or 0 in (*x, *w, *y) else (x, w)


def _refusal(graph: Graph, op: Op, groups: int, w: Sequence[int]) -> Miss | Literal[False] | None:
    """Why a convolution cannot become a product; None if it is too small to gain, False if it can.

    ``groups``: the number of groups of all images together; ``w``: the shape of the filters of one group."""
    filters, channels, *kernel = w
    if math.prod(kernel) > TAPS:
        return Miss(f"its filters have {math.prod(kernel)} taps, more than {TAPS}")
    if filters == 1 or channels == 1:
        return Miss(
            "its filters are computed, but a group has a single filter or channel, so that it is no product of matrices"
        )
    positions = math.prod(graph.type(op.value).static_shape[2:])
    return None if groups * math.prod(w) * positions < LEAST else False


def _columns(patch: Patch, x: Value, shape: Sequence[int], op: Op, positions: Sequence[int], more: int) -> Value:
    """The pixels under each tap: (groups of all images, taps * channels, *places).

    ``positions``: the sizes of the result, with ``more`` padding positions at the end of the last axis."""
    a, rank = op.attrs, len(positions)
    x = reshaped(patch, x, tuple(shape))
    after = [*a.pads[rank:-1], a.pads[-1] + more * a.strides[-1]]
    x = _padded(patch, x, [0, 0, *a.pads[:rank]], [0, 0, *after])
    parts = []
    for tap in itertools.product(*map(range, patch.graph.type(operand(op, 1)).static_shape[2:])):
        starts = [t * d for t, d in zip(tap, a.dilations, strict=True)]
        ends = [s + (n - 1) * by + 1 for s, n, by in zip(starts, positions, a.strides, strict=True)]
        parts.append(_sliced(patch, x, starts, ends, range(2, rank + 2), a.strides))
    return parts[0] if len(parts) == 1 else patch.add("Concat", parts, ConcatAttrs(axis=1))


def _spread(patch: Patch, x: Value, shape: Sequence[int], strides: Sequence[int]) -> Value:
    """The pixels with zeros after each of them: each axis becomes ``strides`` times as long."""
    if all(n == 1 for n in strides):
        return x
    apart = [n for size in shape[2:] for n in (size, 1)]
    zeros = [n for by in strides for n in (0, by - 1)]
    x = reshaped(patch, x, (*shape[:2], *apart))
    x = _padded(patch, x, [0] * (2 + len(zeros)), [0, 0, *zeros])
    return reshaped(patch, x, (*shape[:2], *(size * by for size, by in zip(shape[2:], strides, strict=True))))


def _padded(patch: Patch, x: Value, before: Sequence[int], after: Sequence[int]) -> Value:
    if not any((*before, *after)):
        return x
    return patch.add("Pad", [x, integers(patch, [*before, *after], "pads")], PadAttrs())


def _sliced(
    patch: Patch, x: Value, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Value:
    lists = (integers(patch, list(n), "taps") for n in (starts, ends, axes, steps))
    return patch.add("Slice", [x, *lists])


class ComputedWeights(RulePass):
    name = "computed_weights"
    rules = (transposed_conv_of_computed_weights, conv_of_computed_weights)
