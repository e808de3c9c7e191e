"""einsum_to_matmul: Einsums that are products of matrices become MatMul; others are refused with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused
from support.net import Net

from optdnn.dim import symbol
from optdnn.ops.gemm import EinsumAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.einsum_to_matmul import EinsumProducts

PASS = EinsumProducts()
SHAPES = {"b": 2, "h": 3, "i": 4, "j": 5, "k": 6, "d": 7}


def net(equation: str, *, dtype: Any = np.float32, shapes: dict[str, Any] | None = None) -> Any:
    n, sizes = Net(dtype), {**SHAPES, **(shapes or {})}
    terms = equation.partition("->")[0].split(",")
    inputs = [n.input(*(sizes[c] for c in term), name=f"x{i}") for i, term in enumerate(terms)]
    return n.done(n.op("Einsum", *inputs, attrs=EinsumAttrs(equation)))


@pytest.mark.parametrize(
    ("equation", "kinds"),
    [
        ("ij,jk->ik", {"MatMul": 1}),
        ("ij,kj->ik", {"MatMul": 1, "Transpose": 1}),
        ("bhid,bhjd->bhij", {"MatMul": 1, "Transpose": 1}),  # attention's scores
        ("bhij,bhjd->bihd", {"MatMul": 1, "Transpose": 1}),  # and its result, heads put back
        ("bijk,kd->bijd", {"MatMul": 1, "Reshape": 2}),
        (
            "bihjd,bkhd->bhjik",
            {"MatMul": 1, "Transpose": 2, "Reshape": 2},
        ),  # scores of grouped queries: not transposed again
        ("bhid,bkhjd->bhijk", {"MatMul": 1, "Transpose": 1, "Reshape": 2}),  # so are columns
        ("bij,jhd->bihd", {"MatMul": 1, "Reshape": 3}),  # a projection to heads
        ("bij,bk->bijk", {"Mul": 1, "Reshape": 2}),  # an outer product
        ("ij,ij->", {"MatMul": 1, "Reshape": 3}),
        ("bij,jk->ik", {"ReduceSum": 1, "MatMul": 1}),
        ("ij,jk,kd->id", {"MatMul": 2}),
        ("bihj,hjd->bihd", {"MatMul": 1, "Reshape": 2, "Transpose": 2}),
        ("bij->jb", {"ReduceSum": 1, "Transpose": 1}),
        ("bij->bji", {"Transpose": 1}),
    ],
)
def test_products(equation: str, kinds: dict[str, int]) -> None:
    check_pass(PASS, net(equation), changes=1, kinds=kinds)


@pytest.mark.parametrize(
    ("equation", "options", "why"),
    [
        ("ii->i", {}, "a diagonal"),
        ("ij,jk->ik", {"shapes": {"i": symbol("n")}}, "sizes are not known"),
        ("ij,jk->ik", {"dtype": np.int32}, "products of int32"),
        ("bhij,hjd->bhid", {"shapes": {"j": 3}}, "sums of 3 terms"),
        (
            "bihj,hjd->bihd",
            {"shapes": {"j": 2}},
            "sums of 2 terms",
        ),  # leaves of oblivious trees (NODE: Popov et al., 2020)
    ],
)
def test_refusals(equation: str, options: dict[str, Any], why: str) -> None:
    check_refused(PASS, net(equation, **options), because=why)


def test_an_axis_that_broadcasts_is_refused() -> None:
    n = Net()
    graph = n.done(n.op("Einsum", n.input(4, 1), n.input(5, 6, name="y"), attrs=EinsumAttrs("ij,jk->ik")))
    check_refused(PASS, graph, because="an axis of 1 broadcasts along j")


def test_scores_written_the_other_way_round_need_no_transposition_after() -> None:
    """Keras writes the keys first; the product still has the queries first."""
    check_pass(PASS, net("bjhd,bihd->bhij"), changes=1, kinds={"MatMul": 1, "Transpose": 2})


def product_sum(a: Any, b: Any, axes: list[int], *, keepdims: bool = False, read_twice: bool = False) -> Any:
    n = Net()
    product = n.op("Mul", n.input(*a), n.input(*b, name="y"))
    total = n.op("ReduceSum", product, n.const(np.array(axes, np.int64)), attrs=ReduceAttrs(keepdims))
    return n.done(n.op("Add", total, n.op("ReduceMax", product)) if read_twice else total)


@pytest.mark.parametrize(
    ("a", "b", "axes", "kinds"),
    [
        ((2, 7, 1, 5, 6), (2, 1, 8, 5, 6), [-1], {"Transpose": 3, "Reshape": 2}),  # Mamba-2: C and B of a chunk
        ((2, 7, 8, 5, 1), (1, 8, 5, 6), [2], {"Transpose": 3, "Reshape": 4}),  # its weights times values
        ((4, 1, 6), (5, 6), [2], {"Transpose": 1, "Reshape": 1}),
        ((4, 1, 6, 3), (5, 6, 1), [2, 3], {"ReduceSum": 1, "Transpose": 1, "Reshape": 2}),
    ],
)
def test_sums_of_multiplications(a: Any, b: Any, axes: Any, kinds: dict[str, int]) -> None:
    check_pass(PASS, product_sum(a, b, axes), changes=1, kinds={"MatMul": 1, **kinds}, rules={"sum_to_matmul": 1})


def test_a_sum_may_keep_its_axes() -> None:
    kinds = {"MatMul": 1, "Transpose": 1, "Reshape": 2}
    check_pass(PASS, product_sum((4, 1, 6), (5, 6), [-1], keepdims=True), changes=1, kinds=kinds)


def test_a_multiplication_of_vectors_stays_a_sum() -> None:
    for a, b in [((4, 5, 6), (5, 6)), ((1, 5, 6), (5, 6)), ((4, 1, 6), (5, 1))]:
        check_pass(PASS, product_sum(a, b, [-1]), changes=0)
    check_pass(PASS, product_sum((4, 1, 6), (5, 6), [-1], read_twice=True), changes=0)


def test_a_small_product_is_refused() -> None:
    check_refused(PASS, product_sum((3, 1, 6), (5, 6), [-1]), because="3 rows and 5 columns is too small")
