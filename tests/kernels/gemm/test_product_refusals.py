"""Refusals of the tactics of products on Hopper, with their reasons."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.net import Net, built
from support.simulated import check_not_taken

from optdnn.ir.graph import Value
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs


def activated_in_front(n: Net) -> Value:
    """Passes give a product no prologue, but the operator may have one."""
    return n.op(
        "MatMul", n.input(64, 64), n.random(64, 32), attrs=MatMulAttrs(prologue=(Stage("Relu", (~0,), Attrs()),))
    )


def by_a_computed_matrix(n: Net) -> Value:
    x = n.input(64, 256)
    return n.op("Mul", n.op("Relu", n.matmul(x, 64)), n.op("MatMul", x, n.input(256, 64, name="w")))


@pytest.mark.parametrize(
    ("build", "tactic", "because"),
    [
        (
            lambda n: n.op("Gemm", n.input(1024, 4), n.random(1024, 64), attrs=GemmAttrs(transA=True)),
            "gemm_sm90",
            "its first operand is transposed",
        ),
        (activated_in_front, "gemm_sm90", "it has a prologue"),
        (activated_in_front, "matmul_sm90", "it has a prologue"),
        (
            lambda n: n.op("MatMul", n.input(64), n.random(64, 32)),
            "gemm_sm90",
            "it is not a product of rows with a matrix",
        ),
        (
            lambda n: n.op("MatMul", n.input(2, 4, 64), n.input(64, name="b")),
            "matmul_sm90",
            "it is not a product of matrices",
        ),
        (by_a_computed_matrix, "gemm_paired_sm90", "its second operand is not a constant matrix"),
    ],
)
def test_networks_whose_products_are_refused(build: Callable[[Net], Value], tactic: str, because: str) -> None:
    check_not_taken(built(build), tactic, because, no_cubins=True)


def test_a_computed_addend_is_refused_without_passes() -> None:
    n = Net()
    y = n.op("Gemm", n.input(4, 64), n.random(64, 32), n.input(4, 32, name="c"), attrs=GemmAttrs())
    check_not_taken(n.done(y), "gemm_sm90", "its third operand is not a constant row", no_cubins=True, opt_level=0)
