"""EfficientNet-B0: Tan & Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019, table 1.

As torchvision has it: MBConv blocks with squeeze-and-excitation (a quarter of the block's *input* channels) and SiLU. ``width`` and
``depth`` are the paper's own compound coefficients.
"""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import Batch, image, pooled_head, squeeze_excite
from optdnn.models.zoo.net import BEFORE_SILU, BRANCH, PLAIN, Net, make_divisible, repeats

STAGES = (  # expansion, kernel, stride, channels, blocks
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def efficientnet_b0(
    net: Net,
    *,
    batch: Batch = 1,
    image_size: int = 224,
    num_classes: int = 1000,
    width: float = 1.0,
    depth: float = 1.0,
) -> None:
    """81 convolutions (16 depthwise, 32 in squeeze-and-excitation), 49 BatchNormalizations; 5.29 M parameters."""
    x = image(net, batch, image_size)
    with net.scope("features"):
        with net.scope(0):
            x = conv_bn(net, x, make_divisible(32 * width), 3, stride=2)
        for stage, (expansion, kernel, stride, channels, blocks) in enumerate(STAGES, 1):
            with net.scope(stage):
                for i in range(repeats(blocks, depth)):
                    with net.scope(i):
                        x = _mbconv(
                            net, x, make_divisible(channels * width), expansion, kernel, stride if i == 0 else 1
                        )
        with net.scope(len(STAGES) + 1):
            x = conv_bn(net, x, 4 * x.channels, 1)
    pooled_head(net, x, num_classes, "classifier", index=1)


def conv_bn(net: Net, x: Value, channels: int, kernel: int, *, stride: int = 1, groups: int = 1) -> Value:
    """Convolution, BatchNormalization and SiLU: children 0, 1 and 2."""
    x = net.conv(x, channels, kernel, stride=stride, padding=kernel // 2, groups=groups, name=0)
    return net.silu(net.batch_norm(x, scales=BEFORE_SILU, name=1), name=2)


def _mbconv(net: Net, x: Value, channels: int, expansion: int, kernel: int, stride: int) -> Value:
    hidden, y, index = make_divisible(x.channels * expansion), x, 0
    with net.scope("block"):
        if hidden != x.channels:
            with net.scope(index):
                y = conv_bn(net, y, hidden, 1)
            index += 1
        with net.scope(index):
            y = conv_bn(net, y, hidden, kernel, stride=stride, groups=hidden)
        y = squeeze_excite(net, y, max(1, x.channels // 4), index + 1)
        with net.scope(index + 2):
            y = net.conv(y, channels, 1, gain=1.0, name=0)
            y = net.batch_norm(y, scales=BRANCH if x.shape == y.shape else PLAIN, name=1)
    return net.add(y, x) if x.shape == y.shape else y
