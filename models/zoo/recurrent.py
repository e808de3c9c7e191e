"""The 2-layer LSTM of the zoo, as ``torch.onnx.export`` writes nn.LSTM (ONNX LSTM-14).

Parameters are drawn, and given by a state, in torch's order of gates (input, forget, cell, output) and stored in ONNX's (iofc).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optdnn.models.zoo.builder import Dims, Value
from optdnn.models.zoo.common import Batch, Options
from optdnn.models.zoo.net import Net, uniform
from optdnn.types import Array

GATES = (0, 3, 1, 2)
"""The place in torch's order of every gate in ONNX's order."""


@dataclass(frozen=True)
class LstmOptions(Options):
    sequence_length: Batch = 128
    input_size: int = 512


def lstm(net: Net, o: LstmOptions) -> None:
    """Two LSTM layers of 512 units (Hochreiter & Schmidhuber, 1997; Gers et al., 2000): 4.20 M parameters.

    Input ``x``, float32 (sequence_length, batch, input_size). Outputs ``y``, (sequence_length, batch, 512), and the
    last states ``h_n`` and ``c_n``, (layers, batch, 512). Initial states are zero.
    """
    x = net.input("x", (o.sequence_length, o.batch, o.input_size))
    hidden, layers = o.scaled(512), o.repeats(2)
    length, batch = x.shape[:2]
    state = (1, batch, hidden)
    finals: list[list[Value]] = [[], []]
    for layer in range(layers):
        w = _draw(net, f"weight_ih_l{layer}", hidden, x.extent(2))
        r = _draw(net, f"weight_hh_l{layer}", hidden, hidden)
        (key, bias), (_, more) = (_draw(net, f"bias_{part}_l{layer}", hidden) for part in ("ih", "hh"))
        b = (key.replace("bias_ih", "bias"), np.concatenate([bias, more]))
        weights = [net.weight(f"{key}.LSTM", array[None]) for key, array in (w, r, b)]
        initial = [_zeros(net, x, state) for _ in finals]
        shapes = [(length, 1, batch, hidden), state, state]
        y, *last = net.nodes("LSTM", [x, *weights, "", *initial], *shapes, hidden_size=hidden)
        x = net.node("Squeeze", [y, net.const([1])], (length, batch, hidden))
        for kept, value in zip(finals, last, strict=True):
            kept.append(value)
    states = [net.concat(kept, axis=0) if layers > 1 else kept[0] for kept in finals]
    for name, value in zip(("y", "h_n", "c_n"), (x, *states), strict=True):
        net.output(name, value)


def _draw(net: Net, leaf: str, hidden: int, *columns: int) -> tuple[str, Array]:
    """One parameter (gates * hidden, …), uniform within 1 / sqrt(hidden) as torch draws it, its gates in ONNX's
    order."""
    bound = 1.0 / math.sqrt(hidden)
    key, array = net.draw(leaf, (len(GATES) * hidden, *columns), uniform(-bound, bound))
    return key, np.concatenate([array[g * hidden : (g + 1) * hidden] for g in GATES])


def _zeros(net: Net, x: Value, shape: Dims) -> Value:
    """An initial state: a constant, or, with a symbolic batch, a constant expanded to the run-time shape."""
    fixed = tuple(1 if isinstance(d, str) else d for d in shape)
    zeros = net.const(np.zeros(fixed), np.float32)
    return zeros if fixed == shape else net.node("Expand", [zeros, net.dims(x, shape)], shape)
