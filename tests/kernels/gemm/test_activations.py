"""Activations as stages: the squared ReLU of Primer, Nemotron and Persimmon, and the Swish of CLIP, are part of the product's
launch."""

from __future__ import annotations

import pytest
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ops.unary import AlphaAttrs


@pytest.mark.parametrize("power", [False, True])
def test_a_squared_relu_is_part_of_the_product(power: bool) -> None:
    n = Net()
    y = n.op("Relu", n.matmul(n.input(64, 64), 128))
    y = n.op("Pow", y, 2.0) if power else n.op("Mul", y, y)
    program = check_simulated(n.done(n.op("Relu", n.matmul(y, 64))), tolerance=1e-2)
    assert kinds(program) == ["Pointwise", "SeparableConv"]  # the first step converts the input


def test_a_product_with_an_earlier_value_is_no_square() -> None:
    n = Net()
    y = n.matmul(n.input(64, 64), 128)
    program = check_simulated(n.done(n.matmul(n.op("Mul", n.op("Relu", y), y), 64)), tolerance=1e-2)
    assert kinds(program).count("Pointwise") == 2


@pytest.mark.parametrize("alpha", [1.0, 1.702, -0.5])
def test_a_swish_of_any_slope_is_part_of_the_product(alpha: float) -> None:
    n = Net()
    y = n.op("Swish", n.matmul(n.input(64, 64), 128), attrs=AlphaAttrs(alpha))
    program = check_simulated(n.done(n.op("Relu", n.matmul(y, 64))), tolerance=1e-2)
    assert kinds(program) == ["Pointwise", "SeparableConv"]
