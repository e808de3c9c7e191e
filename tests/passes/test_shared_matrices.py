"""shared_matrices: vectors that share a computed matrix are the rows of one product."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.check import check_pass, check_untouched
from support.net import Net
from support.simulated import check_simulated, passed

from optdnn.dim import DimLike, symbol
from optdnn.ir.graph import Graph
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.shared_matrices import SharedMatrices

n, b = symbol("n"), symbol("b")


def product(left: Sequence[DimLike], right: Sequence[DimLike]) -> Graph:
    net = Net()
    return net.done(net.op("MatMul", net.input(*left), net.input(*right, name="right")))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 5, 1, 3, 4), (2, 5, 7, 4, 1)),
        ((1, 3, 4), (2, 5, 7, 4, 1)),
        ((2, 5, 1, 3, 4), (7, 4, 1)),
        ((b, 1, 3, 4), (b, n, 4, 1)),
        ((5, 4), (3, 4, 1)),
    ],
)
def test_columns(left: Sequence[DimLike], right: Sequence[DimLike]) -> None:
    squeezes = 1 + (len(left) > 2)
    kinds = {"Squeeze": squeezes, "Transpose": 1, "MatMul": 1, "Unsqueeze": 1}
    check_pass(
        SharedMatrices(),
        product(left, right),
        changes=1,
        kinds=kinds,
        rules={"shared_matrix": 1},
        sizes={"n": 6, "b": 2},
    )


@pytest.mark.parametrize(
    ("left", "right"), [((2, 7, 1, 4), (2, 1, 4, 3)), ((7, 1, 4), (2, 1, 4, 3)), ((n, 1, 4), (4, 3))]
)
def test_rows(left: Sequence[DimLike], right: Sequence[DimLike]) -> None:
    kinds = {"Squeeze": 1 + (len(right) > 2), "MatMul": 1, "Unsqueeze": 1}
    check_pass(SharedMatrices(), product(left, right), changes=1, kinds=kinds, sizes={"n": 6})


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 5, 3, 4), (2, 5, 4, 1)),  # a matrix of their own
        ((2, 1, 3, 4), (2, 1, 4, 1)),  # one vector
        ((2, 1, 3, 4), (2, 7, 4, 2)),  # several columns
        ((2, 1, 1, 4), (2, 7, 4, 1)),  # dot products
        ((2, 7, 1, 1), (2, 1, 1, 3)),  # one term
        ((3, 4), (4, 1)),
        ((4,), (7, 4, 1)),
    ],
)
def test_other_products_stay(left: Sequence[DimLike], right: Sequence[DimLike]) -> None:
    check_untouched(SharedMatrices(), product(left, right))


def test_layers_stay() -> None:
    """One position of each of several items, times constant weights."""
    net = Net()
    check_untouched(SharedMatrices(), net.done(net.op("MatMul", net.input(5, 1, 8), net.random(8, 6))))


def test_an_epilogue_stays() -> None:
    """Fused products come later in the pipeline; this pass leaves products with stages alone."""
    net = Net()
    graph = net.done(net.op("Relu", net.op("MatMul", net.input(2, 1, 3, 3), net.input(2, 7, 3, 1, name="right"))))
    FuseEpilogue()(graph, None)
    assert graph.kinds() == {"MatMul": 1}
    check_untouched(SharedMatrices(), graph)


def test_rotated_vectors_are_one_product_per_matrix() -> None:
    net = Net()
    points = net.op("MatMul", net.input(2, 20, 1, 6, 6), net.input(2, 20, 12, 6, 1, name="points"))
    graph = net.done(points)
    check_simulated(graph)
    made, _ = passed(graph, "fp16")
    (only,) = [op for op in made.order() if op.kind == "MatMul"]
    assert only.outputs[0].type.dims == (2, 20, 12, 6)
