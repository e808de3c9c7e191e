"""bias_first: a bias that is added after a residual is added before it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.passes.base import RulePass
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.rules.bias_first import bias_first


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
