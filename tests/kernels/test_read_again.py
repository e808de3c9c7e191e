"""Results that two stages of one epilogue read: they share an operand, and its operator keeps a launch of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.net import Net, built
from support.simulated import check_simulated

from optdnn.ir.graph import Value


def again(n: Net, y: Value, other: Value) -> Value:
    return n.op("Relu", n.op("Add", other, y))


def added_convolution(n: Net) -> Value:
    x = n.input(1, 8, 3, 5)
    other = n.op("Add", n.conv(x, 8, 1, pads=0), n.const(np.float32(0.5)))
    return again(n, n.op("Add", n.conv(x, 8, 1, pads=0), other), other)


def gate(n: Net) -> Value:
    x = n.input(1, 64, 8, 8)
    other = n.op("Sigmoid", n.conv(x, 64, 1, pads=0))
    return again(n, n.op("Mul", n.op("Relu", n.conv(x, 64, 1, pads=0)), other), other)


def gate_of_depthwise_convolutions(n: Net) -> Value:
    x = n.input(1, 64, 32, 32)
    other = n.op("Sigmoid", n.conv(x, 64, 3, pads=1, group=64))
    return again(n, n.op("Mul", n.conv(x, 64, 3, pads=1, group=64), other), other)


def gate_of_products(n: Net) -> Value:
    x = n.input(128, 64)
    other = n.op("Sigmoid", n.op("MatMul", x, n.random(64, 64)))
    return again(n, n.op("Mul", n.op("MatMul", x, n.random(64, 64)), other), other)


NETS: dict[str, Callable[[Net], Value]] = {
    f.__name__: f for f in (added_convolution, gate, gate_of_depthwise_convolutions, gate_of_products)
}


@pytest.mark.parametrize("name", NETS)
def test_they_are_stored(name: str) -> None:
    check_simulated(built(NETS[name]))
