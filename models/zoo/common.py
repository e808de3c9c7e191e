"""What several networks share: the image input, the classifier after global average pooling, squeeze-and-excitation."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from optdnn.errors import UsageError
from optdnn.models.zoo.builder import Label, Value
from optdnn.models.zoo.inputs import pictures
from optdnn.models.zoo.net import Net

Batch: TypeAlias = "int | str"
"""A fixed batch size, or the name of a symbolic one ("N")."""


def image(net: Net, batch: Batch, size: int, *, multiple: int = 1, probe: tuple[int, int] = (16, 96)) -> Value:
    """The input ``x``, float32 (batch, 3, size, size); UsageError unless ``size`` is a multiple of ``multiple``.

    ``probe`` is how many pictures the network is tried on while it is built, and the most pixels on their side.
    """
    if size < 1 or size % multiple:
        raise UsageError(f"{net.name} takes image sizes that are multiples of {multiple}, not {size}")
    count, side = probe[0], min(size, probe[1])
    seen = pictures(np.random.default_rng([net.seed, 0x960B]), (count, 3, side, side)) if net.seeded else None
    return net.input("x", (batch, 3, size, size), probe=seen)


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
