"""sums_of_steps: sums of the products of each step become one sum for all steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import RulePass
from optdnn.passes.rules.sums_of_steps import sums_of_steps

STEPS = 5


class Sums(RulePass):
    name = "sums"
    rules = (sums_of_steps,)


SUMS = Sums()


def taken(n: Net, x: Value, t: int, axis: int) -> Value:
    return n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(axis))


def scan_output(
    n: Net, axis: int = 1, keepdims: bool = False, order: Callable[[int], int] = lambda t: t, steps: int = STEPS,
) -> Graph:  # fmt: skip
    """``sum(h[:, t] * c[:, t, None])`` of all steps, joined, as Mamba's reference code has it."""
    h, c = n.input(2, STEPS, 6, 4, name="h"), n.input(2, STEPS, 4, name="c")
    parts = []
    for t in range(steps):
        product = n.op("Mul", taken(n, h, order(t), 1), n.op("Unsqueeze", taken(n, c, t, 1), n.ints(1)))
        total = n.op("ReduceSum", product, n.ints(2), attrs=ReduceAttrs(keepdims=keepdims))
        parts.append(total if keepdims else n.op("Unsqueeze", total, n.ints(axis)))
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(axis)))


@pytest.mark.parametrize(("axis", "keepdims", "turned"), [(0, False, 0), (1, False, 1), (2, False, 1), (-1, True, 1)])
def test_sums_of_all_steps_are_one(axis: int, keepdims: bool, turned: int) -> None:
    graph, _ = check_pass(SUMS, scan_output(Net(np.float64), axis, keepdims), changes=1, rules={"sums_of_steps": 1})
    assert len(graph.of_kind("ReduceSum")) == len(graph.of_kind("Mul")) == 1
    assert len(graph.of_kind("Transpose")) == 2 + turned
    assert not graph.of_kind("Concat")


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (scan_output(Net(), order=lambda t: STEPS - 1 - t), "not sums of products of all positions of two tensors"),
        (scan_output(Net(), steps=4), "not sums of products of all positions of two tensors"),
    ],
)
def test_refused(graph: Graph, because: str) -> None:
    check_refused(SUMS, graph, because=because)


def test_sums_over_different_axes_are_refused() -> None:
    n = Net()
    x, y = n.input(4, 3, 3, name="a"), n.input(4, 3, 3, name="b")
    parts = []
    for t in range(4):
        product = n.op("Mul", taken(n, x, t, 0), taken(n, y, t, 0))
        total = n.op("ReduceSum", product, n.ints(t % 2), attrs=ReduceAttrs(keepdims=False))
        parts.append(n.op("Unsqueeze", total, n.ints(0)))
    check_refused(SUMS, n.done(n.op("Concat", *parts, attrs=ConcatAttrs(0))), because="sums over different axes")


def test_others_are_no_candidates() -> None:
    check_untouched(SUMS, scan_output(Net(), steps=3))
    n = Net()
    x = n.input(2, 4, 3)
    alone = [n.op("ReduceSum", taken(n, x, t, 1), n.ints(1), attrs=ReduceAttrs()) for t in range(4)]
    check_untouched(SUMS, n.done(n.op("Concat", *alone, attrs=ConcatAttrs(1))))
    n = Net()
    x = n.input(2, 4, 3)
    read = [
        n.op("ReduceSum", n.op("Mul", p, p), n.ints(1), attrs=ReduceAttrs())
        for p in (taken(n, x, t, 1) for t in range(4))
    ]
    check_untouched(SUMS, n.done(n.op("Concat", *read, attrs=ConcatAttrs(1)), read[0]))
