"""Positions that are added before products are multiplied when the network is built, and the products become one.

DETR (Carion et al., 2020) adds an embedding of each position to the operands of queries and keys, but not to that of values:
``(x + p) W`` is ``x W + p W``. So queries, keys and values are one product of x, whose epilogue adds a constant.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.fuse_siblings import ALIGNED, LAUNCH_BYTES
from optdnn.passes.support.facts import operand, sizes_of, split_along
from optdnn.passes.support.products import PlainProduct, added_vector, multiplied, plain_product
from optdnn.types import is_float

ACCESSES = 3
"""Accesses to memory per element that an addition of a constant takes: two reads and a write."""


@rule("added_positions", {"Add"})
def added_positions(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
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
    if context.row_invariant or added.size != math.prod(shape):
        return Miss("the constant is repeated along the batch, and no epilogue of a product reads such a constant")
    if len(products) > 1 and any(width % ALIGNED for width in widths):
        return Miss(f"the results of its products, {widths} columns wide, could not be read where they are")
    rows, itemsize = math.prod(shape[:-1]), 2
    if rows * (sum(widths) - ACCESSES * shape[-1]) * itemsize > LAUNCH_BYTES * len(products):
        return Miss("the constant that its products would add is larger than what the addition moves")

    def build(patch: Patch) -> None:
        matrix = np.concatenate([p.weight for p in products], 1)
        wide = added.reshape(shape).astype(np.float64)
        terms = []
        for k, p in enumerate(products):
            term = wide @ p.weight if k < len(summed) else np.zeros((*shape[:-1], widths[k]))
            terms.append(term if p.bias is None else term + p.bias)
        constant = np.concatenate(terms, -1).astype(op.outputs[0].type.dtype)
        y = multiplied(patch, x, matrix, constant)
        if len(products) == 1:
            patch.replace(products[0].ops[0].value, y)
            return
        patch.replace_each((p.ops[0].value for p in products), split_along(patch, y, len(shape) - 1, widths))

    covers = {o.id: o for p in products for o in reversed(p.ops)}
    return Match((op, *covers.values()), build)


def _product(graph: Graph, op: Op, x: Value) -> PlainProduct | None:
    """The product of ``x`` with a constant matrix that ``op`` is, with the bias after it; None for other operators."""
    if op.kind != "MatMul" or op.inputs[0] != x or op.attrs.factors:
        return None
    user = graph.sole_user(op.value)
    added = None if user is None or user.kind != "Add" else added_vector(graph, user)
    biased = added is not None and added[0] == op.value and added[1].size == graph.type(operand(op, 1)).dims[-1]
    return plain_product(graph, user.value if biased and user is not None else op.value)


class AddedPositions(RulePass):
    name = "added_positions"
    rules = (added_positions,)
