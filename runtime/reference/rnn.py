"""NumPy kernels. Recurrent layers: LSTM, GRU, RNN.

x (T, N, I); w (D, G*H, I), r (D, G*H, H), b (D, 2*G*H) with D directions and G gates; sequence_lens (N); initial states
(D, N, H). Results: y (T, D, N, H) and the last states (D, N, H). The input projection of all steps is one matrix product;
without w, x is that product (T, N, G*H) already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.runtime.reference.unary import sigmoid
from optdnn.types import Array

Activation: TypeAlias = Callable[[Array], Array]
_FUNCTIONS: dict[str, Callable[[Array, float, float], Array]] = {
    "Affine": lambda x, a, b: a * x + b,
    "Elu": lambda x, a, b: np.where(x >= 0, x, a * np.expm1(x)),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "LeakyRelu": lambda x, a, b: np.where(x >= 0, x, a * x),
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "Sigmoid": lambda x, a, b: sigmoid(x),
    "Softplus": lambda x, a, b: np.logaddexp(x, x.dtype.type(0)),
    "Softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "Tanh": lambda x, a, b: np.tanh(x),
    "ThresholdedRelu": lambda x, a, b: np.where(x > a, x, x.dtype.type(0)),
}


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

    gates: int

    def __init__(
        self,
        w: Array | None,
        r: Array,
        b: Array | None,
        p: Array | None,
        functions: Sequence[Activation],
        flag: bool,
    ):
        self.hidden = r.shape[-1]
        self.r = r.T
        self.w = None if w is None else w.T
        self.p, self.functions, self.flag = p, functions, flag
        size = self.gates * self.hidden
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
    gates = 1

    def step(self, gates: Array, state: list[Array]) -> list[Array]:
        (f,) = self.functions
        return [f(gates + state[0] @ self.r + self.rb)]


class _Gru(_Cell):
    """Gates z, r, h. ``flag``: linear_before_reset."""

    gates = 3

    def step(self, gates: Array, state: list[Array]) -> list[Array]:
        (f, g), (h,), n = self.functions, state, self.hidden
        zr = f(gates[:, : 2 * n] + h @ self.r[:, : 2 * n] + self.rb[: 2 * n])
        z, reset = zr[:, :n], zr[:, n:]
        weights, bias = self.r[:, 2 * n :], self.rb[2 * n :]
        hidden = reset * (h @ weights + bias) if self.flag else (reset * h) @ weights + bias
        candidate = g(gates[:, 2 * n :] + hidden)
        return [(1 - z) * candidate + z * h]


class _Lstm(_Cell):
    """Gates i, o, f, c; peepholes of i, o, f. ``flag``: input_forget."""

    gates = 4

    def step(self, gates: Array, state: list[Array]) -> list[Array]:
        (f, g, h_), (h, c), n = self.functions, state, self.hidden
        p = [np.zeros(n, self.r.dtype)] * 3 if self.p is None else np.split(self.p, 3)
        gates = gates + h @ self.r + self.rb
        i = f(gates[:, :n] + p[0] * c)
        forget = 1 - i if self.flag else f(gates[:, 2 * n : 3 * n] + p[2] * c)
        c = forget * c + i * g(gates[:, 3 * n :])
        o = f(gates[:, n : 2 * n] + p[1] * c)
        return [o * h_(c), c]


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


def _recurrent(
    cell: type[_Cell],
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
    activations: Sequence[str],
    alphas: Sequence[float],
    betas: Sequence[float],
    clip: float | None = None,
    flag: bool = False,
) -> tuple[Array, ...]:
    fns = _per_direction(len(r), activations, alphas, betas, clip)
    cells = []
    for d, own in enumerate(fns):
        w_d, b_d, p_d = (None if v is None else v[d] for v in (w, b, p))
        cells.append(cell(w_d, r[d], b_d, p_d, own, flag))
    return _layer(cells, x, sequence_lens, [initial_h, initial_c] if cell is _Lstm else [initial_h], direction)


def _defaults(*activations: str) -> dict[str, Any]:
    zeros = (0.0,) * len(activations)
    return {"activations": activations, "alphas": zeros, "betas": zeros}


def rnn(*operands: Array | None, **attrs: Any) -> tuple[Array, ...]:
    """RNN (ONNX opset 22, layout 0): y and the last hidden state."""
    return _recurrent(_Rnn, *operands, **{**_defaults("Tanh"), **attrs})  # type: ignore[arg-type]


def gru(*operands: Array | None, linear_before_reset: bool = False, **attrs: Any) -> tuple[Array, ...]:
    """GRU (ONNX opset 22, layout 0): y and the last hidden state."""
    given = {**_defaults("Sigmoid", "Tanh"), **attrs}
    return _recurrent(_Gru, *operands, **given, flag=linear_before_reset)  # type: ignore[arg-type]


def lstm(*operands: Array | None, input_forget: bool = False, **attrs: Any) -> tuple[Array, ...]:
    """LSTM (ONNX opset 22, layout 0): y, the last hidden state and the last cell state."""
    given = {**_defaults("Sigmoid", "Tanh", "Tanh"), **attrs}
    return _recurrent(_Lstm, *operands, **given, flag=input_forget)  # type: ignore[arg-type]


KERNELS: dict[str, Kernel] = {"RNN": rnn, "GRU": gru, "LSTM": lstm}
