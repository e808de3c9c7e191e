"""DenseNet-121: Huang et al., "Densely Connected Convolutional Networks", 2016, table 1 (growth rate 32); as torchvision has it.

BatchNormalization and ReLU stand *before* each convolution, so only the second BatchNormalization of a layer follows one that
it can be folded into.
"""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import Batch, image, pooled_head
from optdnn.models.zoo.net import Net, repeats, scaled

BLOCKS = (6, 12, 24, 16)


def densenet121(
    net: Net,
    *,
    batch: Batch = 1,
    image_size: int = 224,
    num_classes: int = 1000,
    width: float = 1.0,
    depth: float = 1.0,
) -> None:
    """120 convolutions, 121 BatchNormalizations, 62 Concats; 7.98 M parameters. ``width`` scales the growth rate."""
    growth = scaled(32, width)
    x = image(net, batch, image_size)
    with net.scope("features"):
        x = net.conv(x, 2 * growth, 7, stride=2, padding=3, name="conv0")
        x = net.relu(net.batch_norm(x, name="norm0"), name="relu0")
        x = net.max_pool(x, 3, stride=2, padding=1, name="pool0")
        for i, layers in enumerate(BLOCKS, 1):
            with net.scope(f"denseblock{i}"):
                x = _dense_block(net, x, repeats(layers, depth), growth)
            if i < len(BLOCKS):
                with net.scope(f"transition{i}"):
                    y = net.relu(net.batch_norm(x, name="norm"), name="relu")
                    y = net.conv(y, x.channels // 2, 1, name="conv")
                    x = net.avg_pool(y, 2, stride=2, name="pool")
        x = net.batch_norm(x, name="norm5")
    pooled_head(net, net.relu(x, name=None), num_classes, "classifier", pool=None)


def _dense_block(net: Net, x: Value, layers: int, growth: int) -> Value:
    """Each layer reads all that came before it and adds ``growth`` channels."""
    features = [x]
    for i in range(1, layers + 1):
        with net.scope(f"denselayer{i}"):
            y = net.relu(net.batch_norm(net.concat(features), name="norm1"), name="relu1")
            y = net.conv(y, 4 * growth, 1, name="conv1")
            y = net.relu(net.batch_norm(y, name="norm2"), name="relu2")
            features.append(net.conv(y, growth, 3, padding=1, name="conv2"))
    return net.concat(features)
