"""Patch embeddings become products of patches with a matrix, in the order in which their readers take the patches.

A convolution whose stride is its kernel multiplies patches that do not overlap (ViT: Dosovitskiy et al., 2020; Swin). What follows
wants positions as rows and channels last; the convolution as such would be computed in one order and copied into the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.rules.shape import RESHAPES, reshaped
from optdnn.passes.support.facts import reshape_target
from optdnn.types import Array, Shape

LEAST = 32
"""Smallest number of elements of a patch for which the product pays (the rows of the matrix)."""


@dataclass(frozen=True)
class Embedding:
    """``result`` is (B, …positions, filters)."""

    x: Value
    split: Shape
    """x as (B, C, rows, kernel rows, columns, kernel columns)."""
    rows: Shape
    """(B, …positions, C * kernel rows * kernel columns)."""
    weight: Array
    bias: Array | None
    result: Value


class PatchRows(Rule):
    """Conv, then Transpose(0, 2, 3, 1), or Reshape to (B, C, positions) and Transpose(0, 2, 1)."""

    name = "patch_rows"
    kinds = frozenset({"Conv"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        weight, a = graph.constant_value(op.input(1)), op.attrs
        x = op.inputs[0]
        if x is None or weight is None or weight.ndim != 4 or a.group != 1:
            return None
        kh, kw = weight.shape[2:]
        plain = not any(a.pads) and not a.prologue and not a.epilogue and a.auto_pad == "NOTSET"
        if tuple(a.strides) != (kh, kw) or any(d != 1 for d in a.dilations) or kh * kw == 1 or not plain:
            return None
        ops = [op]
        last = graph.sole_user(op.value)
        result = op.outputs[0].type.shape
        perm: tuple[int, ...] = (0, 2, 3, 1)
        if last is not None and last.kind in RESHAPES:
            ops.append(last)
            shape = last.outputs[0].type.shape
            if shape is None or result is None or len(shape) != 3 or shape[:2] != result[:2]:
                return None
            last, perm = graph.sole_user(last.value), (0, 2, 1)
        if last is None or last.kind != "Transpose" or last.attrs.perm != perm:
            return None
        ops.append(last)
        before, after = graph.type(x).shape, last.outputs[0].type.shape
        if before is None or after is None:
            return None
        height, width = before[2:]
        if not isinstance(height, int) or not isinstance(width, int) or height % kh or width % kw:
            return Miss("its windows are not known to cover the image")
        if weight[0].size < LEAST:
            return Miss(f"a patch has {weight[0].size} elements, too few for a product")
        bias = None
        if op.input(2) is not None:
            bias = graph.constant_value(op.inputs[2])
            if bias is None:
                return Miss("its bias is not constant")
        split = (before[0], before[1], height // kh, kh, width // kw, kw)
        rows = (*after[:-1], weight[0].size)
        moved = (split[0], split[2], split[4], split[1], split[3], split[5])
        if reshape_target(before, split) is None or reshape_target(moved, rows) is None:
            return Miss("no constant target can express how the image is cut")
        return Match(tuple(ops), Embedding(x, split, rows, weight, bias, last.value))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        found: Embedding = match.data
        patch = Patch(graph, match.ops)
        before = graph.type(found.x).dims
        cut = reshape_target(before, found.split)
        assert cut is not None
        x = reshaped(patch, found.x, cut)
        x = patch.add("Transpose", [x], TransposeAttrs((0, 2, 4, 1, 3, 5)))
        joined = reshape_target(patch.type(x).dims, found.rows)
        assert joined is not None
        x = reshaped(patch, x, joined)
        matrix = np.ascontiguousarray(found.weight.reshape(len(found.weight), -1).T)
        y = patch.add("MatMul", [x, patch.constant(matrix, "patches.weight")], MatMulAttrs())
        if found.bias is not None:
            y = patch.add("Add", [y, patch.constant(found.bias, "patches.bias")])
        patch.replace(found.result, y)
        return patch


class PatchEmbedding(RulePass):
    """Each convolution once."""

    name = "patch_rows"
    rules = (PatchRows(),)
