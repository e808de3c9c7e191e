"""EfficientNet-B0: Tan & Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019, table 1.

As torchvision has it: MBConv blocks with squeeze-and-excitation (a quarter of the block's *input* channels) and SiLU. ``width`` and
``depth`` are the paper's own compound coefficients.
"""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import ImageOptions, image, pooled_head, squeeze_excite
from optdnn.models.zoo.net import BEFORE_SILU, BRANCH, PLAIN, Net, make_divisible

STAGES = (  # expansion, kernel, stride, channels, blocks
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def efficientnet_b0(net: Net, o: ImageOptions) -> None:
    """81 convolutions (16 depthwise, 32 in squeeze-and-excitation), 49 BatchNormalizations; 5.29 M parameters."""
    x = image(net, o)
    with net.scope("features"):
        with net.scope(0):
            x = _unit(net, x, o.divisible(32), 3, stride=2)
        for stage, (expansion, kernel, stride, channels, blocks) in enumerate(STAGES, 1):
            with net.scope(stage):
                for i in range(o.repeats(blocks)):
                    with net.scope(i):
                        x = _mbconv(net, x, o.divisible(channels), expansion, kernel, stride if i == 0 else 1)
        with net.scope(len(STAGES) + 1):
            x = _unit(net, x, 4 * x.channels, 1)
    pooled_head(net, x, o.num_classes, "classifier", index=1)


def _unit(net: Net, x: Value, channels: int, kernel: int, **more: int) -> Value:
    return net.unit(x, channels, kernel, (0, 1, 2), net.silu, scales=BEFORE_SILU, **more)


def _mbconv(net: Net, x: Value, channels: int, expansion: int, kernel: int, stride: int) -> Value:
    hidden, y, index = make_divisible(x.channels * expansion), x, 0
    with net.scope("block"):
        if hidden != x.channels:
            with net.scope(index):
                y = _unit(net, y, hidden, 1)
            index += 1
        with net.scope(index):
            y = _unit(net, y, hidden, kernel, stride=stride, groups=hidden)
        y = squeeze_excite(net, y, max(1, x.channels // 4), index + 1)
        with net.scope(index + 2):
            residual = stride == 1 and x.channels == channels
            y = net.unit(y, channels, 1, (0, 1, None), gain=1.0, scales=BRANCH if residual else PLAIN)
    return net.add(y, x) if residual else y
