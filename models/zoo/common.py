"""Parts that several networks share: options, image input, classifier after global average pooling, squeeze-and-excitation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from optdnn.errors import UsageError
from optdnn.models.zoo.builder import Label, Value
from optdnn.models.zoo.inputs import pictures
from optdnn.models.zoo.net import Net, make_divisible, repeats, scaled

Batch: TypeAlias = "int | str"
"""A fixed batch size, or the name of a symbolic one ("N")."""


@dataclass(frozen=True)
class Options:
    """The options of every network: ``width`` scales its channels, ``depth`` the blocks of its stages."""

    batch: Batch = 1
    width: float = 1.0
    depth: float = 1.0

    def scaled(self, channels: int) -> int:
        return scaled(channels, self.width)

    def divisible(self, channels: int) -> int:
        """As :meth:`scaled`, but a multiple of 8 at ``width`` 1 as well."""
        return make_divisible(channels * self.width)

    def repeats(self, blocks: int) -> int:
        return repeats(blocks, self.depth)


@dataclass(frozen=True)
class ImageOptions(Options):
    """The options of a network that classifies pictures of ``image_size`` x ``image_size`` pixels."""

    image_size: int = 224
    num_classes: int = 1000


def image(net: Net, options: ImageOptions, *, multiple: int = 1, probe: tuple[int, int] = (16, 96)) -> Value:
    """The input ``x``, float32 (batch, 3, size, size); UsageError unless the size is a multiple of ``multiple``.

    ``probe`` is how many pictures the network is tried on while it is built, and the most pixels on their side.
    """
    size = options.image_size
    if size < 1 or size % multiple:
        raise UsageError(f"{net.name} takes image sizes that are multiples of {multiple}, not {size}")
    count, side = probe[0], min(size, probe[1])
    seen = pictures(np.random.default_rng([net.seed, 0x960B]), (count, 3, side, side)) if net.seeded else None
    return net.input("x", (options.batch, 3, size, size), probe=seen)


def pooled_head(
    net: Net, x: Value, classes: int, name: str, *, pool: Label | None = "avgpool", index: int | None = None
) -> None:
    """Global average pooling, Flatten, and a linear classifier: the output ``y``, float32 (batch, classes).

    ``index`` is the classifier's place in the Sequential ``name`` where it is one.
    """
    x = net.flatten(net.global_avg_pool(x, name=pool))
    with net.scope(None if index is None else name):
        net.output("y", net.linear(x, classes, spread=1.0, name=name if index is None else index))


def squeeze_excite(net: Net, x: Value, squeezed: int, name: Label) -> Value:
    """Hu et al., "Squeeze-and-Excitation Networks", 2017, as 1x1 convolutions with SiLU between (EfficientNet's form)."""
    with net.scope(name):
        gate = net.global_avg_pool(x, name="avgpool")
        gate = net.silu(net.conv(gate, squeezed, 1, bias=True, spread=1.0, name="fc1"), name="activation")
        gate = net.sigmoid(net.conv(gate, x.channels, 1, bias=True, spread=0.5, name="fc2"), name="scale_activation")
        return net.scale(gate, x)
