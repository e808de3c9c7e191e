"""ResNet-18 and ResNet-50: He et al., "Deep Residual Learning for Image Recognition", 2015, table 1.

As torchvision has them: post-activation blocks, the stride of a bottleneck on its 3x3 convolution ("v1.5"), projection
shortcuts where the shape changes.
"""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import ImageOptions, image, pooled_head
from optdnn.models.zoo.net import BRANCH, PLAIN, Net


def resnet18(net: Net, o: ImageOptions) -> None:
    """20 convolutions, 20 BatchNormalizations; 11.69 M parameters."""
    _resnet(net, o, (2, 2, 2, 2), 1)


def resnet50(net: Net, o: ImageOptions) -> None:
    """53 convolutions, 53 BatchNormalizations; 25.56 M parameters."""
    _resnet(net, o, (3, 4, 6, 3), 4)


def _resnet(net: Net, o: ImageOptions, blocks: tuple[int, ...], expansion: int) -> None:
    x = net.unit(image(net, o), o.scaled(64), 7, ("conv1", "bn1", "relu"), net.relu, stride=2)
    x = net.max_pool(x, 3, stride=2, padding=1, name="maxpool")
    for stage, count in enumerate(blocks):
        with net.scope(f"layer{stage + 1}"):
            for i in range(o.repeats(count)):
                stride = 2 if stage > 0 and i == 0 else 1
                with net.scope(i):
                    x = _block(net, x, o.scaled(64 << stage), expansion, stride)
    pooled_head(net, x, o.num_classes, "fc")


def _block(net: Net, x: Value, channels: int, expansion: int, stride: int) -> Value:
    """Two 3x3 convolutions (``expansion`` 1), or 1x1, 3x3, 1x1 with ``expansion`` times the channels at the end."""
    if expansion == 1:
        plan = [(channels, 3, stride), (channels, 3, 1)]
    else:
        plan = [(channels, 1, 1), (channels, 3, stride), (channels * expansion, 1, 1)]
    y = x
    for i, (out, kernel, step) in enumerate(plan, 1):
        last = i == len(plan)
        y = net.unit(
            y, out, kernel, (f"conv{i}", f"bn{i}", "relu"), None if last else net.relu, stride=step,
            scales=BRANCH if last and stride == 1 and x.channels == out else PLAIN,
        )  # fmt: skip
    if x.shape != y.shape:
        with net.scope("downsample"):
            x = net.unit(x, y.channels, 1, (0, 1, None), stride=stride)
    return net.relu(net.add(y, x), name="relu")
