"""Ops that scale and shift a value per channel by constants: BatchNormalization, and Mul, Div, Add, Sub by a constant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.base import Miss
from optdnn.types import FP64, Array, DType, is_float

KINDS = frozenset({"BatchNormalization", "Mul", "Div", "Add", "Sub"})


@dataclass(frozen=True)
class Affine:
    """``x * scale + shift`` in float64; each is of shape () or (C,)."""

    scale: Array
    shift: Array

    def then(self, other: Affine) -> Affine:
        """The composition: this scale and shift first, then ``other``."""
        return Affine(self.scale * other.scale, self.shift * other.scale + other.shift)

    @property
    def scales(self) -> bool:
        return bool(np.any(self.scale != 1.0))

    @property
    def shifts(self) -> bool:
        return bool(np.any(self.shift != 0.0))


ONE, ZERO = np.ones(()), np.zeros(())
IDENTITY = Affine(ONE, ZERO)


def variable(graph: Graph, op: Op) -> Value | None:
    """The operand that an affine op scales and shifts: its only operand that is not constant. None for other ops."""
    if op.kind not in KINDS or not is_float(op.outputs[0].type.dtype):
        return None
    if op.kind == "BatchNormalization":
        return op.inputs[0]
    a, b = op.inputs
    constant = (graph.constant_value(a) is not None, graph.constant_value(b) is not None)
    if constant == (False, True):
        return a
    return b if constant == (True, False) and op.kind != "Div" else None


def read(graph: Graph, op: Op, axis: int, channels: int) -> Affine | Miss:
    """The scale and shift that an affine op (an op with a :func:`variable`) applies to its variable operand.

    ``axis`` of that operand holds the ``channels`` channels. A Miss if the constants are not known or are not one value per
    channel, or if they enlarge the operand by broadcasting.
    """
    x = variable(graph, op)
    assert x is not None
    if graph.type(x).shape != op.outputs[0].type.shape:
        return Miss(f"{op.kind} {op.name} enlarges its operand")
    if op.kind == "BatchNormalization":
        return _batch_norm(graph, op, axis)
    constant = next(c for v in op.inputs if (c := graph.constant_value(v)) is not None)
    c = _per_channel(constant, graph.type(x).rank, axis, channels)
    if c is None:
        what = "x".join(map(str, constant.shape)) or "one element"
        return Miss(f"{op.kind} {op.name} by a constant of {what} is not one value per channel (axis {axis})")
    if op.kind == "Mul":
        return Affine(c, ZERO)
    if op.kind == "Div":
        if np.any(c == 0.0):
            return Miss(f"{op.kind} {op.name} divides by zero")
        return Affine(1.0 / c, ZERO)
    if op.kind == "Add":
        return Affine(ONE, c)
    return Affine(ONE, -c) if x == op.inputs[0] else Affine(-ONE, c)


def _batch_norm(graph: Graph, op: Op, axis: int) -> Affine | Miss:
    found = [graph.constant_value(v) for v in op.inputs[1:5]]
    if any(s is None for s in found):
        return Miss(f"the statistics of {op.name} are not constant")
    if axis != 1:
        return Miss(f"{op.name} normalizes axis 1, the channels are on axis {axis}")
    gamma, beta, mean, variance = (s.astype(FP64) for s in found if s is not None)
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + op.attrs.epsilon)
    return Affine(scale, beta - mean * scale)


def _per_channel(constant: Array, rank: int | None, axis: int, channels: int) -> Array | None:
    """A constant that broadcasts along all axes except the channels, as float64 of shape () or (C,); else None."""
    if rank is None or rank < constant.ndim:
        return None
    sizes = enumerate(constant.shape, rank - constant.ndim)
    if any(size != 1 and not (i == axis and size == channels) for i, size in sizes):
        return None
    flat: Array = constant.astype(FP64).reshape(-1)
    return flat.reshape(()) if flat.size == 1 else flat


def round_to(value: Array, dtype: DType) -> Array | None:
    """``value`` rounded to ``dtype``; None if a finite number would become infinite (overflow)."""
    with np.errstate(all="ignore"):
        rounded: Array = value.astype(dtype)
        lost = np.isfinite(value) & ~np.isfinite(rounded.astype(FP64))
    return None if np.any(lost) else rounded
