"""A multilayer perceptron: Ciresan et al., "Deep, Big, Simple Neural Nets for Handwritten Digit Recognition", 2010, the largest
network (2500, 2000, 1500, 1000 and 500 units), with ReLU for its scaled tanh."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.models.zoo.common import Options
from optdnn.models.zoo.net import HE, Net

UNITS = (2500, 2000, 1500, 1000, 500)


@dataclass(frozen=True)
class MlpOptions(Options):
    features: int = 784
    num_classes: int = 10


def mlp(net: Net, o: MlpOptions) -> None:
    """6 Gemms, 5 ReLUs; 11.97 M parameters. Input ``x``, float32 (batch, features); output ``y``, (batch, num_classes)."""
    rng = np.random.default_rng([net.seed, 0x960B])
    x = net.input("x", (o.batch, o.features), probe=rng.standard_normal((256, o.features)) if net.seeded else None)
    units = UNITS[: o.repeats(len(UNITS))]
    for i, size in enumerate(units):
        x = net.relu(net.linear(x, o.scaled(size), gain=HE, name=str(2 * i)), name=str(2 * i + 1))
    net.output("y", net.linear(x, o.num_classes, spread=1.0, name=str(2 * len(units))))
