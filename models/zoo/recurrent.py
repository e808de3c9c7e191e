"""Recurrent layers (ONNX LSTM-14, GRU-14) as ``torch.onnx.export`` writes nn.LSTM and nn.GRU, and the 2-layer LSTM of
the zoo.

Parameters are drawn, and given by a state, in torch's order of gates (LSTM: input, forget, cell, output; GRU: reset,
update, new) and stored in ONNX's (iofc; zrh).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from optdnn.models.zoo.builder import Dims, Label, Value
from optdnn.models.zoo.common import Batch, Options
from optdnn.models.zoo.net import Net, uniform
from optdnn.types import Array

GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}
"""For each operator, the place in torch's order of every gate in ONNX's order."""


@dataclass(frozen=True)
class LstmOptions(Options):
    sequence_length: Batch = 128
    input_size: int = 512


def lstm(net: Net, o: LstmOptions) -> None:
    """Two LSTM layers of 512 units (Hochreiter & Schmidhuber, 1997; Gers et al., 2000): 4.20 M parameters.

    Input ``x``, float32 (sequence_length, batch, input_size). Outputs ``y``, (sequence_length, batch, 512), and the
    last states ``h_n`` and ``c_n``, (layers, batch, 512).
    """
    x = net.input("x", (o.sequence_length, o.batch, o.input_size))
    y, states = recurrent(net, x, "LSTM", o.scaled(512), layers=o.repeats(2), name=None)
    net.output("y", y)
    net.output("h_n", states[0])
    net.output("c_n", states[1])


def recurrent(
    net: Net, x: Value, cell: Literal["LSTM", "GRU"], hidden: int, *, layers: int = 1, name: Label | None
) -> tuple[Value, list[Value]]:
    """``layers`` unidirectional layers on ``x`` (sequence, batch, input), initial states zero.

    Returns the last layer's outputs (sequence, batch, hidden) and the last states (layers, batch, hidden): h, for
    LSTM also c.
    """
    length, batch = x.shape[:2]
    state = (1, batch, hidden)
    kinds = 2 if cell == "LSTM" else 1
    finals: list[list[Value]] = [[] for _ in range(kinds)]
    attrs: dict[str, Any] = {"hidden_size": hidden} | ({"linear_before_reset": 1} if cell == "GRU" else {})
    with net.scope(name):
        for layer in range(layers):
            w = _draw(net, cell, f"weight_ih_l{layer}", hidden, x.extent(2))
            r = _draw(net, cell, f"weight_hh_l{layer}", hidden, hidden)
            (key, bias), (_, more) = (_draw(net, cell, f"bias_{part}_l{layer}", hidden) for part in ("ih", "hh"))
            b = (key.replace("bias_ih", "bias"), np.concatenate([bias, more]))
            weights = [net.weight(f"{key}.{cell}", array[None]) for key, array in (w, r, b)]
            initial = [_zeros(net, x, state) for _ in range(kinds)]
            shapes = [(length, 1, batch, hidden), *[state] * kinds]
            y, *last = net.nodes(cell, [x, *weights, "", *initial], *shapes, **attrs)
            x = net.node("Squeeze", [y, net.const([1])], (length, batch, hidden))
            for kept, value in zip(finals, last, strict=True):
                kept.append(value)
        return x, [net.concat(kept, axis=0) if layers > 1 else kept[0] for kept in finals]


def _draw(net: Net, cell: str, leaf: str, hidden: int, *columns: int) -> tuple[str, Array]:
    """One parameter (gates * hidden, …), uniform within 1 / sqrt(hidden) as torch draws it, its gates in ONNX's
    order."""
    gates, bound = GATES[cell], 1.0 / math.sqrt(hidden)
    key, array = net.draw(leaf, (len(gates) * hidden, *columns), uniform(-bound, bound))
    return key, np.concatenate([array[g * hidden : (g + 1) * hidden] for g in gates])


def _zeros(net: Net, x: Value, shape: Dims) -> Value:
    """An initial state: a constant, or, with a symbolic batch, a constant expanded to the run-time shape."""
    fixed = tuple(1 if isinstance(d, str) else d for d in shape)
    zeros = net.const(np.zeros(fixed), np.float32)
    return zeros if fixed == shape else net.node("Expand", [zeros, net.dims(x, shape)], shape)
