"""MobileNetV2: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018, table 2; as torchvision has it."""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import Batch, image, pooled_head
from optdnn.models.zoo.net import BRANCH, PLAIN, Net, make_divisible, repeats

STAGES = (  # expansion, channels, blocks, stride
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2(
    net: Net,
    *,
    batch: Batch = 1,
    image_size: int = 224,
    num_classes: int = 1000,
    width: float = 1.0,
    depth: float = 1.0,
) -> None:
    """52 convolutions (17 depthwise), 52 BatchNormalizations, ReLU6 as Clip; 3.50 M parameters."""
    x = image(net, batch, image_size)
    with net.scope("features"):
        with net.scope(0):
            x = _conv_bn_relu6(net, x, make_divisible(32 * width), 3, stride=2)
        index = 1
        for expansion, channels, blocks, stride in STAGES:
            for i in range(repeats(blocks, depth)):
                with net.scope(index):
                    x = _inverted_residual(net, x, make_divisible(channels * width), expansion, stride if i == 0 else 1)
                index += 1
        with net.scope(index):
            x = _conv_bn_relu6(net, x, make_divisible(1280 * max(1.0, width)), 1)
    pooled_head(net, x, num_classes, "classifier", pool=None, index=1)


def _conv_bn_relu6(net: Net, x: Value, channels: int, kernel: int, *, stride: int = 1, groups: int = 1) -> Value:
    x = net.conv(x, channels, kernel, stride=stride, padding=kernel // 2, groups=groups, name=0)
    return net.relu6(net.batch_norm(x, name=1), name=2)


def _inverted_residual(net: Net, x: Value, channels: int, expansion: int, stride: int) -> Value:
    """Expand (1x1), filter each channel (3x3 depthwise), project (1x1, linear); a shortcut where the shape is kept."""
    hidden, y, index = x.channels * expansion, x, 0
    with net.scope("conv"):
        if expansion != 1:
            with net.scope(index):
                y = _conv_bn_relu6(net, y, hidden, 1)
            index += 1
        with net.scope(index):
            y = _conv_bn_relu6(net, y, hidden, 3, stride=stride, groups=hidden)
        y = net.conv(y, channels, 1, gain=1.0, name=index + 1)
        y = net.batch_norm(y, scales=BRANCH if x.shape == y.shape else PLAIN, name=index + 2)
    return net.add(x, y) if x.shape == y.shape else y
