"""Sinkhorn: matrices whose rows and columns are divided by their sums in turn (Sinkhorn and Knopp, 1967)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Call, Cost, Result, Tol
from optdnn.ops.checks import elements, floating
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export

MOST_LINES = 32
"""Most rows and columns of a matrix that a GPU's kernel holds in registers."""


@dataclass(frozen=True)
class SinkhornAttrs(Attrs):
    """Matrices are the last two axes. ``count`` times they are divided by their sums along an axis, plus ``epsilon``: first
    along ``axis`` (-1: sums of rows, -2: sums of columns), then along the two axes in turn. A divisor is at least ``floor``."""

    axis: int
    count: int
    epsilon: float = 0.0
    floor: float = 0.0

    def axes(self) -> list[int]:
        """The axis of each division."""
        return [self.axis if k % 2 == 0 else -3 - self.axis for k in range(self.count)]


def _infer(call: Call) -> Result:
    x, a = floating(call), call.attrs
    if len(x.dims) < 2 or a.axis not in (-1, -2) or a.count < 1 or min(a.epsilon, a.floor) < 0:
        bounds = f"an epsilon of {a.epsilon:g} and a floor of {a.floor:g}"
        raise ShapeError(f"Sinkhorn of {x} along axis {a.axis}, {a.count} times, with {bounds}")
    return Result((x,))


def _cost(call: Call, result: Result) -> Cost:
    return Cost(2 * call.attrs.count * elements(call.type(0)))


def _export(a: SinkhornAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """The sums and quotients."""
    found, t = inputs[0], e.type(inputs[0])
    for axis in a.axes():
        (divisor,) = e.node("ReduceSum", [found, e.const(np.array([axis]), "axes")], keepdims=1)
        if a.epsilon:
            (divisor,) = e.node("Add", [divisor, e.const(np.asarray(a.epsilon).astype(t.dtype), "epsilon")])
        if a.floor:
            (divisor,) = e.node("Max", [divisor, e.const(np.asarray(a.floor).astype(t.dtype), "floor")])
        (found,) = e.node("Div", [found, divisor])
    return (found,)


DEFS: tuple[OpDef, ...] = (
    OpDef("Sinkhorn", _infer, SinkhornAttrs, {}, _export, cost=_cost, tol=Tol(rtol=1e-5, atol=2e-6)),
)
