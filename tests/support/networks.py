"""Small networks with random weights. Each has the structure of a real family, in the form of its exporter."""

from __future__ import annotations

import math
from collections.abc import Callable

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs, PadAttrs, SplitAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import AxisAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.ops.table import OPDEFS
from support.net import Net


def _cbr(n: Net, x: Value, channels: int, kernel: int = 3, **more: int) -> Value:
    return n.op("Relu", n.bn(n.conv(x, channels, kernel, **{"pads": kernel // 2, **more})))


def _classifier(n: Net, x: Value, classes: int = 5) -> Graph:
    pooled = n.op("Flatten", n.op("GlobalAveragePool", x), attrs=AxisAttrs(1))
    return n.done(n.op("Softmax", n.gemm(pooled, classes), attrs=SoftmaxAttrs(-1)))


def resnet() -> Graph:
    """Stem, an identity block and a block with a projection: 6 convolutions, each with its batch norm."""
    n = Net()
    x = n.max_pool(_cbr(n, n.input(symbol("n"), 3, 16, 16), 8, strides=2), pads=1)
    for channels in (8, 12):
        y = n.bn(n.conv(_cbr(n, x, channels), channels))
        shortcut = x if n.dims(x)[1] == channels else n.bn(n.conv(x, channels, 1, pads=0))
        x = n.op("Relu", n.op("Sum", y, shortcut))
    return _classifier(n, x)


def preactivation_resnet() -> Graph:
    """Two blocks [BN, ReLU, conv, BN, ReLU, conv] + x: of 4 batch norms, 2 fold back into a convolution."""
    n = Net()
    x = n.conv(n.input(2, 3, 8, 8), 6)
    for _ in range(2):
        y = n.conv(n.op("Relu", n.bn(x)), 6)
        y = n.conv(n.op("Relu", n.bn(y)), 6)
        x = n.op("Add", x, y)
    return _classifier(n, n.op("Relu", x))


def densenet() -> Graph:
    """Two layers of [BN, ReLU, conv 1x1, BN, ReLU, conv 3x3] and a transition: 5 batch norms, 2 of them fold."""
    n = Net()
    x = n.conv(n.input(2, 3, 8, 8), 6)
    for _ in range(2):
        y = n.conv(n.op("Relu", n.bn(x)), 8, 1, pads=0)
        y = n.conv(n.op("Relu", n.bn(y)), 4)
        x = n.op("Concat", x, y, attrs=ConcatAttrs(1))
    x = n.average_pool(n.conv(n.op("Relu", n.bn(x)), 6, 1, pads=0), 2)
    return _classifier(n, x)


def mobilenet_v3() -> Graph:
    """Inverted residuals with depthwise convolutions, hard swish written out, and squeeze-and-excitation."""
    n = Net()

    def hard_swish(x: Value) -> Value:
        gate = n.op("Clip", n.op("Add", x, 3.0), 0.0, 6.0)
        return n.op("Div", n.op("Mul", x, gate), 6.0)

    x = hard_swish(n.bn(n.conv(n.input(2, 3, 8, 8), 6)))
    y = hard_swish(n.bn(n.conv(x, 12, 1, pads=0)))
    y = hard_swish(n.bn(n.conv(y, 12, group=12)))
    s = n.op("ReduceMean", y, n.ints(2, 3), attrs=ReduceAttrs())
    s = n.op("Relu", n.conv(s, 4, 1, pads=0, bias=True))
    s = n.op("HardSigmoid", n.conv(s, 12, 1, pads=0, bias=True))
    y = n.bn(n.conv(n.op("Mul", s, y), 6, 1, pads=0))
    return _classifier(n, n.op("Add", x, y))


def inception() -> Graph:
    """Four branches of one input, batch norms followed by a scale and shift (Caffe), and a Pad before the pool."""
    n = Net()
    x = _cbr(n, n.input(2, 3, 9, 9), 6)

    def unit(v: Value, channels: int, kernel: int) -> Value:
        y = n.bn(n.conv(v, channels, kernel, pads=kernel // 2))
        return n.op("Relu", n.op("Add", n.op("Mul", y, n.random(channels, 1, 1)), n.random(channels, 1, 1)))

    pooled = n.op("Pad", x, n.ints(0, 0, 1, 1, 0, 0, 1, 1), attrs=PadAttrs())
    branches = (
        unit(x, 4, 1),
        unit(unit(x, 4, 1), 6, 3),
        unit(n.average_pool(pooled, 3, strides=1), 4, 1),
        n.max_pool(pooled, 3, strides=1),
    )
    return _classifier(n, n.op("Concat", *branches, attrs=ConcatAttrs(1)))


def tensorflow() -> Graph:
    """NHWC between the convolutions, a Transpose on each side of them, bias and ReLU6 on NHWC, a mean over axes 1 and 2."""
    n = Net()
    x = n.input(2, 8, 8, 3)
    for channels in (6, 6, 6):
        y = n.transposed(n.conv(n.transposed(x, 0, 3, 1, 2), channels), 0, 2, 3, 1)
        y = n.op("Min", n.op("Relu", n.op("Add", n.random(channels), y)), 6.0)
        x = n.op("Add", x, y) if n.dims(x)[3] == channels else y
    pooled = n.op("ReduceMean", x, n.ints(1, 2), attrs=ReduceAttrs(keepdims=False))
    return n.done(n.op("Add", n.matmul(pooled, 5), n.random(5)))


def unet() -> Graph:
    """One level down and up again, with a transposed convolution and its batch norm."""
    n = Net()
    x = _cbr(n, n.input(2, 3, 8, 8), 6)
    y = _cbr(n, n.max_pool(x, 2), 8)
    y = n.op("Relu", n.bn(n.conv_transpose(y, 6, 2)))
    y = _cbr(n, n.op("Concat", x, y, attrs=ConcatAttrs(1)), 6)
    return n.done(n.op("Sigmoid", n.conv(y, 1, 1, pads=0, bias=True)))


def transformer() -> Graph:
    """One encoder layer: written-out GELU, computed reshapes over a symbolic batch and length, scaled attention."""
    n = Net()
    width, heads = 12, 3
    x = n.input(symbol("n"), symbol("t"), width)

    def linear(v: Value, units: int) -> Value:
        return n.op("Add", n.random(units), n.matmul(v, units))

    def norm(v: Value) -> Value:
        attrs = OPDEFS["LayerNormalization"].attrs(axis=-1)
        return n.op("LayerNormalization", v, n.random(width), n.random(width), attrs=attrs)

    def split_heads(v: Value, *perm: int) -> Value:
        dims = n.op("Shape", v)
        lead = [n.op("Gather", dims, n.ints(i)) for i in (0, 1)]
        target = n.op("Concat", *lead, n.ints(heads, width // heads), attrs=ConcatAttrs(0))
        return n.transposed(n.op("Reshape", v, target), *perm)

    a = norm(x)
    q, k, v = n.op("Split", linear(a, 3 * width), attrs=SplitAttrs(2, 3), outputs=3)
    q, k, v = split_heads(q, 0, 2, 1, 3), split_heads(k, 0, 2, 3, 1), split_heads(v, 0, 2, 1, 3)
    scores = n.op("Div", n.op("MatMul", q, k), math.sqrt(width / heads))
    weights = n.op("Softmax", scores, attrs=SoftmaxAttrs(-1))
    y = n.transposed(n.op("MatMul", weights, v), 0, 2, 1, 3)
    y = n.op("Reshape", y, n.op("Shape", x))
    x = n.op("Add", x, linear(y, width))
    h = linear(norm(x), 4 * width)
    h = n.op("Mul", n.op("Mul", h, n.op("Add", n.op("Erf", n.op("Div", h, math.sqrt(2))), 1.0)), 0.5)
    return n.done(n.op("Add", x, linear(h, width)))


NETWORKS: dict[str, Callable[[], Graph]] = {
    f.__name__: f
    for f in (resnet, preactivation_resnet, densenet, mobilenet_v3, inception, tensorflow, unet, transformer)
}
SIZES = {"n": 2, "t": 5}
