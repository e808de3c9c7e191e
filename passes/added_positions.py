"""Positions that are added before products are multiplied when the network is built, and the products become one.

DETR (Carion et al., 2020) adds an embedding of each position to the operands of queries and keys, but not to that of values:
``(x + p) W`` is ``x W + p W``. So queries, keys and values are one product of x, whose epilogue adds a constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.fuse_siblings import ALIGNED, LAUNCH_BYTES
from optdnn.passes.rules.widths import has_stages_or_factors
from optdnn.passes.support.facts import integers, operand, sizes_of
from optdnn.types import Array, is_float

ACCESSES = 3
"""Accesses to memory per element that an addition of a constant takes: two reads and a write."""


@dataclass(frozen=True)
class _Product:
    """A product with a constant matrix, and the addition of a bias after it (None: there is none)."""

    op: Op
    matrix: Array
    biased: Op | None
    bias: Array

    @property
    def last(self) -> Op:
        """The operator whose result has the bias."""
        return self.op if self.biased is None else self.biased


@rule("added_positions", {"Add"})
def added_positions(graph: Graph, op: Op) -> Match | Miss | None:
    """``(x + p) W`` is ``x W + p W``, if ``p`` is a constant with different rows and x has other readers."""
    arrays = [graph.constant_value(v) for v in op.inputs]
    known = [a for a in arrays if a is not None]
    shape = sizes_of(graph, op.value)
    if len(known) != 1 or shape is None or len(shape) < 2 or not is_float(op.outputs[0].type.dtype):
        return None
    x, added = operand(op, 1 - [a is not None for a in arrays].index(True)), known[0]
    if math.prod(added.shape[:-1]) == 1 or graph.sole_user(x) is not None or sizes_of(graph, x) != shape:
        return None  # a bias; or the operator before it may add the constant
    summed = [_product(graph, user, op.value) for user in graph.users(op.value)]
    if any(p is None for p in summed) or not summed:
        return Miss("the sum has readers that are no products with constant matrices")
    others = [_product(graph, user, x) for user in graph.users(x)]
    products = [p for p in (*summed, *others) if p is not None]
    widths = [p.matrix.shape[1] for p in products]
    if added.size != math.prod(shape):
        return Miss("the constant is repeated along the batch, and no epilogue of a product reads such a constant")
    if len(products) > 1 and any(width % ALIGNED for width in widths):
        return Miss(f"the results of its products, {widths} columns wide, could not be read where they are")
    rows, itemsize = math.prod(shape[:-1]), 2
    if rows * (sum(widths) - ACCESSES * shape[-1]) * itemsize > LAUNCH_BYTES * len(products):
        return Miss("the constant that its products would add is larger than what the addition moves")

    def build(patch: Patch) -> None:
        matrix = np.concatenate([p.matrix for p in products], 1)
        wide = added.reshape(shape).astype(np.float64)
        terms = [
            (wide @ p.matrix if k < len(summed) else np.zeros((*shape[:-1], widths[k]))) + p.bias
            for k, p in enumerate(products)
        ]
        constant = np.concatenate(terms, -1).astype(op.outputs[0].type.dtype)
        y = patch.add("MatMul", [x, patch.constant(matrix, "matrix")], MatMulAttrs())
        y = patch.add("Add", [y, patch.constant(constant, "added")])
        if len(products) == 1:
            patch.replace(products[0].last.value, y)
            return
        split = patch.add_op(
            "Split", [y, integers(patch, widths, "widths")], SplitAttrs(len(shape) - 1), outputs=len(widths)
        )
        for port, p in enumerate(products):
            patch.replace(p.last.value, Value(split.id, port))

    covers = {o.id: o for p in products for o in (p.op, p.last)}
    return Match((op, *covers.values()), build)


def _product(graph: Graph, op: Op, x: Value) -> _Product | None:
    """The product of ``x`` with a constant matrix that ``op`` is; None for other operators."""
    matrix = graph.constant_value(op.inputs[1]) if op.kind == "MatMul" and op.inputs[0] == x else None
    if matrix is None or matrix.ndim != 2 or has_stages_or_factors(op):
        return None
    user, none = graph.sole_user(op.value), np.zeros(matrix.shape[1], matrix.dtype)
    if user is None or user.kind != "Add" or graph.type(user.value) != op.outputs[0].type:
        return _Product(op, matrix, None, none)
    bias = next((a for v in user.inputs if (a := graph.constant_value(v)) is not None), None)
    if bias is None or bias.size != matrix.shape[1] or bias.shape[-1:] != (matrix.shape[1],):
        return _Product(op, matrix, None, none)
    return _Product(op, matrix, user, bias.reshape(-1))


class AddedPositions(RulePass):
    name = "added_positions"
    rules = (added_positions,)
