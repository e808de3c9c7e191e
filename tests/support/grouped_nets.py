"""A grouped convolution between two others."""

from __future__ import annotations

from optdnn.ir.graph import Graph
from support.net import Net


def grouped(
    channels: int, filters: int, group: int, kernel: int = 3, size: tuple[int, int] = (9, 10), *, strides: int = 1,
    dilations: int = 1, residual: bool = False, batch: int = 2, axes: int = 2,
) -> Graph:  # fmt: skip
    """With bias and ReLU. The convolutions before and after it make the images channels-last."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(batch, 8, *size[-axes:]), channels, 1, pads=0))
    y = n.conv(
        x, filters, kernel, pads=kernel // 2 * dilations, strides=strides, dilations=dilations, group=group, bias=True
    )
    if residual:
        y = n.op("Add", y, n.input(*n.dims(y), name="r"))
    return n.done(n.conv(n.op("Relu", y), 16, 1, pads=0))
