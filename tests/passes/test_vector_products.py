"""vector_products: products of one tensor with constant vectors become one product with a matrix."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.vector_products import VectorProducts
from optdnn.types import BF16

PASS = VectorProducts()


def scores(inner: int, *, bias: bool = True, turned: bool = False, vectors: int = 2) -> Graph:
    """Features, made by a product, and their products with vectors. ``turned``: the bias is the first operand."""
    n = Net()
    x = n.input(2, 9, inner)
    y = n.matmul(x, 16)
    if bias:
        y = n.op("Add", *((n.random(16), y) if turned else (y, n.random(16))))
    return n.done(y, *(n.op("MatMul", y, n.random(16)) for _ in range(vectors)))


@pytest.mark.parametrize("vectors", [2, 9])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_the_matrix_takes_in_the_product_before_it(bias: bool, turned: bool, vectors: int) -> None:
    graph, _ = check_pass(PASS, scores(16, bias=bias, turned=turned, vectors=vectors), changes=1)
    first, second = graph.of_kind("MatMul")
    assert first.inputs[0] == second.inputs[0]
    assert {graph.type(p.value).dims[-1] for p in (first, second)} == {16, 8 if vectors == 2 else 16}
    assert len(graph.of_kind("Add")) == 2 * bias


def test_matrices_of_bf16_are_multiplied() -> None:
    n = Net(BF16)
    y = n.op("Add", n.matmul(n.input(2, 9, 16), 16), n.random(16))
    check_pass(PASS, n.done(*(n.op("MatMul", y, n.random(16)) for _ in range(2))), changes=1)


def test_a_product_of_many_features_stays_before_it() -> None:
    graph, _ = check_pass(PASS, scores(33), changes=1)
    first, second = graph.of_kind("MatMul")
    assert graph.op(second.inputs[0]).kind == "Add"  # type: ignore[arg-type]
    assert first.inputs[0] != second.inputs[0]


def test_other_tensors_are_multiplied_as_they_are() -> None:
    n = Net()
    y = n.op("Tanh", n.input(2, 9, 16))
    check_pass(PASS, n.done(*(n.op("MatMul", y, n.random(16)) for _ in range(3))), changes=1)
    y = n.op("Add", n.input(2, 9, 16, name="z"), n.random(9, 16))
    check_pass(PASS, n.done(*(n.op("MatMul", y, n.random(16)) for _ in range(3))), changes=2)


@pytest.mark.parametrize("perm", [(0, 1, 3, 2), (0, 2, 1, 3)])
def test_transposed_rows_are_read_in_place(perm: tuple[int, ...]) -> None:
    """The expected distance to a box's side (DFL: Li et al., 2020)."""
    n = Net(np.float64)
    x = n.op("Transpose", n.op("Softmax", n.input(2, 4, 16, 16), attrs=SoftmaxAttrs(2)), attrs=TransposeAttrs(perm))
    graph = n.done(n.op("MatMul", x, n.random(16)))
    if perm[-1] != 3:
        check_refused(PASS, graph, because="read transposed rows in place")
    else:
        check_pass(PASS, graph, changes=1)


def test_it_becomes_one_launch_with_the_features() -> None:
    program = check_simulated(scores(16))
    assert len([k for k in kinds(program) if k in ("Conv", "Gemm", "MatMul")]) == 1


def cross(layers: int, units: int = 0) -> Graph:
    """Repeated ``x * (y @ w) + b + y`` (a cross network), with a parallel dense layer."""
    n = Net()
    x = y = n.input(32, 64)
    for _ in range(layers):
        score = n.op("Unsqueeze", n.op("MatMul", y, n.random(64, scale=0.1)), n.ints(1))
        y = n.op("Add", n.op("Add", n.op("Mul", x, score), n.random(64)), y)
    return n.done(y, *([n.matmul(x, units)] if units else []))


@pytest.mark.parametrize(("units", "columns"), [(0, {1}), (24, {1, 8, 24})])
def test_one_vector_is_a_column_or_eight_beside_other_matrices(units: int, columns: set[int]) -> None:
    graph, _ = check_pass(PASS, cross(2, units), changes=2)
    assert {graph.type(p.value).dims[-1] for p in graph.of_kind("MatMul")} == columns


def test_one_vector_takes_in_the_product_before_it() -> None:
    graph, _ = check_pass(PASS, scores(16, vectors=1), changes=1)
    assert {graph.type(p.value).dims[-1] for p in graph.of_kind("MatMul")} == {8, 16}


def test_one_vector_is_multiplied_on_tensor_cores() -> None:
    assert kinds(check_simulated(cross(2))).count("Conv") == 2


def test_other_products_are_no_candidates() -> None:
    n = Net()
    x, v = n.input(2, 9, 16), n.input(16, name="v")
    given = [n.op("MatMul", x, v), n.op("MatMul", x, n.random(16, 4)), n.op("MatMul", v, n.random(16))]
    check_untouched(PASS, n.done(*given))
