"""Separable attention: weighted sums over positions become products, and the parts of its projection are aligned for vector loads.

MobileViTV2 (Mehta and Rastegari, 2022) computes one channel of scores, then keys and values, by one convolution. In that order keys
and values begin at the second element, and no kernel can load them in vectors. The keys are multiplied by the softmax of the scores
over the positions, and summed. As a product of matrices, the multiplied keys are never stored.
"""

from __future__ import annotations

import itertools

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.channel_shuffles import PRECISIONS
from optdnn.passes.support.facts import (
    RESHAPES,
    channels_to_last,
    exchange_last,
    integers,
    ints,
    operand,
    producer,
    reshape_target,
    reshaped,
)
from optdnn.passes.support.image_views import is_image
from optdnn.target_name import HOPPER, TargetName
from optdnn.types import normalize_axis

UNIT = 8
"""16-bit channels in one vector load."""
LEAST = 16
"""Fewest positions and channels of a sum: with fewer, most of a product's tile would be empty."""


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


class WeightedSum(Rule):
    """``sum(x * w, -1)`` of channels (B, C, P, N) and weights (B, 1, P, N) is ``w' x'``: (B, P, 1, N) times (B, P, N, C)."""

    name = "weighted_sum"
    kinds = frozenset({"ReduceSum"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        product = producer(graph, op.inputs[0], {"Mul"}, alone=True)
        axes = ints(graph, op.input(1))
        if product is None or axes is None or not op.attrs.keepdims or len(product.outputs[0].type.dims) != 4:
            return None
        found = _operands(graph, product)
        if [normalize_axis(a, 4) for a in axes] != [3] or found is None:
            return None
        x, weights = found
        _, channels, _, positions = graph.type(x).dims
        if any(isinstance(n, int) and n < LEAST for n in (channels, positions)):
            return Miss(f"it has fewer than {LEAST} channels or positions")
        machine = TargetName.parse(context.target)
        if context.precision not in PRECISIONS or not machine.on_gpu or (machine.arch or HOPPER) != HOPPER:
            return Miss(f"products of two computed stacks are slower at {context.precision} on {context.target}")

        def build(patch: Patch) -> Value:
            left = patch.add("Transpose", [weights], TransposeAttrs((0, 2, 1, 3)))
            right = patch.add("Transpose", [x], TransposeAttrs((0, 2, 3, 1)))
            y = patch.add("MatMul", [left, right], MatMulAttrs())
            return patch.add("Transpose", [y], TransposeAttrs((0, 3, 1, 2)))

        return Match((op, product), build)


def _operands(graph: Graph, product: Op) -> tuple[Value, Value] | None:
    """The factors of ``product``: channels, and a weight per position that all channels share. None for other products."""
    dims = product.outputs[0].type.dims
    for slot in (0, 1):
        x, weights = operand(product, slot), operand(product, 1 - slot)
        one = graph.type(weights).dims
        if graph.type(x).dims == dims and len(one) == 4 and one == (dims[0], 1, *dims[2:]):
            return x, weights
    return None


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
    rules = (aligned_parts, WeightedSum(), summed_pixels)
