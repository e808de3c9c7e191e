"""MobileNetV2: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018, table 2; as torchvision has it."""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import ImageOptions, image, pooled_head
from optdnn.models.zoo.net import BRANCH, PLAIN, Net, make_divisible

STAGES = (  # expansion, channels, blocks, stride
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2(net: Net, o: ImageOptions) -> None:
    """52 convolutions (17 depthwise), 52 BatchNormalizations, ReLU6 as Clip; 3.50 M parameters."""
    x = image(net, o)
    with net.scope("features"):
        with net.scope(0):
            x = net.unit(x, o.divisible(32), 3, (0, 1, 2), net.relu6, stride=2)
        index = 1
        for expansion, channels, blocks, stride in STAGES:
            for i in range(o.repeats(blocks)):
                with net.scope(index):
                    x = _inverted_residual(net, x, o.divisible(channels), expansion, stride if i == 0 else 1)
                index += 1
        with net.scope(index):
            x = net.unit(x, make_divisible(1280 * max(1.0, o.width)), 1, (0, 1, 2), net.relu6)
    pooled_head(net, x, o.num_classes, "classifier", pool=None, index=1)


def _inverted_residual(net: Net, x: Value, channels: int, expansion: int, stride: int) -> Value:
    """Expand (1x1), filter each channel (3x3 depthwise), project (1x1, linear); a shortcut where the shape is kept."""
    hidden, y, index = x.channels * expansion, x, 0
    with net.scope("conv"):
        if expansion != 1:
            with net.scope(index):
                y = net.unit(y, hidden, 1, (0, 1, 2), net.relu6)
            index += 1
        with net.scope(index):
            y = net.unit(y, hidden, 3, (0, 1, 2), net.relu6, stride=stride, groups=hidden)
        residual = stride == 1 and x.channels == channels
        y = net.unit(y, channels, 1, (index + 1, index + 2, None), gain=1.0, scales=BRANCH if residual else PLAIN)
    return net.add(x, y) if residual else y
