"""Channels-last images are flattened in place if their only reader is a product with a constant matrix.

A classifier's Flatten (VGG, AlexNet, LeNet) orders its elements channel by channel. After convolutions in channels-last order
this costs one more launch, which reorders the image. Instead, the build reorders the rows of the matrix once.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, channels_to_last, operand, reshape_target, reshaped, shape_of

DENSE = 8
"""The GPU's kernels pad channels to a multiple of this: multiples of it have no gaps in memory."""


@rule("flatten_last", {"Layout"})
def flatten_last(graph: Graph, op: Op) -> Match | Miss | None:
    """Layout (to plain order), Flatten (or a Reshape like it), and a Gemm or MatMul with a constant matrix."""
    x, flat = operand(op), graph.sole_user(op.value)
    if op.attrs.layout or not graph.type(x).layout or flat is None or flat.kind not in RESHAPES:
        return None
    before, after = shape_of(graph, x), flat.outputs[0].type.shape
    product = graph.sole_user(flat.value)
    if before is None or after is None or product is None or product.kind not in ("Gemm", "MatMul"):
        return None
    inner = [d for d in before[1:] if isinstance(d, int)]
    if len(after) != 2 or after[0] != before[0] or after[1] != math.prod(inner) or len(inner) != len(before) - 1:
        return None
    if math.prod(inner[1:]) == 1:  # one position: both orders are the same
        return None
    if product.inputs[0] != flat.value or product.attrs.prologue or getattr(product.attrs, "transA", 0):
        return None
    weight = graph.constant_value(product.inputs[1])
    if weight is None or weight.ndim != 2:
        return Miss("its other factor is not a constant matrix")
    if inner[0] % DENSE:
        return Miss(f"its {inner[0]} channels are padded in memory")
    target = reshape_target((before[0], *before[2:], before[1]), after)
    if target is None:
        return Miss("no constant target can express its shape")

    def build(patch: Patch) -> Value:
        rows = reshaped(patch, patch.add("Transpose", [x], TransposeAttrs(channels_to_last(len(before)))), target)
        if getattr(product.attrs, "transB", 0):
            turned = np.moveaxis(weight.reshape(-1, *inner), 1, -1).reshape(len(weight), -1)
        else:
            turned = np.moveaxis(weight.reshape(*inner, -1), 0, -2).reshape(len(weight), -1)
        operands = [rows, patch.constant(turned, "flattened.weight"), *product.inputs[2:]]
        return patch.add(product.kind, operands, product.attrs)

    return Match((op, flat, product), build, product.value)


class FlattenChannelsLast(RulePass):
    """Runs after layouts, which decide where an image is reordered. Its rewrites depend on physical order, as layouts do."""

    name = "flatten_last"
    rules = (flatten_last,)
