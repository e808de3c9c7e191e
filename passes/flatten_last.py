"""Channels-last images are flattened as they lie, where all that reads them is a product with a constant matrix.

A classifier's Flatten (VGG, AlexNet, LeNet) counts its elements channel by channel; behind convolutions in channels-last order that
was one more launch, which turned the image around. The matrix's rows are turned around instead, once, when the engine is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.rules.shape import RESHAPES, reshaped
from optdnn.passes.support.facts import channels_to_last, reshape_target
from optdnn.types import Array

DENSE = 8
"""Channels lie without gaps where there is a multiple of this many: the GPU's kernels pad them to it."""


@dataclass(frozen=True)
class Flattened:
    """``x`` (N, C, …positions) in channels-last order, that ``product`` reads as rows of C * positions."""

    x: Value
    image: tuple[int, ...]
    """Its channels and positions."""
    target: tuple[int, ...]
    """What a Reshape of (N, …positions, C) takes."""
    product: Op
    weight: Array


class FlattenLast(Rule):
    """Layout (to plain order), Flatten (or a Reshape like it), and a Gemm or MatMul with a constant matrix."""

    name = "flatten_last"
    kinds = frozenset({"Layout"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        x, flat = op.inputs[0], graph.sole_user(op.value)
        if op.attrs.layout or x is None or not graph.type(x).layout or flat is None or flat.kind not in RESHAPES:
            return None
        before, after = graph.type(x).shape, flat.outputs[0].type.shape
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
            return Miss("what it is multiplied with is not a constant matrix")
        if inner[0] % DENSE:
            return Miss(f"its {inner[0]} channels are padded in memory")
        target = reshape_target((before[0], *before[2:], before[1]), after)
        if target is None:
            return Miss("no constant target can express its shape")
        return Match((op, flat, product), Flattened(x, tuple(inner), target, product, weight))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        found: Flattened = match.data
        patch = Patch(graph, match.ops)
        (channels, *positions), product = found.image, found.product
        x = patch.add("Transpose", [found.x], TransposeAttrs(channels_to_last(2 + len(positions))))
        columns = getattr(product.attrs, "transB", 0)
        matrix = found.weight.T if columns else found.weight
        size = matrix.shape[1]
        matrix = np.moveaxis(matrix.reshape(channels, *positions, size), 0, -2).reshape(-1, size)
        turned = np.ascontiguousarray(matrix.T if columns else matrix)
        operands = [reshaped(patch, x, found.target), patch.constant(turned, "flattened.weight"), *product.inputs[2:]]
        patch.replace(product.value, patch.add(product.kind, operands, product.attrs))
        return patch


class FlattenChannelsLast(RulePass):
    """After layouts, which say where an image is turned around. It writes facts of memory, as that pass does."""

    name = "flatten_last"
    rules = (FlattenLast(),)
