"""third_term: in a sum of two products and a residual, each product adds one tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.passes.base import RulePass
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.rules.third_term import third_term


class ThirdTerm(RulePass):
    name = "third"
    rules = (third_term,)


THIRD = ThirdTerm()


def terms(n: Net, bias: bool = False) -> tuple[Value, Value, Value]:
    """Two products of rows of an input, perhaps with biases, and the input."""
    x = n.input(2, 5, 6)
    p, q = (n.matmul(n.op(kind, x), 6) for kind in ("Relu", "Tanh"))
    return (n.op("Add", p, n.random(6)), n.op("Add", q, n.random(6)), x) if bias else (p, q, x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("last", [True, False])
def test_each_product_adds_one_tensor(bias: bool, last: bool) -> None:
    n = Net(np.float64)
    p, q, x = terms(n, bias)
    total = n.op("Add", p, q)
    y = n.op("Add", *((total, x) if last else (x, total)))
    graph, _ = check_pass(THIRD, n.done(y), changes=1)
    fused, _ = check_pass(FuseEpilogue(), graph, changes=4 if bias else 2)
    assert sorted(len(op.attrs.epilogue) for op in fused.of_kind("MatMul")) == ([2, 2] if bias else [1, 1])


def product_residual(n: Net) -> Value:
    p, q, x = terms(n)
    return n.op("Add", n.op("Add", p, q), n.matmul(n.op("Abs", x), 6))


def constant_residual(n: Net) -> Value:
    p, q, _ = terms(n)
    return n.op("Add", n.op("Add", p, q), n.random(6))


def one_product(n: Net) -> Value:
    p, _, x = terms(n)
    return n.op("Add", n.op("Add", p, n.op("Tanh", x)), x)


def narrow_residual(n: Net) -> Value:
    p, q, _ = terms(n)
    return n.op("Add", n.op("Add", p, q), n.input(5, 6, name="r"))


def product_read_twice(n: Net) -> Value:
    p, _, x = terms(n)
    return n.op("Add", n.op("Add", p, p), x)


MADE: list[Callable[[Net], Value]] = [
    product_residual,
    constant_residual,
    one_product,
    narrow_residual,
    product_read_twice,
]


@pytest.mark.parametrize("made", MADE)
def test_other_sums_keep_their_order(made: Callable[[Net], Value]) -> None:
    n = Net()
    check_untouched(THIRD, n.done(made(n)))


def test_refused_where_the_sum_of_products_is_read_by_others() -> None:
    n = Net()
    p, q, x = terms(n)
    total = n.op("Add", p, q)
    check_refused(THIRD, n.done(n.op("Add", total, x), n.op("Relu", total)), because="is used 2 times")
