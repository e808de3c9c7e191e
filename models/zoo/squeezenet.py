"""SqueezeNet 1.1: Iandola et al., "SqueezeNet", 2016, in the authors' lighter version 1.1; as torchvision has it (max
pools round up)."""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import ImageOptions, image
from optdnn.models.zoo.net import Net

STAGES = (  # after a max pool each: squeeze and expand channels of every fire module
    ((16, 64), (16, 64)),
    ((32, 128), (32, 128)),
    ((48, 192), (48, 192), (64, 256), (64, 256)),
)


def squeezenet1_1(net: Net, o: ImageOptions) -> None:
    """26 convolutions with biases, no BatchNormalization, 8 Concats; 1.24 M parameters."""
    x = image(net, o)
    with net.scope("features"):
        x = net.relu(net.conv(x, o.scaled(64), 3, stride=2, bias=True, name=0), name=1)
        index = 2
        for fires in STAGES:
            x = net.max_pool(x, 3, stride=2, ceil=True, name=index)
            index += 1
            for squeeze, expand in fires[: o.repeats(len(fires))]:
                with net.scope(index):
                    x = _fire(net, x, o.scaled(squeeze), o.scaled(expand))
                index += 1
    with net.scope("classifier"):
        x = net.relu(net.conv(x, o.num_classes, 1, bias=True, spread=4.0, name=1), name=2)
        x = net.global_avg_pool(x, name=3)
    net.output("y", net.flatten(x))


def _fire(net: Net, x: Value, squeeze: int, expand: int) -> Value:
    x = net.relu(net.conv(x, squeeze, 1, bias=True, name="squeeze"), name="squeeze_activation")
    a = net.relu(net.conv(x, expand, 1, bias=True, name="expand1x1"), name="expand1x1_activation")
    b = net.relu(net.conv(x, expand, 3, padding=1, bias=True, name="expand3x3"), name="expand3x3_activation")
    return net.concat([a, b])
