"""Recurrences of pointwise steps, unrolled by exporters: graphs for tests of PointwiseScan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.types import FP32
from support.net import Net

STEPS, BATCH, CHANNELS = 11, 2, 6


def taken(n: Net, x: Value, axis: int, index: int, *, kept: bool = False) -> Value:
    """One position of an axis. ``kept``: by a Slice, which keeps the axis."""
    if kept:
        return n.op("Slice", x, n.ints(index), n.ints(index + 1), n.ints(axis))  # type: ignore[no-any-return]
    return n.op("Gather", x, n.const(index, np.int64), attrs=GatherAttrs(axis))  # type: ignore[no-any-return]


def stacked(n: Net, rows: list[Value], axis: int, *, kept: bool = False) -> Value:
    parts = rows if kept else [n.op("Unsqueeze", row, n.ints(axis)) for row in rows]
    return n.op("Concat", *parts, attrs=ConcatAttrs(axis))  # type: ignore[no-any-return]


def zeros(n: Net, *shape: int) -> Value:
    return n.const(np.zeros(shape, np.float32))  # type: ignore[no-any-return]


def gated(
    n: Net, *, steps: int = STEPS, axis: int = 1, kept: bool = False, backward: bool = False, odd: int = -1, last: bool = False,
    other: bool = False, start: Any = None,
) -> list[Value]:  # fmt: skip
    """SRU: a gate that reads the state.

    ``axis``: the axis of time, inserted into (batch, channels). ``odd``: a step with another operator. ``last``: the last state
    is a result, too. ``other``: the states of all steps are results.
    """
    shape = [BATCH, CHANNELS]
    whole = [*shape[:axis], steps, *shape[axis:]]
    u, f = n.input(*whole, name="u"), n.op("Sigmoid", n.input(*whole, name="f"))
    w = n.random(CHANNELS) if axis < 2 or not kept else n.random(CHANNELS, 1)
    state = zeros(n, *(whole[:axis] + [1] * kept + whole[axis + 1 :])) if start is None else start
    rows, states = [], []
    order = range(steps - 1, -1, -1) if backward else range(steps)
    for t in order:
        ft = n.op("Sigmoid", n.op("Add", taken(n, f, axis, t, kept=kept), n.op("Mul", state, w)))
        kept_part = n.op("Mul", *((ft, state) if t % 2 else (state, ft)))
        new = n.op("Mul", n.op("Sub", 1.0, ft), taken(n, u, axis, t, kept=kept))
        state = n.op("Sub" if t == odd else "Add", kept_part, new)
        states.append(state)
        rows.append(n.op("Tanh", state))
    if backward:
        rows, states = rows[::-1], states[::-1]
    found = [stacked(n, rows, axis, kept=kept)]
    if last:
        found.append(n.op("Relu", n.op("Neg", states[0 if backward else -1])))
    if other:
        found.append(n.op("Abs", stacked(n, states, axis, kept=kept)))
    return found


def weighted(n: Net) -> list[Value]:
    """RWKV: two sums, and the largest exponent of the steps before."""
    k, v = n.input(BATCH, STEPS, CHANNELS, name="k"), n.input(BATCH, STEPS, CHANNELS, name="v")
    decay, first = n.const(-np.linspace(0.1, 2, CHANNELS, dtype=np.float32)), n.random(CHANNELS)
    above, below = zeros(n, BATCH, CHANNELS), zeros(n, BATCH, CHANNELS)
    top, rows = n.const(np.full((BATCH, CHANNELS), -1e38, np.float32)), []

    def update(bias: Value, here: Value) -> tuple[Value, Value, Value]:
        most = n.op("Max", bias, here)
        a, b = n.op("Exp", n.op("Sub", bias, most)), n.op("Exp", n.op("Sub", here, most))
        total = n.op("Add", n.op("Mul", a, above), n.op("Mul", b, taken(n, v, 1, t)))
        return total, n.op("Add", n.op("Mul", a, below), b), most

    for t in range(STEPS):
        kt = taken(n, k, 1, t)
        up, down, _ = update(top, n.op("Add", kt, first))
        rows.append(n.op("Div", up, down))
        above, below, top = update(n.op("Add", top, decay), kt)
    return [stacked(n, rows, 1)]


def spiking(n: Net) -> list[Value]:
    """Leaky integrate-and-fire neurons. The outermost axis has the steps, which a Split takes."""
    x = n.input(STEPS, BATCH, CHANNELS)
    parts = n.op("Split", x, attrs=SplitAttrs(0, STEPS), outputs=STEPS)
    level, rows = zeros(n, BATCH, CHANNELS), []
    for part in parts:
        now = n.op("Reshape", part, n.ints(BATCH, CHANNELS))
        level = n.op("Add", level, n.op("Mul", n.op("Sub", n.op("Mul", now, 3.0), level), 0.5))
        fires = n.op("Cast", n.op("GreaterOrEqual", level, 1.0), attrs=CastAttrs(FP32))
        level = n.op("Mul", level, n.op("Sub", 1.0, fires))
        rows.append(fires)
    return [n.op("Add", stacked(n, rows, 0), n.op("Mul", x, 0.25))]


def only_last(n: Net) -> list[Value]:
    """A leaky sum with an activation. Only its last value is read."""
    x, state = n.input(BATCH, STEPS, CHANNELS), zeros(n, BATCH, CHANNELS)
    for t in range(STEPS):
        state = n.op("Add", n.op("Mul", state, 0.8), n.op("Tanh", n.op("Add", taken(n, x, 1, t), state)))
    return [n.op("Sigmoid", state)]


def outer(n: Net) -> list[Value]:
    """Decaying sums of outer products: the states of linear attention. Positions have axes of size 1."""
    k, v, g = (n.input(BATCH, STEPS, CHANNELS, name=name) for name in "kvg")
    state, rows = zeros(n, BATCH, CHANNELS, CHANNELS), []
    for t in range(STEPS):
        column = n.op("Unsqueeze", taken(n, k, 1, t), n.ints(2))
        row, gate = (n.op("Unsqueeze", taken(n, x, 1, t), n.ints(1)) for x in (v, g))
        state = n.op("Add", n.op("Mul", state, n.op("Sigmoid", gate)), n.op("Mul", column, row))
        rows.append(state)
    return [stacked(n, rows, 1)]


def two_sums(n: Net, *, equal: bool = False) -> list[Value]:
    """Two sums that begin with one common zero, which the first step multiplies once. ``equal``: their first values are equal."""
    x, g = n.input(BATCH, STEPS, CHANNELS), n.op("Sigmoid", n.input(BATCH, STEPS, CHANNELS, name="g"))
    zero, rows = zeros(n, BATCH, CHANNELS), []
    above = below = zero
    for t in range(STEPS):
        now, gate = taken(n, x, 1, t), taken(n, g, 1, t)
        if equal and not t:
            above = below = n.op("Tanh", now)
        elif equal:
            above = n.op("Tanh", n.op("Add", above, now))
            below = n.op("Tanh", n.op("Add", n.op("Mul", below, 0.5), now))
        else:
            first = n.op("Mul", gate, above)
            second = first if above == below else n.op("Mul", gate, below)
            above, below = n.op("Add", first, now), n.op("Add", second, gate)
        rows.append(n.op("Mul", above, below))
    return [stacked(n, rows, 1)]


def reduced(n: Net, *, axis: int = 1, keepdims: bool = False) -> list[Value]:
    """The result of a step is a sum of its states (S4)."""
    x, a, c = n.input(BATCH, STEPS, CHANNELS), n.op("Sigmoid", n.random(CHANNELS, 4)), n.random(CHANNELS, 4)
    state, rows = zeros(n, BATCH, CHANNELS, 4), []
    for t in range(STEPS):
        here = n.op("Unsqueeze", taken(n, x, 1, t), n.ints(2))
        state = n.op("Add", n.op("Mul", state, a), here)
        rows.append(n.op("ReduceSum", n.op("Mul", state, c), n.ints(-1), attrs=ReduceAttrs(keepdims)))
    return [stacked(n, rows, axis)]


def multiplied(n: Net, *, backward: bool = False, mixed: bool = False) -> list[Value]:
    """Linear attention (RWKV-5, RetNet): each step multiplies its query with the sum of outer products of keys and values.
    ``mixed``: the queries are in another order."""
    q, k, v = (n.input(BATCH, 3, STEPS, 4, name=name) for name in "qkv")
    decay, state, rows = n.op("Sigmoid", n.random(3, 4, 1)), zeros(n, BATCH, 3, 4, 4), []
    for t in range(STEPS - 1, -1, -1) if backward else range(STEPS):
        column = n.op("Reshape", taken(n, k, 2, t, kept=True), n.ints(BATCH, 3, 4, 1))
        state = n.op("Add", n.op("Mul", state, decay), n.op("MatMul", column, taken(n, v, 2, t, kept=True)))
        rows.append(n.op("MatMul", taken(n, q, 2, STEPS - 1 - t if mixed else t, kept=True), state))
    return [stacked(n, rows[::-1] if backward else rows, 2, kept=True)]


def shifted(n: Net) -> list[Value]:
    """Steps that also read the position before theirs."""
    x = n.input(BATCH, CHANNELS, STEPS)
    state, rows = taken(n, x, 2, 0), []
    for t in range(1, STEPS):
        change = n.op("Sub", taken(n, x, 2, t), taken(n, x, 2, t - 1))
        state = n.op("Tanh", n.op("Add", n.op("Mul", state, 0.9), change))
        rows.append(state)
    return [stacked(n, rows, 2)]


CASES: dict[str, Callable[[Net], list[Value]]] = {
    "gated": gated,
    "gated_outermost": lambda n: gated(n, axis=0),
    "gated_innermost": lambda n: gated(n, axis=2),
    "gated_kept": lambda n: gated(n, kept=True),
    "gated_backward": lambda n: gated(n, backward=True),
    "gated_last": lambda n: gated(n, last=True),
    "gated_other": lambda n: gated(n, other=True),
    "gated_backward_other": lambda n: gated(n, backward=True, other=True, last=True),
    "weighted": weighted,
    "spiking": spiking,
    "outer": outer,
    "reduced": reduced,
    "reduced_outermost": lambda n: reduced(n, axis=0, keepdims=True),
    "multiplied": multiplied,
    "multiplied_backward": lambda n: multiplied(n, backward=True),
    "shifted": shifted,
    "two_sums": two_sums,
    "equal_sums": lambda n: two_sums(n, equal=True),
    "only_last": only_last,
}


def graph_of(name: str, **options: Any) -> Graph:
    n = Net()
    made = CASES[name](n) if name in CASES else gated(n, **options)
    return n.done(*made)
