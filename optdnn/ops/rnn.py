"""Recurrent layers: LSTM, GRU, RNN.

Time comes first (ONNX's layout 0); layout 1 is imported with transpositions around the layer. ``alphas`` and ``betas`` hold
one value per activation function, whether the function uses it or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.dim import DimLike
from optdnn.errors import ShapeError
from optdnn.ops.base import STEPS_TOL, Attrs, Call, Cost, Result, attrs_dict
from optdnn.ops.checks import agree_all, elements, emit, floating, require_length, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref, ToOnnx
from optdnn.ops.fused import product_flops
from optdnn.types import TensorType, is_float

_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
_PARAMETERS: dict[str, tuple[float | None, float | None]] = {
    "Affine": (1.0, 0.0),
    "Elu": (1.0, None),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01, None),
    "Relu": (None, None),
    "ScaledTanh": (1.0, 1.0),
    "Sigmoid": (None, None),
    "Softplus": (None, None),
    "Softsign": (None, None),
    "Tanh": (None, None),
    "ThresholdedRelu": (1.0, None),
}
"""Activation -> the defaults of its alpha and beta; None if it has no such parameter."""
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
"""Kind -> the gates of a unit."""
_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}


@dataclass(frozen=True)
class RNNAttrs(Attrs):
    """``activations`` of all directions, one after the other; ``clip`` bounds the inputs of the gates' activations."""

    hidden_size: int
    direction: str = "forward"
    activations: tuple[str, ...] = _DEFAULTS["RNN"]
    alphas: tuple[float, ...] = (0.0,)
    betas: tuple[float, ...] = (0.0,)
    clip: float | None = None


@dataclass(frozen=True)
class GRUAttrs(RNNAttrs):
    """``linear_before_reset``: the hidden projection comes before the reset gate (as in cuDNN and PyTorch)."""

    activations: tuple[str, ...] = _DEFAULTS["GRU"]
    alphas: tuple[float, ...] = (0.0,) * 2
    betas: tuple[float, ...] = (0.0,) * 2
    linear_before_reset: bool = False


@dataclass(frozen=True)
class LSTMAttrs(RNNAttrs):
    """``input_forget``: the forget gate is one minus the input gate."""

    activations: tuple[str, ...] = _DEFAULTS["LSTM"]
    alphas: tuple[float, ...] = (0.0,) * 3
    betas: tuple[float, ...] = (0.0,) * 3
    input_forget: bool = False


def _infer(call: Call) -> Result:
    kind, gates = call.kind, GATES[call.kind]
    a: RNNAttrs = call.attrs
    count, hidden = _DIRECTIONS[a.direction], a.hidden_size
    require_length(a.activations, count * len(_DEFAULTS[kind]), f"{kind} activations of direction {a.direction}")
    require_length(a.alphas, len(a.activations), f"{kind} alphas")
    require_length(a.betas, len(a.activations), f"{kind} betas")
    x = floating(call)
    require_rank(x, 3, f"{kind} input")
    steps, batch, width = x.dims
    state = (count, batch, hidden)
    wanted: list[tuple[str, tuple[DimLike, ...]]] = [
        ("weights W", (count, gates * hidden, width)),
        ("recurrent weights R", (count, gates * hidden, hidden)),
        ("bias B", (count, 2 * gates * hidden)),
        ("sequence_lens", (batch,)),
        ("initial_h", state),
        ("initial_c", state),
        ("peepholes P", (count, 3 * hidden)),
    ]
    for i, (name, shape) in enumerate(wanted, 1):
        if i <= 2 or call.has(i):
            _check(kind, name, call.type(i), shape, x if name != "sequence_lens" else None)
    for n in call.ints(4) or ():
        if isinstance(n, int) and (n < 0 or (isinstance(steps, int) and n > steps)):
            raise ShapeError(f"{kind} sequence_lens holds {n} for sequences of {steps}")
    last = TensorType(x.dtype, state)
    return Result((TensorType(x.dtype, (steps, *state)), last, last)[: 3 if kind == "LSTM" else 2])


def _check(kind: str, name: str, t: TensorType, shape: Sequence[DimLike], like: TensorType | None) -> None:
    require_rank(t, len(shape), f"{kind} {name}")
    agree_all(t.dims, shape, f"{kind} {name} is {t}, it must be [{', '.join(map(str, shape))}]")
    if like is not None and t.dtype != like.dtype:
        raise ShapeError(f"{kind} {name} is {t}, its input {like}")
    if like is None and t.dtype.kind not in "iu":
        raise ShapeError(f"{kind} {name} is {t}; it must hold integers")


# ---------------------------------------------------------------- import


