"""DenseNet-121: Huang et al., "Densely Connected Convolutional Networks", 2016, table 1 (growth rate 32); as torchvision has it.

BatchNormalization and ReLU come *before* each convolution, so only the second BatchNormalization of a layer follows one that
it can be folded into.
"""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import ImageOptions, image, pooled_head
from optdnn.models.zoo.net import Net

BLOCKS = (6, 12, 24, 16)


def densenet121(net: Net, o: ImageOptions) -> None:
    """120 convolutions, 121 BatchNormalizations, 62 Concats; 7.98 M parameters. ``width`` scales the growth rate."""
    growth = o.scaled(32)
    x = image(net, o)
    with net.scope("features"):
        x = net.unit(x, 2 * growth, 7, ("conv0", "norm0", "relu0"), net.relu, stride=2)
        x = net.max_pool(x, 3, stride=2, padding=1, name="pool0")
        for i, layers in enumerate(BLOCKS, 1):
            with net.scope(f"denseblock{i}"):
                x = _dense_block(net, x, o.repeats(layers), growth)
            if i < len(BLOCKS):
                with net.scope(f"transition{i}"):
                    y = net.relu(net.batch_norm(x, name="norm"), name="relu")
                    y = net.conv(y, x.channels // 2, 1, name="conv")
                    x = net.avg_pool(y, 2, stride=2, name="pool")
        x = net.batch_norm(x, name="norm5")
    pooled_head(net, net.relu(x, name=None), o.num_classes, "classifier", pool=None)


def _dense_block(net: Net, x: Value, layers: int, growth: int) -> Value:
    """Layers that each read the results of all earlier ones, and add ``growth`` channels."""
    features = [x]
    for i in range(1, layers + 1):
        with net.scope(f"denselayer{i}"):
            y = net.relu(net.batch_norm(net.concat(features), name="norm1"), name="relu1")
            y = net.unit(y, 4 * growth, 1, ("conv1", "norm2", "relu2"), net.relu)
            features.append(net.conv(y, growth, 3, padding=1, name="conv2"))
    return net.concat(features)
