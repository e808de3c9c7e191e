"""small_products: products of very small matrices are multiplications and sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, passed

from optdnn.dim import DimLike, symbol
from optdnn.ir.graph import Graph
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.small_products import SmallProducts

b, n = symbol("b", 1, 64), symbol("n", 1, 64)


def product(left: Sequence[DimLike], right: Sequence[DimLike], *, constant: int = -1) -> Graph:
    """``constant``: the operand that is a constant."""
    net = Net()
    shapes = (left, right)
    operands = [
        net.random(*(d for d in shapes[k] if isinstance(d, int)))
        if k == constant
        else net.input(*shapes[k], name=f"x{k}")
        for k in range(2)
    ]
    return net.done(net.op("MatMul", *operands))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 5, 3, 3), (2, 5, 3, 1)),
        ((5, 2, 2), (7, 5, 2, 1)),
        ((b, n, 4, 4), (b, n, 4, 1)),
        ((9, 2, 3), (3, 1)),
        ((9, 1, 3), (9, 3, 1)),
    ],
)
def test_columns(left: Sequence[DimLike], right: Sequence[DimLike]) -> None:
    kinds = {"Transpose": 1, "Mul": 1, "ReduceSum": 1}
    graph = product(left, right)
    check_pass(SmallProducts(), graph, changes=1, kinds=kinds, rules={"small_product": 1}, sizes={"b": 2, "n": 6})


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((6, 4, 4), (6, 4, 4)),
        ((2, 6, 4, 4), (6, 4, 4)),
        ((6, 4, 4), (2, 6, 4, 4)),
        ((6, 50, 3), (6, 3, 3)),
        ((6, 2, 2), (6, 2, 50)),
        ((b, 9, 3), (b, 3, 4)),
    ],
)
def test_matrices(left: Sequence[DimLike], right: Sequence[DimLike]) -> None:
    kinds = {"Unsqueeze": 2, "Mul": 1, "ReduceSum": 1}
    check_pass(SmallProducts(), product(left, right), changes=1, kinds=kinds, sizes={"b": 2, "n": 6})


@pytest.mark.parametrize("constant", [0, 1])
def test_a_constant_matrix_for_each_item(constant: int) -> None:
    check_pass(SmallProducts(), product((6, 4, 4), (6, 4, 3), constant=constant), changes=1)


@pytest.mark.parametrize(
    "graph",
    [
        product((6, 5, 5), (6, 5, 1)),  # more terms
        product((6, 8, 3), (6, 3, 8)),  # more rows and columns
        product((6, 1, 4), (6, 4, 50)),  # a mixture of long rows
        product((6, 50, 4), (6, 4, 1)),
        product((4, 4), (4, 4)),  # one product
        product((6, 50, 3), (3, 4), constant=1),  # a layer
        product((1, 3, 3), (6, 3, 50), constant=0),
        product((6, 4, n), (6, n, 4)),
        product((6, n, 3), (6, 3, n)),
    ],
)
def test_other_products_stay(graph: Graph) -> None:
    check_untouched(SmallProducts(), graph)


@pytest.mark.parametrize("count", [1 << 14, symbol("any")])
def test_very_many_products_are_refused(count: DimLike) -> None:
    check_refused(SmallProducts(), product((count, 3, 3), (count, 3, 3)), because="may have more than 131072 elements")


def test_an_epilogue_stays() -> None:
    """Fused products come later in the pipeline; this pass leaves products with stages alone."""
    net = Net()
    graph = net.done(net.op("Relu", net.op("MatMul", net.input(6, 3, 3), net.input(6, 3, 1, name="y"))))
    FuseEpilogue()(graph, None)
    assert graph.kinds() == {"MatMul": 1}
    check_untouched(SmallProducts(), graph)


def test_integers_stay() -> None:
    net = Net()
    graph = net.done(net.op("MatMul", net.input(6, 3, 3, dtype=np.int32), net.input(6, 3, 1, name="y", dtype=np.int32)))
    check_untouched(SmallProducts(), graph)


def test_a_product_of_poses_is_one_launch() -> None:
    net = Net()
    graph = net.done(net.op("Neg", net.op("MatMul", net.input(40, 24, 4, 4), net.input(40, 24, 4, 4, name="y"))))
    check_simulated(graph)
    made, _ = passed(graph, "fp16", io_dtype="fp16")
    assert made.kinds().get("MatMul") is None
    assert made.kinds()["ReduceSum"] == 1
