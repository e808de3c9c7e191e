"""In a sum of two products and a residual, each product adds one tensor; biases come before residuals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.passes.base import RulePass
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.rules.third_term import bias_first, third_term


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


class BiasFirst(RulePass):
    name = "bias"
    rules = (bias_first,)


BIAS = BiasFirst()


@pytest.mark.parametrize("swap", [False, True])
def test_a_bias_after_the_residual_goes_to_the_product(swap: bool) -> None:
    """SkipLayerNormalization adds its operands in this order."""
    n = Net(np.float64)
    x = n.input(2, 5, 6)
    pair = (n.matmul(n.op("Tanh", x), 6), x)
    y = n.op("Add", n.op("Add", *(pair[::-1] if swap else pair)), n.random(6))
    graph, _ = check_pass(BIAS, n.done(y), changes=1, kinds={"MatMul": 1, "Tanh": 1, "Add": 2})
    fused, _ = check_pass(FuseEpilogue(), graph, changes=2)
    (product,) = fused.of_kind("MatMul")
    assert [stage.kind for stage in product.attrs.epilogue] == ["Add", "Add"]
    assert fused.constant_value(product.inputs[2]) is not None


def test_a_bias_for_each_channel_goes_to_the_convolution() -> None:
    n = Net(np.float64)
    x = n.input(2, 6, 5, 5)
    y = n.op("Add", n.op("Add", n.conv(n.op("Tanh", x), 6, bias=False), x), n.random(6, 1, 1))
    graph, _ = check_pass(BIAS, n.done(y), changes=1)
    assert graph.constant_value(graph.sole_user(graph.of_kind("Conv")[0].value).inputs[1]) is not None  # type: ignore[union-attr]


UNBIASED: dict[str, Callable[[Net, Value], Value]] = {
    "rows": lambda n, x: n.op("Add", n.op("Add", n.matmul(n.op("Tanh", x), 6), x), n.random(5, 6)),
    "number": lambda n, x: n.op("Add", n.op("Add", n.matmul(n.op("Tanh", x), 6), x), 0.5),
    "no product": lambda n, x: n.op("Add", n.op("Add", n.op("Tanh", x), x), n.random(6)),
    "two constants": lambda n, x: n.op("Add", n.op("Add", n.matmul(x, 6), n.random(5, 6)), n.random(6)),
    "wider": lambda n, x: n.op("Add", n.op("Add", n.matmul(n.input(5, 6, name="z"), 6), x), n.random(6)),
}


@pytest.mark.parametrize("case", UNBIASED)
def test_other_constants_stay_after_the_residual(case: str) -> None:
    n = Net()
    check_untouched(BIAS, n.done(UNBIASED[case](n, n.input(2, 5, 6))))


def test_a_sum_that_is_read_elsewhere_keeps_its_order() -> None:
    n = Net()
    x = n.input(2, 5, 6)
    total = n.op("Add", n.matmul(n.op("Tanh", x), 6), x)
    check_refused(BIAS, n.done(n.op("Add", total, n.random(6)), n.op("Neg", total)), because="is used 2 times")
