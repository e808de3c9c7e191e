"""Refusals of kernels over coordinates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.index import positions, scatters
from optdnn.ops.gather import ScatterElementsAttrs, ScatterNDAttrs
from optdnn.ops.index import CumulativeAttrs
from optdnn.types import INT64


def net(kind: str, x: int, *others: Any, attrs: Any = None, outputs: int = 1) -> Graph:
    """The operator of ``x`` numbers. ``others``: a number, or the sizes of an input and its type."""
    n = Net()
    operands = [n.input(x)]
    for k, other in enumerate(others):
        operands.append(n.ints(other) if isinstance(other, int) else n.input(*other[0], name=f"in{k}", dtype=other[1]))
    found = n.op(kind, *operands, attrs=attrs, outputs=outputs)
    return n.done(*found) if outputs > 1 else n.done(found)


def check_too_many(graph: Graph, words: str) -> None:
    """The operator runs on the host, for this reason."""
    program = lowered(graph)
    (row,) = program.meta["host"]["operators"]
    assert f"each: its results {words}" in row["why"]


@pytest.mark.parametrize(
    ("kind", "attrs", "index"),
    [("ScatterElements", ScatterElementsAttrs(0, "max"), (5,)), ("ScatterND", ScatterNDAttrs("max"), (5, 1))],
)
def test_long_searches_of_scatters(kind: str, attrs: Any, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatters, "SCATTER_LIMIT", 7 * 5)
    others = ((index, INT64), ((5,), np.float32))
    fits = lowered(net(kind, 7, *others, attrs=attrs))
    assert "host" not in [s.executor for s in fits.steps]
    check_too_many(net(kind, 9, *others, attrs=attrs), "would compare 45 updates in all")


def test_long_lines_of_orders_and_of_sums_along_an_axis_that_is_given_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "VISITS_LIMIT", 8 * 8)
    check_too_many(net("TopK", 64, 2, outputs=2), "would compare 256 candidates in all")
    axis = ((), INT64)
    check_too_many(net("CumSum", 9, axis, attrs=CumulativeAttrs()), "would compare 81 candidates in all")
