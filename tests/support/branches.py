"""Networks whose branches can run in parallel."""

from __future__ import annotations

from optdnn.ir.graph import Graph
from optdnn.ops.index import ConcatAttrs
from support.net import Net


def inception(channels: int = 16, *, size: int = 12, blocks: int = 2) -> Graph:
    """Blocks of three branches each, concatenated in place."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 8, size, size), channels, 3))
    for _ in range(blocks):
        a = n.op("Relu", n.conv(x, channels, 1, pads=0))
        b = n.op("Relu", n.conv(n.op("Relu", n.conv(x, channels, 3)), channels, 3))
        c = n.op("Relu", n.conv(n.max_pool(x, 3, pads=1, strides=1), channels, 1, pads=0))
        x = n.op("Concat", a, b, c, attrs=ConcatAttrs(1))
    return n.done(n.op("GlobalAveragePool", x))


def products(rows: int = 64) -> Graph:
    """Two branches of two matrix products each, multiplied."""
    n = Net()
    x = n.input(rows, 256)
    a = n.matmul(n.op("Relu", n.matmul(x, 512)), 256)
    b = n.matmul(n.op("Tanh", n.matmul(x, 384)), 256)
    return n.done(n.op("Mul", a, b))
