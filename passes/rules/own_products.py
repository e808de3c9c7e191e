"""A product to which different constants are added becomes a product for each of them, with a bias.

Attention with relative positions adds one bias to the queries for the scores by content and another one for those by position
(Transformer-XL: Dai et al., 2019; XLNet, Conformer). Each addition was a launch. Sibling products become one product, so that the
second one costs some of its columns.
"""

from __future__ import annotations

import math

from optdnn.ir.graph import Graph, Op
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, shape_of
from optdnn.passes.support.products import constant_matrix

MOST_FLOPS = 1 << 30
"""Operations of a further product that take as long as a launch: about 1.5 microseconds."""


@rule("own_products", {"MatMul"})
def own_products(graph: Graph, op: Op) -> Match | Miss | None:
    """``reshape(x W) + c`` and ``reshape(x W) + d`` with constants c and d: a product, and a Reshape, for each."""
    views = graph.users(op.value)
    reshape = views[0] if len(views) == 1 and views[0].kind == "Reshape" else None
    value = op.value if reshape is None else reshape.value
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
    if 2 * math.prod(map(int, (*rows, weight[0]))) * (len(adds) - 1) > MOST_FLOPS:  # type: ignore[arg-type]
        return Miss("further products would take longer than the additions")

    def build(patch: Patch) -> None:
        for add in adds[1:]:
            y = patch.add(op.kind, op.inputs, op.attrs)
            if reshape is not None:
                y = patch.add("Reshape", [y, *reshape.inputs[1:]], reshape.attrs, src=reshape.src)
            patch.replace(
                add.value, patch.add("Add", [y if v == value else v for v in add.inputs], add.attrs, src=add.src)
            )

    return Match((op, *([] if reshape is None else [reshape]), *adds), build)


def _adds_constant(graph: Graph, user: Op, value: object) -> bool:
    """Whether it adds a constant of the last axes, which a product can take as its bias."""
    if user.kind != "Add" or shape_of(graph, user.value) != graph.type(operand(user)).shape:
        return False
    return any(graph.constant_value(v) is not None for v in user.inputs if v != value)
