"""Inception-v3: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015; as torchvision has
it for inference.

No auxiliary classifier, no input transform. The modules are the paper's: A (figure 5), B (grid reduction), C (figure
6, with 1x7 and 7x1), D (grid reduction), E (figure 7).
"""

from __future__ import annotations

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import ImageOptions, image, pooled_head
from optdnn.models.zoo.net import Net, Pair


def inception_v3(net: Net, o: ImageOptions) -> None:
    """94 convolutions, 94 BatchNormalizations (epsilon 1e-3), 11 Concats; 23.83 M parameters. Images of at least 75 x
    75."""
    unit = _Unit(net, o)
    x = image(net, o)
    x = unit(x, "Conv2d_1a_3x3", 32, 3, stride=2)
    x = unit(x, "Conv2d_2a_3x3", 32, 3)
    x = unit(x, "Conv2d_2b_3x3", 64, 3, padding=1)
    x = net.max_pool(x, 3, stride=2, name="maxpool1")
    x = unit(x, "Conv2d_3b_1x1", 80, 1)
    x = unit(x, "Conv2d_4a_3x3", 192, 3)
    x = net.max_pool(x, 3, stride=2, name="maxpool2")
    for letter, pooled in list(zip("bcd", (32, 64, 64), strict=True))[: o.repeats(3)]:
        with net.scope(f"Mixed_5{letter}"):
            x = _module_a(unit, x, pooled)
    with net.scope("Mixed_6a"):
        x = _module_b(unit, x)
    for letter, channels in list(zip("bcde", (128, 160, 160, 192), strict=True))[: o.repeats(4)]:
        with net.scope(f"Mixed_6{letter}"):
            x = _module_c(unit, x, channels)
    with net.scope("Mixed_7a"):
        x = _module_d(unit, x)
    for letter in "bc"[: o.repeats(2)]:
        with net.scope(f"Mixed_7{letter}"):
            x = _module_e(unit, x)
    pooled_head(net, x, o.num_classes, "fc")


class _Unit:
    """Convolution, BatchNormalization, ReLU."""

    def __init__(self, net: Net, options: ImageOptions) -> None:
        self.net, self.options = net, options

    def __call__(
        self, x: Value, name: str, channels: int, kernel: Pair, *, stride: int = 1, padding: Pair = 0
    ) -> Value:
        net, names = self.net, ("conv", "bn", None)
        with net.scope(name):
            return net.unit(
                x, self.options.scaled(channels), kernel, names, net.relu, stride=stride, padding=padding, eps=1e-3
            )


def _pool_branch(unit: _Unit, x: Value, channels: int) -> Value:
    return unit(unit.net.avg_pool(x, 3, stride=1, padding=1, name=None), "branch_pool", channels, 1)


def _module_a(unit: _Unit, x: Value, pooled: int) -> Value:
    a = unit(x, "branch1x1", 64, 1)
    b = unit(unit(x, "branch5x5_1", 48, 1), "branch5x5_2", 64, 5, padding=2)
    c = unit(unit(x, "branch3x3dbl_1", 64, 1), "branch3x3dbl_2", 96, 3, padding=1)
    c = unit(c, "branch3x3dbl_3", 96, 3, padding=1)
    return unit.net.concat([a, b, c, _pool_branch(unit, x, pooled)])


def _module_b(unit: _Unit, x: Value) -> Value:
    a = unit(x, "branch3x3", 384, 3, stride=2)
    b = unit(unit(x, "branch3x3dbl_1", 64, 1), "branch3x3dbl_2", 96, 3, padding=1)
    b = unit(b, "branch3x3dbl_3", 96, 3, stride=2)
    return unit.net.concat([a, b, unit.net.max_pool(x, 3, stride=2, name=None)])


def _module_c(unit: _Unit, x: Value, channels: int) -> Value:
    row: tuple[tuple[int, int], tuple[int, int]] = ((1, 7), (0, 3))
    column: tuple[tuple[int, int], tuple[int, int]] = ((7, 1), (3, 0))
    a = unit(x, "branch1x1", 192, 1)
    b = unit(x, "branch7x7_1", channels, 1)
    for i, (out, (kernel, padding)) in enumerate([(channels, row), (192, column)], 2):
        b = unit(b, f"branch7x7_{i}", out, kernel, padding=padding)
    c = unit(x, "branch7x7dbl_1", channels, 1)
    for i, (out, (kernel, padding)) in enumerate(
        [(channels, column), (channels, row), (channels, column), (192, row)], 2
    ):
        c = unit(c, f"branch7x7dbl_{i}", out, kernel, padding=padding)
    return unit.net.concat([a, b, c, _pool_branch(unit, x, 192)])


def _module_d(unit: _Unit, x: Value) -> Value:
    a = unit(unit(x, "branch3x3_1", 192, 1), "branch3x3_2", 320, 3, stride=2)
    b = unit(unit(x, "branch7x7x3_1", 192, 1), "branch7x7x3_2", 192, (1, 7), padding=(0, 3))
    b = unit(unit(b, "branch7x7x3_3", 192, (7, 1), padding=(3, 0)), "branch7x7x3_4", 192, 3, stride=2)
    return unit.net.concat([a, b, unit.net.max_pool(x, 3, stride=2, name=None)])


def _module_e(unit: _Unit, x: Value) -> Value:
    def fork(y: Value, name: str) -> list[Value]:
        return [unit(y, f"{name}a", 384, (1, 3), padding=(0, 1)), unit(y, f"{name}b", 384, (3, 1), padding=(1, 0))]

    a = unit(x, "branch1x1", 320, 1)
    b = fork(unit(x, "branch3x3_1", 384, 1), "branch3x3_2")
    c = fork(unit(unit(x, "branch3x3dbl_1", 448, 1), "branch3x3dbl_2", 384, 3, padding=1), "branch3x3dbl_3")
    # The exporter joins the forks' own Concats with the module's.
    return unit.net.concat([a, *b, *c, _pool_branch(unit, x, 192)])
