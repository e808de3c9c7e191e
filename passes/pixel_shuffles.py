"""A convolution before a pixel shuffle orders its channels by pixel, so that the shuffle moves whole blocks of channels.

Super-resolution networks compute the pixels of a larger image as channels of a smaller one (Shi et al., 2016). PyTorch takes
channel ``c`` of pixel ``(i, j)`` of a block from channel ``(c * k + i) * k + j``: neighbors in memory become distant pixels.
This pass reorders the filters of the convolution by pixel first. Then the shuffle moves 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.widths import has_stages_or_factors
from optdnn.passes.support.facts import operand


@rule("pixel_shuffle", {"DepthToSpace"})
def pixel_shuffle(graph: Graph, op: Op) -> Match | Miss | None:
    """A shuffle in PyTorch's order (mode CRD) after a convolution, with pointwise operators of one operand between them."""
    if op.attrs.mode != "CRD":
        return None
    between: list[Op] = []
    conv = graph.op(operand(op))
    while conv.pointwise and len(conv.inputs) == 1:
        between.append(conv)
        conv = graph.op(operand(conv))
    weight = graph.constant_value(conv.input(1)) if conv.kind == "Conv" else None
    if weight is None:
        return None
    if conv.attrs.group > 1:
        return Miss("the convolution before it has groups")
    if conv.input(2) is not None and graph.constant_value(conv.input(2)) is None:
        return Miss("the bias of the convolution before it is not constant")
    if has_stages_or_factors(conv):
        return Miss("the convolution before it has stages")
    if any(graph.sole_user(o.value) is None for o in (conv, *between)):
        return Miss("its channels are also read in their own order")
    return Match((op, *between, conv), lambda patch: _rewrite(patch, op, between, conv))


def _rewrite(patch: Patch, op: Op, between: Sequence[Op], conv: Op) -> None:
    k = op.attrs.blocksize
    inputs = [*conv.inputs]
    for slot in (1, 2):
        known = patch.graph.constant_value(conv.input(slot))
        if known is not None:
            blocks = known.reshape(-1, k * k, *known.shape[1:])
            inputs[slot] = patch.constant(np.ascontiguousarray(blocks.swapaxes(0, 1)).reshape(known.shape), "by_pixels")
    value = patch.add("Conv", inputs, conv.attrs, src=conv.src)
    for o in reversed(between):
        value = patch.add(o.kind, [value], o.attrs, src=o.src)
    patch.replace(op.value, patch.add("DepthToSpace", [value], replace(op.attrs, mode="DCR"), src=op.src))


class PixelShuffles(RulePass):
    name = "pixel_shuffles"
    rules = (pixel_shuffle,)
