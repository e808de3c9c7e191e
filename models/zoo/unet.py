"""U-Net: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015, figure 1.

Padded convolutions with BatchNormalization, as nearly all later implementations have them, so that the map keeps the picture's
size and the skip connections need no cropping. Up-sampling is the paper's 2x2 transposed convolution.
"""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import ImageOptions, image
from optdnn.models.zoo.net import Net


def unet(net: Net, o: ImageOptions) -> None:
    """19 convolutions, 18 BatchNormalizations, 4 ConvTransposes, 4 Concats; 31.04 M parameters.

    Output ``y`` is float32 (batch, num_classes, image_size, image_size). ``depth`` scales the number of resolutions.
    """
    levels = o.repeats(4)
    x = image(net, o, multiple=2**levels, probe=(4, 64))
    x = _double_conv(net, x, o.scaled(64), "inc")
    skips = []
    for level in range(1, levels + 1):
        skips.append(x)
        with net.scope(f"down{level}"):
            x = net.max_pool(x, 2, stride=2, name="pool")
            x = _double_conv(net, x, 2 * x.channels, "conv")
    for level, skip in enumerate(reversed(skips), 1):
        with net.scope(f"up{level}"):
            x = net.conv_transpose(x, skip.channels, 2, stride=2, name="up")
            x = _double_conv(net, net.concat([skip, x]), skip.channels, "conv")
    net.output("y", net.conv(x, o.num_classes, 1, bias=True, spread=1.0, name="outc"))


def _double_conv(net: Net, x: Value, channels: int, name: str) -> Value:
    with net.scope(name):
        for index in (0, 3):
            x = net.unit(x, channels, 3, (index, index + 1, index + 2), net.relu)
        return x
