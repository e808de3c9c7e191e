"""outer_product: products of one term are multiplications."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net
from support.simulated import check_simulated, passed

from optdnn.dim import DimLike, symbol
from optdnn.ir.graph import Graph
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.small_products import SmallProducts


def product(left: Sequence[DimLike], right: Sequence[DimLike]) -> Graph:
    n = Net()
    return n.done(n.op("MatMul", n.input(*left), n.input(*right)))


@pytest.mark.parametrize(
    ("left", "right"),
    [((5, 1), (1, 7)), ((3, 5, 1), (3, 1, 7)), ((5, 1), (3, 1, 7)), ((3, 1, 5, 1), (2, 1, 7)), ((1, 1), (1, 1))],
)
def test_one_term(left: Sequence[DimLike], right: Sequence[DimLike]) -> None:
    check_pass(SmallProducts(), product(left, right), changes=1, rules={"outer_product": 1}, kinds={"Mul": 1})


def test_any_number_of_rows() -> None:
    check_pass(SmallProducts(), product((symbol("n"), 1), (1, 7)), changes=1, kinds={"Mul": 1}, sizes={"n": 4})


def test_a_constant_column() -> None:
    n = Net()
    column = n.const(np.linspace(1, 2, 7, dtype=np.float32).reshape(1, 7))
    check_pass(SmallProducts(), n.done(n.op("MatMul", n.input(5, 1), column)), changes=1)


@pytest.mark.parametrize(
    ("left", "right"), [((5, 2), (2, 7)), ((1,), (1, 7)), ((5, 1), (1,)), ((5, symbol("k")), (symbol("k"), 7))]
)
def test_other_products_stay(left: Sequence[DimLike], right: Sequence[DimLike]) -> None:
    check_untouched(SmallProducts(), product(left, right))


def test_an_epilogue_stays() -> None:
    """Fused products come later in the pipeline; this pass leaves products with stages alone."""
    n = Net()
    graph = n.done(n.op("Relu", n.op("MatMul", n.input(5, 1), n.input(1, 7))))
    FuseEpilogue()(graph, None)
    assert graph.kinds() == {"MatMul": 1}
    check_untouched(SmallProducts(), graph)


def test_factors_and_later_operators_are_one_launch() -> None:
    n = Net()
    y = n.op("MatMul", n.op("Relu", n.input(40, 8, 1)), n.input(40, 1, 24, name="z"))
    graph = n.done(n.op("Tanh", n.op("Mul", y, n.const(np.float32(3)))))
    check_simulated(graph)
    made, _ = passed(graph, "fp16", io_dtype="fp16")
    assert made.kinds() == {"Pointwise": 1}
