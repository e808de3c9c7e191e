"""Recurrent networks: RNN, GRU and LSTM with their options, and cells that are written out step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from random_nets.blocks import activation, arithmetic, breadth, cut, linear, reduce, reshape, row_norm, softmax, split
from random_nets.draw import I32, Draw, Value

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def cell(d: Draw, x: Value, kind: str | None = None) -> list[Value]:
    """One recurrent layer over [length, batch, size]: its Y as [length, batch, directions * hidden], followed by final states."""
    r = d.random
    kind = kind or r.choice(["RNN", "GRU", "GRU", "LSTM", "LSTM", "LSTM"])
    length, batch, width = x.dims
    assert isinstance(width, int)
    hidden, gates = breadth(d, [1, 2, 3, 5, 8, 8, 12, 16, 17, 24]), GATES[kind]
    direction = r.choice(["forward", "forward", "reverse", "bidirectional", "bidirectional"])
    n = 2 if direction == "bidirectional" else 1
    w = d.weights(n, gates * hidden, width, fan_in=width)
    h = d.weights(n, gates * hidden, hidden, fan_in=hidden)
    bias = d.weights(n, 2 * gates * hidden, fan_in=6) if r.chance(0.7) else None
    lengths = _lengths(d, length, batch) if r.chance(0.3) else None
    states = [_state(d, n, batch, hidden) if r.chance(0.4) else None for _ in range(2 if kind == "LSTM" else 1)]
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    inputs = [x, w, h, bias, lengths, *states]
    if kind == "LSTM" and r.chance(0.2):
        inputs.append(d.weights(n, 3 * hidden, fan_in=3))
    if kind == "GRU":
        attrs["linear_before_reset"] = r.below(2)
    if kind == "RNN" and r.chance(0.4):
        attrs["activations"] = [r.choice(["Relu", "Tanh", "Sigmoid"]) for _ in range(n)]
    if r.chance(0.1):
        attrs["clip"] = 0.8
    while inputs[-1] is None:
        inputs.pop()
    y, *finals = d.ops(kind, *inputs, outputs=3 if kind == "LSTM" else 2, **attrs)
    if n == 1 and r.chance(0.5):
        y = d.op("Squeeze", y, d.ints(1))
    else:
        y = d.op("Transpose", y, perm=[0, 2, 1, 3])
        y = reshape(d, d.known_as(y, (length, batch, n, hidden)), (length, batch, n * hidden))
    return [d.known_as(y, (length, batch, n * hidden)), *finals]


def _lengths(d: Draw, length: int | str, batch: int | str) -> Value:
    """The length of each sequence of the batch: at least one step (ONNX does not define the final state of none)."""
    if isinstance(length, str):
        return d.input((batch,), I32, 1, 1, upto=length)
    if isinstance(batch, int) and d.random.chance(0.4):
        return d.const(d.random.array(np.int32, (batch,), 1, length))
    return d.input((batch,), I32, 1, length)


def _state(d: Draw, n: int, batch: int | str, hidden: int) -> Value:
    if isinstance(batch, int) and d.random.chance(0.5):
        return d.weights(n, batch, hidden, fan_in=3)
    return d.input((n, batch, hidden), low=-0.8, high=0.8)


def _unrolled(d: Draw, x: Value) -> Value | None:
    """An LSTM cell written out for the first steps, as by tracing."""
    length, batch, width = x.dims
    if not isinstance(length, int) or not isinstance(batch, int) or not isinstance(width, int):
        return None
    hidden = d.random.choice([2, 3, 4, 8])
    wx, wh = d.weights(width, 4 * hidden, fan_in=width), d.weights(hidden, 4 * hidden, fan_in=hidden)
    bias = d.weights(4 * hidden, fan_in=6)
    h = c = d.const(np.zeros((batch, hidden)), np.float32)
    states = []
    for t in range(min(length, d.random.between(1, 4))):
        xt = d.op("Gather", x, d.scalar(t, np.int64), axis=0)
        sums = d.op("Add", d.op("Add", d.op("MatMul", xt, wx), d.op("MatMul", h, wh)), bias)
        i, f, g, o = split(d, sums, 1, [hidden] * 4)
        i, f, o = (d.op("Sigmoid", gate) for gate in (i, f, o))
        c = d.op("Add", d.op("Mul", f, c), d.op("Mul", i, d.op("Tanh", g)))
        h = d.op("Mul", o, d.op("Tanh", c))
        states.append(d.op("Unsqueeze", h, d.ints(0)))
    return d.op("Concat", *states, axis=0)


def _turned(d: Draw, x: Value) -> Value:
    """From batch first to length first, in one of the forms of exporters."""
    return d.op("Transpose", x, perm=[1, 0, 2])


def draw(d: Draw, batch: int | str | None = None, length: int | str | None = None) -> None:
    """One to three recurrent layers with products and activations between them."""
    r = d.random
    batch = batch or r.choice([1, 1, 2, 3, 5])
    length = length or r.choice([1, 2, 3, 5, 7, 10, 16])
    width = r.choice([1, 2, 3, 5, 8, 12, 16, 17])
    x = _turned(d, d.input((batch, length, width))) if r.chance(0.5) else d.input((length, batch, width))
    d.keep(x)
    for _ in range(r.between(1, 3)):
        if r.chance(0.12):
            d.keep(_unrolled(d, x))
            continue
        y, *finals = cell(d, x)
        d.keep(*finals)
        if r.chance(0.4):
            y = d.op("Add", y, linear(d, x, int(y.dims[2]))) if r.chance(0.5) else activation(d, y)
        if r.chance(0.3):
            y = row_norm(d, y) if r.chance(0.5) else arithmetic(d, y)
        d.keep(y)
        x = d.known_as(y, (length, batch, y.dims[2]))
    form = r.below(5)
    if form == 0 and isinstance(length, int):
        d.keep(linear(d, d.op("Squeeze", cut(d, x, 0, -1, 2**31 - 1), d.ints(0)), 5))
    elif form == 1:
        d.keep(softmax(d, linear(d, x, r.choice([3, 7]))))
    elif form == 2:
        d.keep(reduce(d, "ReduceMax", x, [0], r.chance(0.5)))
    elif form == 3:
        d.keep(_turned(d, x))
