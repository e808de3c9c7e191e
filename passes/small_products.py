"""Products of one term, and of computed matrices with very few rows and columns, are multiplications, the latter with a sum.

Outer products of two vectors and projections of single numbers have one term: ``x @ y`` with one column in x and one row in y is
``x * y``, broadcast. As products they would take a launch of their own, and copies to pad their factors; as multiplications they
join the pointwise work around them.

Rotations and poses are such matrices: 2 x 2 in rotary embeddings (SAM 2's exports), 3 x 3 in networks of proteins, 4 x 4 in bodies
(SMPL: Loper et al., 2015) and cameras (BEVFormer: Li et al., 2022), one or more for each point. Tensor cores would multiply tiles
that are nearly empty, after copies that pad their rows. If the matrices are very many, products have a kernel without tiles, which
reads 16-bit operands as they are.
"""

from __future__ import annotations

import math

from optdnn.dim import bounds
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import integers, operand, shape_of
from optdnn.types import Shape, is_float

MOST = 4
"""Most terms of a sum, and most rows or columns of one of the matrices."""


MOST_ELEMENTS = 1 << 17
"""Most elements of the result. For more of them, the conversions of a sum in 16 bits take longer than its launch saves."""


@rule("outer_product", {"MatMul"})
def outer_product(graph: Graph, op: Op) -> Match | None:
    """Takes plain products of one term: epilogues are fused later."""
    shapes = [shape_of(graph, operand(op, slot)) for slot in (0, 1)]
    if op.attrs.epilogue or op.attrs.prologue or any(shape is None or len(shape) < 2 for shape in shapes):
        return None
    left, right = (shape or () for shape in shapes)
    if left[-1] != 1 or right[-2] != 1:
        return None
    return Match((op,), lambda patch: patch.add("Mul", [operand(op, 0), operand(op, 1)]))


@rule("small_product", {"MatMul"})
def small_product(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Takes plain products of several terms: of two computed operands, or of a constant matrix per item.

    Those with one matrix are layers."""
    shapes = [shape_of(graph, operand(op, slot)) for slot in (0, 1)]
    if op.attrs.epilogue or op.attrs.prologue or not is_float(op.outputs[0].type.dtype):
        return None
    left, right = (shape or () for shape in shapes)
    if len(left) < 2 or len(right) < 2 or max(len(left), len(right)) < 3:
        return None
    rows, terms, columns = left[-2], left[-1], right[-1]
    few = [n for n in (rows, columns) if isinstance(n, int) and 0 < n <= MOST]
    if not isinstance(terms, int) or not 1 < terms <= MOST or not few:
        return None
    if len(few) == 1 and few[0] == 1:
        return None  # a mixture of long rows: the launch after a product can add its terms
    if any(graph.constant_value(operand(op, slot)) is not None and _one(shapes[slot] or ()) for slot in (0, 1)):
        return None
    if context.counted(math.prod(bounds(d)[1] for d in op.outputs[0].type.dims)) > MOST_ELEMENTS:
        return Miss(f"its result may have more than {MOST_ELEMENTS} elements")

    def build(patch: Patch) -> Value:
        x, y = operand(op), operand(op, 1)
        if columns == 1:  # the row of a column needs no further axis
            y = patch.add("Transpose", [y], _swapped(len(right)))
            return _sum(patch, patch.add("Mul", [x, y]), -1, keep=True)
        x = patch.add("Unsqueeze", [x, integers(patch, [-1], "axis")])
        y = patch.add("Unsqueeze", [y, integers(patch, [-3], "axis")])
        return _sum(patch, patch.add("Mul", [x, y]), -2, keep=False)

    return Match((op,), build)


def _one(shape: Shape) -> bool:
    """Whether a tensor holds one matrix."""
    return all(n == 1 for n in shape[:-2])


def _swapped(rank: int) -> TransposeAttrs:
    return TransposeAttrs((*range(rank - 2), rank - 1, rank - 2))


def _sum(patch: Patch, x: Value, axis: int, *, keep: bool) -> Value:
    return patch.add("ReduceSum", [x, integers(patch, [axis], "axis")], ReduceAttrs(keepdims=keep))


class SmallProducts(RulePass):
    name = "small_products"
    rules = (small_product, outer_product)
