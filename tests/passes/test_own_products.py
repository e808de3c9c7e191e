"""own_products: a product to which several constants are added is computed once for each."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.passes.hoist_views import HoistViews

R, K, H, D = 6, 8, 2, 4


def queries(
    *, heads: bool = True, adds: int = 2, used: bool = False, rows: object = R, width: int = K, computed: bool = False
) -> Graph:
    """Queries with a bias for the scores by content, and one for those by position, as in Transformer-XL."""
    n = Net(np.float64)
    x = n.input(rows, width)
    y = n.op("MatMul", x, n.input(width, H * D, name="w") if computed else n.random(width, H * D))
    y = n.op("Reshape", y, n.ints(-1, 1, H, D), attrs=ReshapeAttrs()) if heads else y
    biased = [n.op("Add", y, n.random(H, D) if heads else n.random(H * D)) for _ in range(adds)]
    return n.done(*biased, *([n.op("Tanh", y)] if used else []))


@pytest.mark.parametrize(("heads", "adds"), [(True, 2), (False, 2), (True, 3)])
def test_each_sum_gets_its_product(heads: bool, adds: int) -> None:
    rules = {"own_products": 1, **({"add_before_reshape": adds} if heads else {})}
    graph, _ = check_pass(HoistViews(), queries(heads=heads, adds=adds), changes=sum(rules.values()), rules=rules)
    assert [graph.op(op.inputs[0]).kind for op in graph.of_kind("Add")] == ["MatMul"] * adds  # type: ignore[arg-type]


def test_a_product_that_takes_longer_than_an_addition_is_not_repeated() -> None:
    check_refused(
        HoistViews(), queries(heads=False, rows=1 << 15, width=1 << 12), because="would take longer than the additions"
    )


@pytest.mark.parametrize(
    "graph",
    [
        queries(heads=False, adds=1),
        queries(heads=False, used=True),
        queries(heads=False, rows=symbol("N")),
        queries(heads=False, computed=True),
    ],
    ids=["one sum", "another reader", "unknown rows", "no constant matrix"],
)
def test_other_products_stay(graph: Graph) -> None:
    check_untouched(HoistViews(), graph)


def turned_queries(*biases: tuple[int, ...], perm: tuple[int, ...] = (0, 2, 1, 3), known: bool = True) -> Graph:
    """The same, with biases of these shapes after the Transpose that moves the heads first: Conformer in PyTorch's exports."""
    n = Net(np.float64)
    x = n.input(1 if known else symbol("N"), R, K)
    y = n.op("MatMul", x, n.random(K, H * D))
    y = n.op("Reshape", y, n.ints(0, R, H, D), attrs=ReshapeAttrs())
    y = n.op("Transpose", y, attrs=TransposeAttrs(perm))
    return n.done(*(n.op("Add", y, n.random(*shape)) for shape in biases))


@pytest.mark.parametrize(
    ("shapes", "perm"),
    [(((1, H, 1, D), (H, 1, D)), (0, 2, 1, 3)), (((H, 1, 1), (1, 1, 1, D)), (0, 2, 1, 3)), (((D, 1), (H, D, 1)), (0, 2, 3, 1))],
    ids=["of features", "of a head, of a feature", "features before rows"],
)  # fmt: skip
def test_biases_of_heads_move_in_front_of_both_views(
    shapes: tuple[tuple[int, ...], ...], perm: tuple[int, ...]
) -> None:
    graph, _ = check_pass(HoistViews(), turned_queries(*shapes, perm=perm), changes=1, rules={"own_products": 1})
    adds = graph.of_kind("Add")
    assert [graph.op(op.inputs[0]).kind for op in adds] == ["MatMul"] * 2  # type: ignore[arg-type]
    assert all(graph.users(op.value)[0].kind == "Reshape" for op in adds)


def test_a_constant_of_rows_stays_after_the_transpose() -> None:
    check_refused(HoistViews(), turned_queries((1, H, 1, D), (1, H, R, D)), because="differs between rows")


def test_views_of_unknown_sizes_stay() -> None:
    check_untouched(HoistViews(), turned_queries((1, H, 1, D), (H, 1, D), known=False))
