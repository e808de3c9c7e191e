"""VGG-16: Simonyan & Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2014, column D.

As torchvision has it, with and without BatchNormalization. The classifier reads a 7x7 map, which a 1x1 AveragePool (what
adaptive pooling exports to) leaves as it is; at another image size it reads the map as large as it comes.
"""

from __future__ import annotations

from optdnn.models.zoo.common import ImageOptions, image
from optdnn.models.zoo.net import HE, Net

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions before the pool


def vgg16(net: Net, o: ImageOptions) -> None:
    """13 convolutions with biases, 3 Gemms; 138.36 M parameters."""
    _vgg(net, o, False)


def vgg16_bn(net: Net, o: ImageOptions) -> None:
    """13 convolutions with biases, each followed by BatchNormalization, 3 Gemms; 138.37 M parameters."""
    _vgg(net, o, True)


def _vgg(net: Net, o: ImageOptions, bn: bool) -> None:
    x, index = image(net, o, multiple=32, probe=(6, 96)), 0
    with net.scope("features"):
        for channels, convs in STAGES:
            for _ in range(o.repeats(convs)):
                x = net.conv(x, o.scaled(channels), 3, padding=1, bias=True, name=index)
                if bn:
                    x = net.batch_norm(x, name=index + 1)
                x = net.relu(x, name=index + 1 + bn)
                index += 2 + bn
            x = net.max_pool(x, 2, stride=2, name=index)
            index += 1
    x = net.flatten(net.avg_pool(x, 1, stride=1, name="avgpool"))
    with net.scope("classifier"):
        for index in (0, 3):
            x = net.relu(net.linear(x, o.scaled(4096), gain=HE, name=index), name=index + 1)
        net.output("y", net.linear(x, o.num_classes, spread=1.0, name=6))
