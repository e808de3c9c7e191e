"""NumPy kernels. Recurrent layers: LSTM, GRU, RNN.

x (T, N, I); w (D, G*H, I), r (D, G*H, H), b (D, 2*G*H) with D directions and G gates; sequence_lens (N); initial states
(D, N, H). Results: y (T, D, N, H) and the last states (D, N, H). The input projection of all steps is one matrix product;
without w, x already is this product (T, N, G*H).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

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
    """The functions of one direction. ``clip`` bounds the inputs of the gates' functions (f and g).

    As in ONNX Runtime and OpenVINO, the third function of an LSTM sees the unclipped cell state.
    """

    def bind(i: int, name: str, alpha: float, beta: float) -> Activation:
        fn = _FUNCTIONS[name]
        if clip is None or i == 2:
            return lambda x: fn(x, alpha, beta)
        return lambda x: fn(np.clip(x, -clip, clip), alpha, beta)

    return [bind(i, *given) for i, given in enumerate(zip(names, alphas, betas, strict=True))]


def _reverse(x: Array, lens: Array | None) -> Array:
    """Each sequence (axis 0 is time, axis 1 the batch) reversed; elements after its end stay in place."""
    if lens is None:
        return x[::-1]
    t = np.arange(len(x))[:, None]
    at = np.where(t < lens, lens - 1 - t, t)
    return np.asarray(x[at, np.arange(x.shape[1])])


class _Direction(NamedTuple):
    """The weights of one direction after the products of its inputs, and its functions. ``flag``: the kind's own option."""

    r: Array
    bias: Array
    peepholes: Array | None
    functions: Sequence[Activation]
    flag: bool


State: TypeAlias = list[Array]
"""(N, H) arrays. The first one is the output."""


def _rnn_step(d: _Direction, gates: Array, state: State) -> State:
    (f,) = d.functions
    return [f(gates + state[0] @ d.r + d.bias)]


def _gru_step(d: _Direction, gates: Array, state: State) -> State:
    """Gates z, r, h. ``flag``: linear_before_reset."""
    (f, g), (h,), n = d.functions, state, state[0].shape[1]
    zr = f(gates[:, : 2 * n] + h @ d.r[:, : 2 * n] + d.bias[: 2 * n])
    z, reset = zr[:, :n], zr[:, n:]
    weights, bias = d.r[:, 2 * n :], d.bias[2 * n :]
    hidden = reset * (h @ weights + bias) if d.flag else (reset * h) @ weights + bias
    candidate = g(gates[:, 2 * n :] + hidden)
    return [(1 - z) * candidate + z * h]


def _lstm_step(d: _Direction, gates: Array, state: State) -> State:
    """Gates i, o, f, c; peepholes of i, o, f. ``flag``: input_forget."""
    (f, g, h_), (h, c), n = d.functions, state, state[0].shape[1]
    p = [np.zeros(n, d.r.dtype)] * 3 if d.peepholes is None else np.split(d.peepholes, 3)
    gates = gates + h @ d.r + d.bias
    i = f(gates[:, :n] + p[0] * c)
    forget = 1 - i if d.flag else f(gates[:, 2 * n : 3 * n] + p[2] * c)
    c = forget * c + i * g(gates[:, 3 * n :])
    o = f(gates[:, n : 2 * n] + p[1] * c)
    return [o * h_(c), c]


Step: TypeAlias = Callable[[_Direction, Array, State], State]


def _run(step: Step, d: _Direction, projected: Array, state: State, lens: Array | None) -> tuple[Array, State]:
    """All steps; a sequence that has ended keeps its state and yields zeros."""
    y = np.zeros((*projected.shape[:2], len(d.r)), projected.dtype)
    for t in range(len(projected)):
        new = step(d, projected[t], state)
        if lens is None:
            y[t], state = new[0], new
        else:
            on = (t < lens)[:, None]
            y[t] = np.where(on, new[0], 0)
            state = [np.where(on, n, s) for n, s in zip(new, state, strict=True)]
    return y, state


def _projected(x: Array, w: Array | None, bias: Array) -> Array:
    """The products of all inputs; without weights they are already computed."""
    if w is None:
        return x + bias
    rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2]) @ w.T + bias
    return np.asarray(rows.reshape(*x.shape[:2], rows.shape[1]))


def _recurrent(
    step: Step,
    x: Array,
    w: Array | None,
    r: Array,
    b: Array | None = None,
    lens: Array | None = None,
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
    """y and the last states of all directions."""
    if lens is not None and lens.size and (int(lens.min()) < 0 or int(lens.max()) > len(x)):
        raise ValueError(f"sequence_lens holds {lens.min()} to {lens.max()} for sequences of {len(x)}")
    if lens is not None and bool((lens >= len(x)).all()):
        lens = None
    initial = [initial_h, initial_c] if step is _lstm_step else [initial_h]
    if not len(x):  # no last state either: zeros, as in ONNX Runtime
        initial = [None] * len(initial)
    each, size, outputs, finals = len(activations) // len(r), r.shape[1], [], []
    for k in range(len(r)):
        own = slice(k * each, (k + 1) * each)
        functions = _activations(activations[own], alphas[own], betas[own], clip)
        both = np.zeros(2 * size, r.dtype) if b is None else b[k]
        d = _Direction(r[k].T, both[size:], None if p is None else p[k], functions, flag)
        state = [np.zeros((x.shape[1], r.shape[2]), x.dtype) if s is None else s[k] for s in initial]
        backwards = direction == "reverse" or k == 1
        projected = _projected(_reverse(x, lens) if backwards else x, None if w is None else w[k], both[:size])
        y, state = _run(step, d, projected, state, lens)
        outputs.append(_reverse(y, lens) if backwards else y)
        finals.append(state)
    return (np.stack(outputs, axis=1), *(np.stack(s) for s in zip(*finals, strict=True)))


def _layer(step: Step, activations: tuple[str, ...], flag: str = "") -> Kernel:
    """A layer of cells that ``step`` computes, with ONNX's default activations. ``flag``: the name of its own option."""
    zeros = (0.0,) * len(activations)
    defaults = {"activations": activations, "alphas": zeros, "betas": zeros}

    def kernel(*operands: Array | None, **attrs: Any) -> tuple[Array, ...]:
        own = bool(attrs.pop(flag, False))
        return _recurrent(step, *operands, **{**defaults, **attrs}, flag=own)  # type: ignore[arg-type]

    return kernel


KERNELS: dict[str, Kernel] = {
    "RNN": _layer(_rnn_step, ("Tanh",)),
    "GRU": _layer(_gru_step, ("Sigmoid", "Tanh"), "linear_before_reset"),
    "LSTM": _layer(_lstm_step, ("Sigmoid", "Tanh", "Tanh"), "input_forget"),
}
