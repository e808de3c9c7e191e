"""Separable attention: the parts of its projection are aligned for vector loads. Sums of weighted pixels are products of rows.

MobileViTV2 (Mehta and Rastegari, 2022) computes one channel of scores, then keys and values, by one convolution. In that order keys
and values begin at the second element, and no kernel can load them in vectors.
"""

from __future__ import annotations

import itertools

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import (
    RESHAPES,
    channels_to_last,
    exchange_last,
    integers,
    operand,
    producer,
    reshape_target,
    reshaped,
)
from optdnn.passes.support.image_views import is_image
from optdnn.types import normalize_axis

UNIT = 8
"""16-bit channels in one vector load."""


@rule("aligned_parts", {"Split"})
def aligned_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """A Split of the channels of a convolution with constant weights: its filters are reordered so that more parts are aligned."""
    sizes = [out.type.dims[1] if len(out.type.dims) > 2 else None for out in op.outputs]
    conv = producer(graph, op.inputs[0], {"Conv"})
    if conv is None or normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)) != 1:
        return None
    widths = [n for n in sizes if isinstance(n, int)]
    order = sorted(range(len(widths)), key=lambda i: widths[i] % UNIT != 0)
    if len(widths) < len(sizes) or _aligned(widths) >= _aligned([widths[i] for i in order]):
        return None
    weight, bias = graph.constant_value(conv.inputs[1]), graph.constant_value(conv.input(2))
    if weight is None or (bias is None and conv.input(2) is not None):
        return Miss(f"the filters or the bias of {conv.name} are not constant")
    if graph.sole_user(conv.value) is None or conv.attrs.epilogue or conv.attrs.group != 1:
        return Miss(f"{conv.name} has other readers, stages or groups")
    starts = list(itertools.accumulate(widths, initial=0))
    channels = np.concatenate([np.arange(starts[i], starts[i] + widths[i]) for i in order])

    def build(patch: Patch) -> None:
        given = [conv.inputs[0], patch.constant(weight[channels], "filters")]
        given += [] if bias is None else [patch.constant(bias[channels], "bias")]
        y = patch.add("Conv", given, conv.attrs, src=conv.src)
        lengths = integers(patch, [widths[i] for i in order], "sizes")
        parts = patch.add_op("Split", [y, lengths], SplitAttrs(1), outputs=len(widths), src=op.src)
        for place, port in enumerate(order):
            patch.replace(Value(op.id, port), Value(parts.id, place))

    return Match((op, conv), build)


def _aligned(widths: list[int]) -> int:
    """The number of parts after the first one that begin at a multiple of ``UNIT`` channels."""
    return sum(start % UNIT == 0 for start in itertools.accumulate(widths[:-1], initial=0))


@rule("summed_pixels", {"MatMul"})
def summed_pixels(graph: Graph, op: Op) -> Match | Miss | None:
    """``(B, 1, C, P) (B, 1, P, 1)`` of a flattened image becomes ``(B, 1, 1, P) (B, 1, P, C)``, with pixels as rows.

    GCNet (Cao et al., 2019) computes its context in this way."""
    flat = producer(graph, op.inputs[0], RESHAPES)
    dims, weights = graph.type(operand(op)).dims, operand(op, 1)
    image = () if flat is None else graph.type(operand(flat)).dims
    if flat is None or len(image) != 4 or len(dims) not in (3, 4) or op.attrs.prologue or op.attrs.epilogue:
        return None
    lead, (channels, positions) = dims[:-2], dims[-2:]
    if lead != (image[0], 1)[: len(lead)] or channels != image[1] or graph.type(weights).dims != (*lead, positions, 1):
        return None
    target = reshape_target((image[0], *image[2:], channels), (*lead, positions, channels))
    if target is None or not is_image(graph, operand(flat)):
        return Miss("its operand is not computed by an operator on images, or no constant target can express its shape")
    exchange = TransposeAttrs(exchange_last(len(dims)))

    def build(patch: Patch) -> Value:
        rows = reshaped(patch, patch.add("Transpose", [operand(flat)], TransposeAttrs(channels_to_last(4))), target)
        y = patch.add("MatMul", [patch.add("Transpose", [weights], exchange), rows], op.attrs)
        return patch.add("Transpose", [y], exchange)

    return Match((op,), build)


class SeparableAttention(RulePass):
    name = "separable_attention"
    rules = (aligned_parts, summed_pixels)
