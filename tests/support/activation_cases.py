"""Activations between products: graphs for tests of epilogues."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Attrs
from optdnn.ops.unary import AlphaAttrs, SeluAttrs
from support.net import Net

ACTIVATIONS: dict[str, Attrs | None] = {
    "Abs": None,
    "Celu": AlphaAttrs(1.3),
    "Cos": None,
    "Elu": AlphaAttrs(0.7),
    "Mish": None,
    "PRelu": None,
    "Reciprocal": None,
    "Selu": SeluAttrs(),
    "Sin": None,
    "Softsign": None,
    "Sqrt": None,
}


def activated(n: Net, x: Value, kind: str) -> Value:
    x = n.op("Abs", x) if kind == "Sqrt" else x
    x = n.op("Add", n.op("Abs", x), np.array([0.5])) if kind == "Reciprocal" else x
    more = [n.const(np.array([0.3]))] if kind == "PRelu" else []
    return n.op(kind, x, *more, attrs=ACTIVATIONS[kind])  # type: ignore[no-any-return]


def convolutions(kind: str) -> Graph:
    """A convolution, one of few input channels, and a product over channels, each with the activation."""
    n = Net()
    x = activated(n, n.conv(n.input(2, 3, 16, 16), 16, bias=True), kind)
    x = activated(n, n.conv(x, 32), kind)
    return n.done(n.conv(activated(n, n.conv(x, 24, 1, pads=0), kind), 8))


def products(kind: str) -> Graph:
    n = Net()
    x = n.input(48, 64)
    for _ in range(2):
        x = activated(n, n.op("Add", n.matmul(x, 64), n.random(64)), kind)
    return n.done(n.matmul(x, 16))


def constant_images(batch: int = 2) -> Graph:
    """Constant images that convolutions add: of one channel in and of many, and of a batch whose images differ."""
    n = Net()
    x = n.op("Add", n.conv(n.input(batch, 3, 16, 16), 16, bias=True), n.random(batch, 16, 16, 16))
    x = n.op("Relu", n.op("Add", n.conv(x, 32, strides=2), n.random(batch, 32, 8, 8)))
    return n.done(n.conv(n.op("Mul", n.conv(x, 24, 1, pads=0), n.random(batch, 24, 8, 8)), 8))