def _functions(node: NodeSpec, count: int) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    """Names of the activations and a value per name; the node's lists hold values only for functions with the parameter, in
    order."""
    known = {name.lower(): name for name in _PARAMETERS}
    names = []
    for given in node.get("activations") or _DEFAULTS[node.op_type] * count:
        if given.lower() not in known:
            raise ShapeError(f"{node.op_type} activation {given!r} is unknown; ONNX has {', '.join(_PARAMETERS)}")
        names.append(known[given.lower()])
    numbers = []
    for k, attribute in enumerate(("activation_alpha", "activation_beta")):
        rest = list(node.get(attribute) or ())
        values = []
        for name in names:
            default = _PARAMETERS[name][k]
            values.append(0.0 if default is None else float(rest.pop(0)) if rest else default)
        if rest:
            raise ShapeError(f"{node.op_type} {attribute} has {len(rest)} values more than its activations take")
        numbers.append(tuple(values))
    return tuple(names), numbers[0], numbers[1]


def _import(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    kind, (cls, flag) = node.op_type, _OWN[node.op_type]
    direction = str(node.get("direction", "forward"))
    if direction not in _DIRECTIONS:
        raise ShapeError(f"{kind} direction is {direction!r}; it must be one of {', '.join(_DIRECTIONS)}")
    operands: list[Ref | None] = list(node.inputs)
    recurrent = e.type(operands[2])
    require_rank(recurrent, 3, f"{kind} recurrent weights R")
    hidden = node.get("hidden_size", recurrent.dims[2])
    if not isinstance(hidden, int):
        raise ShapeError(f"{kind} hidden_size is not known")
    clip = node.get("clip")
    attrs = cls(
        hidden,
        direction,
        *_functions(node, _DIRECTIONS[direction]),
        None if clip is None else float(clip),
        *([] if flag is None else [bool(node.get(flag, 0))]),
    )
    n, batch_first = len(node.outputs), bool(node.get("layout", 0))
    for i in (0, 5, 6):
        if batch_first and i < len(operands) and operands[i] is not None:
            operands[i] = emit(e, "Transpose", operands[i], perm=(1, 0, 2))
    if any(node.outputs[1:]):
        _begin_nothing_with_zeros(kind, operands, e)
    if not batch_first:
        return e.op(kind, operands, attrs, outputs=n)
    y, *states = e.op(kind, operands, attrs, outputs=n)
    return (
        emit(e, "Transpose", y, perm=(2, 0, 1, 3)),
        *(emit(e, "Transpose", s, perm=(1, 0, 2)) for s in states),
    )


def _begin_nothing_with_zeros(kind: str, operands: list[Ref | None], e: Emit) -> None:
    """If a sequence may have length 0, set its initial states to zeros.

    ONNX does not define the last states of such a sequence. ONNX Runtime returns zeros, others return the initial states.
    With this change the graph itself sets zeros, and every library returns the same.
    """
    lens = operands[4] if len(operands) > 4 else None
    known = None if lens is None else e.value(lens)
    if lens is None or (
        known is not None and all(isinstance(n, (int, np.integer)) and n > 0 for n in known.reshape(-1))
    ):
        return
    held = [i for i in (5, 6) if i < len(operands) and operands[i] is not None]
    x = e.type(operands[0])
    if not held or x.rank != 3 or not is_float(x.dtype):
        return
    _check(kind, "sequence_lens", e.type(lens), (x.dims[1],), None)
    bounds = (np.zeros((), x.dtype), np.ones((), x.dtype))
    some = emit(e, "Unsqueeze", emit(e, "Clip", emit(e, "Cast", lens, to=x.dtype), *bounds), np.array([1]))
    for i in held:
        operands[i] = emit(e, "Mul", operands[i], some)


# ---------------------------------------------------------------- export and cost


def _export(kind: str, flag: str | None) -> ToOnnx:
    def to_onnx(a: RNNAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
        own: dict[str, Any] = {} if flag is None else {flag: int(attrs_dict(a)[flag])}
        alphas = tuple(v for n, v in zip(a.activations, a.alphas, strict=True) if _PARAMETERS[n][0] is not None)
        betas = tuple(v for n, v in zip(a.activations, a.betas, strict=True) if _PARAMETERS[n][1] is not None)
        return e.node(
            kind,
            inputs,
            n_outputs,
            hidden_size=a.hidden_size,
            direction=a.direction,
            activations=a.activations,
            activation_alpha=alphas or None,
            activation_beta=betas or None,
            clip=a.clip,
            **own,
        )

    return to_onnx


def _cost(call: Call, result: Result) -> Cost:
    """The products, and five operations per gate."""
    return Cost(product_flops(call, result) + 5 * GATES[call.kind] * elements(result.types[0]))


_OWN: dict[str, tuple[type[RNNAttrs], str | None]] = {
    "RNN": (RNNAttrs, None),
    "GRU": (GRUAttrs, "linear_before_reset"),
    "LSTM": (LSTMAttrs, "input_forget"),
}
"""Kind -> its attributes, and the attribute that only this kind has."""
"""Errors of one step affect all later steps."""

DEFS: tuple[OpDef, ...] = tuple(
    OpDef(kind, _infer, cls, _import, _export(kind, flag), _cost, STEPS_TOL) for kind, (cls, flag) in _OWN.items()
)
