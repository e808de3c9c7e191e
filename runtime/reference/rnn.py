"""NumPy kernels. Recurrent layers: LSTM, GRU, RNN.

x (T, N, I); w (D, G*H, I), r (D, G*H, H), b (D, 2*G*H) with D directions and G gates; sequence_lens (N); initial states
(D, N, H). Results: y (T, D, N, H) and the last states (D, N, H). The input projection of all steps is one matrix product;
without w, x is that product (T, N, G*H) already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array

Activation: TypeAlias = Callable[[Array], Array]
_FUNCTIONS: dict[str, Callable[[Array, float, float], Array]] = {
    "Affine": lambda x, a, b: a * x + b,
    "Elu": lambda x, a, b: np.where(x >= 0, x, a * np.expm1(x)),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "LeakyRelu": lambda x, a, b: np.where(x >= 0, x, a * x),
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "Sigmoid": lambda x, a, b: _sigmoid(x),
    "Softplus": lambda x, a, b: np.logaddexp(x, x.dtype.type(0)),
    "Softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "Tanh": lambda x, a, b: np.tanh(x),
    "ThresholdedRelu": lambda x, a, b: np.where(x > a, x, x.dtype.type(0)),
}


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, e) / (1 + e))


def _activations(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], clip: float | None
) -> list[Activation]:
    """The functions of one direction. ``clip`` bounds what enters those of the gates (f and g).

    As in ONNX Runtime and OpenVINO, the third function of an LSTM sees the cell state unbounded.
    """

    def bind(i: int, name: str, alpha: float, beta: float) -> Activation:
        fn = _FUNCTIONS[name]
        if clip is None or i == 2:
            return lambda x: fn(x, alpha, beta)
        return lambda x: fn(np.clip(x, -clip, clip), alpha, beta)

    return [bind(i, *given) for i, given in enumerate(zip(names, alphas, betas, strict=True))]


def _reverse(x: Array, lens: Array | None) -> Array:
    """Each sequence (axis 0 is time, axis 1 the batch) backwards; what follows its end stays where it is."""
    if lens is None:
        return x[::-1]
    t = np.arange(len(x))[:, None]
    at = np.where(t < lens, lens - 1 - t, t)
    return np.asarray(x[at, np.arange(x.shape[1])])


class _Cell:
    """One direction of a layer. ``state`` is a list of (N, H) arrays of which the first is the output."""

    def __init__(self, w: Array | None, r: Array, b: Array | None, gates: int):
        self.hidden = r.shape[-1]
        self.r = r.T
        self.w = None if w is None else w.T
        size = gates * self.hidden
        self.wb = np.zeros(size, r.dtype) if b is None else b[:size]
        self.rb = np.zeros(size, r.dtype) if b is None else b[size:]

    def project(self, x: Array) -> Array:
        if self.w is None:  # the products are made already
            return x + self.wb
        steps, batch, width = x.shape
        rows: Array = x.reshape(steps * batch, width) @ self.w + self.wb
        return rows.reshape(steps, batch, rows.shape[1])

    def step(self, gates: Array, state: list[Array]) -> list[Array]:
        raise NotImplementedError

    def run(self, x: Array, state: list[Array], lens: Array | None) -> tuple[Array, list[Array]]:
        """All steps; a sequence that has ended keeps its state and yields zeros."""
        projected = self.project(x)
        y = np.zeros((len(x), x.shape[1], self.hidden), x.dtype)
        for t in range(len(x)):
            new = self.step(projected[t], state)
            if lens is None:
                y[t], state = new[0], new
            else:
                on = (t < lens)[:, None]
                y[t] = np.where(on, new[0], 0)
                state = [np.where(on, n, s) for n, s in zip(new, state, strict=True)]
        return y, state


class _Rnn(_Cell):
    def __init__(self, w: Array | None, r: Array, b: Array | None, fns: Sequence[Activation]):
        super().__init__(w, r, b, 1)
        (self.f,) = fns

    def step(self, gates: Array, state: list[Array]) -> list[Array]:
        return [self.f(gates + state[0] @ self.r + self.rb)]


class _Gru(_Cell):
    """Gates z, r, h."""

    def __init__(
        self, w: Array | None, r: Array, b: Array | None, fns: Sequence[Activation], linear_before_reset: bool
    ):
        super().__init__(w, r, b, 3)
        self.f, self.g = fns
        self.linear = linear_before_reset

    def step(self, gates: Array, state: list[Array]) -> list[Array]:
        (h,), n = state, self.hidden
        zr = self.f(gates[:, : 2 * n] + h @ self.r[:, : 2 * n] + self.rb[: 2 * n])
        z, reset = zr[:, :n], zr[:, n:]
        weights, bias = self.r[:, 2 * n :], self.rb[2 * n :]
        hidden = reset * (h @ weights + bias) if self.linear else (reset * h) @ weights + bias
        candidate = self.g(gates[:, 2 * n :] + hidden)
        return [(1 - z) * candidate + z * h]


class _Lstm(_Cell):
    """Gates i, o, f, c; peepholes of i, o, f."""

    def __init__(
        self, w: Array | None, r: Array, b: Array | None, p: Array | None, fns: Sequence[Activation], input_forget: bool
    ):
        super().__init__(w, r, b, 4)
        self.f, self.g, self.h = fns
        n = self.hidden
        self.p = [np.zeros(n, r.dtype)] * 3 if p is None else [p[:n], p[n : 2 * n], p[2 * n :]]
        self.coupled = input_forget

    def step(self, gates: Array, state: list[Array]) -> list[Array]:
        (h, c), n = state, self.hidden
        gates = gates + h @ self.r + self.rb
        i = self.f(gates[:, :n] + self.p[0] * c)
        forget = 1 - i if self.coupled else self.f(gates[:, 2 * n : 3 * n] + self.p[2] * c)
        c = forget * c + i * self.g(gates[:, 3 * n :])
        o = self.f(gates[:, n : 2 * n] + self.p[1] * c)
        return [o * self.h(c), c]


def _layer(
    cells: Sequence[_Cell], x: Array, lens: Array | None, initial: Sequence[Array | None], direction: str
) -> tuple[Array, ...]:
    """y and the last states of all directions."""
    outputs, finals = [], []
    if lens is not None and lens.size and (int(lens.min()) < 0 or int(lens.max()) > len(x)):
        raise ValueError(f"sequence_lens holds {lens.min()} to {lens.max()} for sequences of {len(x)}")
    if lens is not None and bool((lens >= len(x)).all()):
        lens = None
    if not len(x):  # no last state either: zeros, as ONNX Runtime has them
        initial = [None] * len(initial)
    for d, cell in enumerate(cells):
        backwards = direction == "reverse" or d == 1
        zero = np.zeros((x.shape[1], cell.hidden), x.dtype)
        state = [zero if s is None else s[d] for s in initial]
        y, state = cell.run(_reverse(x, lens) if backwards else x, state, lens)
        outputs.append(_reverse(y, lens) if backwards else y)
        finals.append(state)
    states = [np.stack(s) for s in zip(*finals, strict=True)]
    return (np.stack(outputs, axis=1), *states)


def _per_direction(
    count: int, names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], clip: float | None
) -> list[list[Activation]]:
    each = len(names) // count
    parts = [slice(d * each, (d + 1) * each) for d in range(count)]
    return [_activations(names[p], alphas[p], betas[p], clip) for p in parts]


def rnn(
    x: Array,
    w: Array | None,
    r: Array,
    b: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    hidden_size: int,
    direction: str = "forward",
    activations: Sequence[str] = ("Tanh",),
    alphas: Sequence[float] = (0.0,),
    betas: Sequence[float] = (0.0,),
    clip: float | None = None,
) -> tuple[Array, ...]:
    """RNN (ONNX opset 22, layout 0): y and the last hidden state."""
    fns = _per_direction(len(r), activations, alphas, betas, clip)
    cells = [_Rnn(None if w is None else w[d], r[d], None if b is None else b[d], fns[d]) for d in range(len(r))]
    return _layer(cells, x, sequence_lens, [initial_h], direction)


def gru(
    x: Array,
    w: Array | None,
    r: Array,
    b: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    hidden_size: int,
    direction: str = "forward",
    activations: Sequence[str] = ("Sigmoid", "Tanh"),
    alphas: Sequence[float] = (0.0, 0.0),
    betas: Sequence[float] = (0.0, 0.0),
    clip: float | None = None,
    linear_before_reset: bool = False,
) -> tuple[Array, ...]:
    """GRU (ONNX opset 22, layout 0): y and the last hidden state."""
    fns = _per_direction(len(r), activations, alphas, betas, clip)
    cells = [
        _Gru(None if w is None else w[d], r[d], None if b is None else b[d], fns[d], linear_before_reset)
        for d in range(len(r))
    ]
    return _layer(cells, x, sequence_lens, [initial_h], direction)


def lstm(
    x: Array,
    w: Array | None,
    r: Array,
    b: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    p: Array | None = None,
    *,
    hidden_size: int,
    direction: str = "forward",
    activations: Sequence[str] = ("Sigmoid", "Tanh", "Tanh"),
    alphas: Sequence[float] = (0.0, 0.0, 0.0),
    betas: Sequence[float] = (0.0, 0.0, 0.0),
    clip: float | None = None,
    input_forget: bool = False,
) -> tuple[Array, ...]:
    """LSTM (ONNX opset 22, layout 0): y, the last hidden state and the last cell state."""
    fns = _per_direction(len(r), activations, alphas, betas, clip)
    cells = [
        _Lstm(
            None if w is None else w[d],
            r[d],
            None if b is None else b[d],
            None if p is None else p[d],
            fns[d],
            input_forget,
        )
        for d in range(len(r))
    ]
    return _layer(cells, x, sequence_lens, [initial_h, initial_c], direction)


KERNELS: dict[str, Kernel] = {"RNN": rnn, "GRU": gru, "LSTM": lstm}
