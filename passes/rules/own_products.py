"""A product to which several constants are added becomes several products, each with one of the constants as its bias.

Attention with relative positions adds one bias to the queries for scores of content and another bias for scores of positions
(Transformer-XL: Dai et al., 2019; XLNet, Conformer). Each addition would be a launch. Sibling products are merged later, so the
second product only adds columns to the first one.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.facts import operand, shape_of, sizes_of, with_rank
from optdnn.passes.support.products import constant_matrix
from optdnn.types import Array

MOST_FLOPS = 1 << 30
"""Most operations of the additional products. So many take as long as a launch: about 1.5 microseconds."""


@rule("own_products", {"MatMul"})
def own_products(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``view(x W) + c`` and ``view(x W) + d`` with constants c and d each get their own product and views.

    The view is a Reshape, a Reshape and a Transpose of heads, or nothing. With a Transpose, the constant must be one vector of the
    product's columns, and is added before the views.
    """
    reshape, transpose = _views(graph, op)
    value = next((view.value for view in (transpose, reshape) if view is not None), op.value)
    adds = graph.users(value)
    if len(adds) < 2 or any(not _adds_constant(graph, user, value) for user in adds):
        return None
    rows, weight = shape_of(graph, op.value), graph.type(operand(op, 1)).shape
    if (
        constant_matrix(graph, op) is None
        or rows is None
        or weight is None
        or any(not isinstance(n, int) for n in rows)
    ):
        return None
    flops = 2 * math.prod(map(int, (*rows, weight[0]))) * (len(adds) - 1)  # type: ignore[arg-type]
    if context.counted(flops) > MOST_FLOPS:
        return Miss("further products would take longer than the additions")
    biases: dict[int, Array | None] = {}
    if transpose is not None:
        biases = {add.id: _column_bias(graph, add, reshape, transpose, int(rows[-1])) for add in adds}  # type: ignore[arg-type]
    if any(bias is None for bias in biases.values()):
        return Miss("an added constant differs between rows, which are transposed before the addition")

    def build(patch: Patch) -> None:
        for add in adds if transpose is not None else adds[1:]:
            y = patch.add(op.kind, op.inputs, op.attrs)
            if (bias := biases.get(add.id)) is not None:
                y = patch.add("Add", [y, patch.constant(bias, "bias")], src=add.src)
            for view in (reshape, transpose):
                if view is not None:
                    y = patch.add(view.kind, [y, *view.inputs[1:]], view.attrs, src=view.src)
            if transpose is None:
                y = patch.add("Add", [y if v == value else v for v in add.inputs], add.attrs, src=add.src)
            patch.replace(add.value, y)

    return Match((op, *(view for view in (reshape, transpose) if view is not None), *adds), build)


def _views(graph: Graph, op: Op) -> tuple[Op | None, Op | None]:
    """The Reshape that is the only reader of a product, and the Transpose that is its only reader; None for each that is absent."""
    reshape = graph.sole_user(op.value)
    if reshape is None or reshape.kind != "Reshape":
        return None, None
    user = graph.sole_user(reshape.value)
    return reshape, user if user is not None and user.kind == "Transpose" and user.attrs.perm is not None else None


def _column_bias(graph: Graph, add: Op, reshape: Op | None, transpose: Op, columns: int) -> Array | None:
    """The constant that ``add`` adds after both views, as a vector of the product's columns; None if it differs between rows."""
    sizes = None if reshape is None else sizes_of(graph, reshape.value)
    bias = next((array for v in add.inputs if (array := graph.constant_value(v)) is not None), None)
    if sizes is None or bias is None:
        return None
    perm = transpose.attrs.perm
    own = with_rank(bias, len(sizes)).transpose(np.argsort(perm))
    first = next((k for k in range(len(sizes)) if math.prod(sizes[k:]) == columns), None)
    if first is None or any(n != 1 for n in own.shape[:first]):
        return None
    return np.broadcast_to(own.reshape(own.shape[first:]), sizes[first:]).reshape(-1)


def _adds_constant(graph: Graph, user: Op, value: object) -> bool:
    """Whether ``user`` is an Add of a constant to ``value`` that keeps the shape."""
    if user.kind != "Add" or shape_of(graph, user.value) != graph.type(operand(user)).shape:
        return False
    return any(graph.constant_value(v) is not None for v in user.inputs if v != value)
