"""Lowering takes time that is linear in the number of steps of a loop."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.net import Net
from support.processor import assert_linear
from support.simulated import lowered

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.norm import short_rows
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.norm import LayerNormAttrs

GROWTH = 2.0
WIDE = 32
NORM = LayerNormAttrs(-1, 1e-5)


def cells(steps: int) -> Graph:
    """Steps of a cell with two norms, one of the inputs and one of the state. All results are joined."""
    n = Net()
    x, state = n.input(steps, 1, WIDE), n.input(1, WIDE, name="s")
    given = [n.random(WIDE) for _ in range(4)]
    inputs = n.op("LayerNormalization", n.matmul(x, WIDE), *given[:2], attrs=NORM)
    w, found = n.random(WIDE, WIDE), list[Value]()
    for t in range(steps):
        own = n.op("LayerNormalization", n.op("MatMul", state, w), *given[2:], attrs=NORM)
        state = n.op("Tanh", n.op("Add", own, n.op("Gather", inputs, n.const(t, np.int64), attrs=GatherAttrs(0))))
        found.append(n.op("Unsqueeze", state, n.ints(0)))
    return n.done(n.op("Concat", *found, attrs=ConcatAttrs(0)))


def residual(steps: int) -> Graph:
    """Steps with a shortcut around a product, each with a bias of its own."""
    n = Net()
    x, w = n.input(1, WIDE), n.random(WIDE, WIDE)
    for _ in range(steps):
        x = n.op("Add", x, n.op("Tanh", n.op("Add", n.op("MatMul", x, w), n.random(WIDE))))
    return n.done(x)


@pytest.mark.slow
def test_steps_with_a_shortcut() -> None:
    graphs = {k: residual(k) for k in (24, 120)}
    assert_linear({k: partial(lowered, graph) for k, graph in graphs.items()}, GROWTH)


@pytest.mark.slow
def test_twins_of_norms_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each norm of the inputs may share a launch with another one. The others are not searched again for each of them."""
    steps, visits, takes = 60, 0, short_rows._takes_part

    def counted(graph: Graph, op: Op) -> bool:
        nonlocal visits
        visits += 1
        return takes(graph, op)

    monkeypatch.setattr(short_rows, "_takes_part", counted)
    lowered(cells(steps))
    assert steps <= visits <= 8 * steps
