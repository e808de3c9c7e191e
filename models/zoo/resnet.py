"""ResNet-18 and ResNet-50: He et al., "Deep Residual Learning for Image Recognition", 2015, table 1.

As torchvision has them: post-activation blocks, the stride of a bottleneck on its 3x3 convolution ("v1.5"), projection
shortcuts where the shape changes.
"""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import Batch, image, pooled_head
from optdnn.models.zoo.net import BRANCH, PLAIN, Net, repeats, scaled


def resnet18(
    net: Net,
    *,
    batch: Batch = 1,
    image_size: int = 224,
    num_classes: int = 1000,
    width: float = 1.0,
    depth: float = 1.0,
) -> None:
    """20 convolutions, 20 BatchNormalizations; 11.69 M parameters."""
    _resnet(net, (2, 2, 2, 2), 1, batch, image_size, num_classes, width, depth)


def resnet50(
    net: Net,
    *,
    batch: Batch = 1,
    image_size: int = 224,
    num_classes: int = 1000,
    width: float = 1.0,
    depth: float = 1.0,
) -> None:
    """53 convolutions, 53 BatchNormalizations; 25.56 M parameters."""
    _resnet(net, (3, 4, 6, 3), 4, batch, image_size, num_classes, width, depth)


def _resnet(
    net: Net,
    blocks: tuple[int, ...],
    expansion: int,
    batch: Batch,
    image_size: int,
    classes: int,
    width: float,
    depth: float,
) -> None:
    x = image(net, batch, image_size)
    x = net.conv(x, scaled(64, width), 7, stride=2, padding=3, name="conv1")
    x = net.relu(net.batch_norm(x, name="bn1"), name="relu")
    x = net.max_pool(x, 3, stride=2, padding=1, name="maxpool")
    for stage, count in enumerate(blocks):
        with net.scope(f"layer{stage + 1}"):
            for i in range(repeats(count, depth)):
                stride = 2 if stage > 0 and i == 0 else 1
                with net.scope(i):
                    x = _block(net, x, scaled(64 << stage, width), expansion, stride)
    pooled_head(net, x, classes, "fc")


def _block(net: Net, x: Value, channels: int, expansion: int, stride: int) -> Value:
    """Two 3x3 convolutions (``expansion`` 1), or 1x1, 3x3, 1x1 with ``expansion`` times the channels at the end."""
    if expansion == 1:
        plan = [(channels, 3, stride), (channels, 3, 1)]
    else:
        plan = [(channels, 1, 1), (channels, 3, stride), (channels * expansion, 1, 1)]
    y = x
    for i, (out, kernel, step) in enumerate(plan, 1):
        y = net.conv(y, out, kernel, stride=step, padding=kernel // 2, name=f"conv{i}")
        y = net.batch_norm(y, scales=BRANCH if i == len(plan) and x.shape == y.shape else PLAIN, name=f"bn{i}")
        if i < len(plan):
            y = net.relu(y, name="relu")
    if x.shape != y.shape:
        with net.scope("downsample"):
            x = net.batch_norm(net.conv(x, y.channels, 1, stride=stride, name=0), name=1)
    return net.relu(net.add(y, x), name="relu")
