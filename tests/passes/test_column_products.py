"""einsum_to_matmul, column_products: products of a constant matrix with columns become products of rows."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_untouched
from support.net import Net

from optdnn.dim import DimLike, symbol
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.einsum_to_matmul import EinsumProducts


def columns(*shape: DimLike, matrix: tuple[int, ...] = (5, 6)) -> Any:
    n = Net()
    x = n.input(*shape)
    return n.done(n.op("MatMul", n.const(n.rng.standard_normal(matrix)), x, attrs=MatMulAttrs()))


@pytest.mark.parametrize("shape", [(3, 6, 1), (2, 3, 6, 1), (symbol("b"), 6, 1)])
def test_columns_become_rows(shape: tuple[DimLike, ...]) -> None:
    kinds = {"Squeeze": 1, "MatMul": 1, "Unsqueeze": 1}
    check_pass(EinsumProducts(), columns(*shape), changes=1, kinds=kinds, rules={"column_products": 1}, sizes={"b": 4})


@pytest.mark.parametrize(
    "graph",
    [
        columns(6, 1),  # one product of one column
        columns(1, 6, 1),
        columns(3, 6, 2),
        columns(3, 6, 1, matrix=(3, 5, 6)),  # a matrix per item
    ],
)
def test_other_products_are_left_alone(graph: Any) -> None:
    check_untouched(EinsumProducts(), graph)


def test_computed_matrices_are_left_alone() -> None:
    n = Net()
    matrix, x = n.input(5, 6, name="matrix"), n.input(3, 6, 1)
    check_untouched(EinsumProducts(), n.done(n.op("MatMul", matrix, x, attrs=MatMulAttrs())))
