"""farthest_points: unrolled steps of farthest point sampling become one op, and one launch, however the point is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.farthest import FarthestPointsAttrs
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ArgAttrs, ReduceAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.farthest_points import FarthestPoints

Read = Callable[[Net, Value, Value], Value]
"""The points of each cloud [B, 1, D] at an index."""


def by_elements(n: Net, x: Value, at: Value) -> Value:
    wide = n.op("Expand", n.op("Unsqueeze", at, n.ints(1, 2)), n.ints(*n.dims(x)[:1], 1, 3))  # type: ignore[arg-type]
    return n.op("GatherElements", x, wide, attrs=GatherAttrs(1))


def by_positions(n: Net, x: Value, at: Value) -> Value:
    """PyTorch's dynamo exporter."""
    cloud = n.const(np.arange(n.dims(x)[0])[:, None], np.int64)  # type: ignore[arg-type]
    place = n.op("Concat", cloud, n.op("Unsqueeze", at, n.ints(1)), attrs=ConcatAttrs(1))
    return n.op("Unsqueeze", n.op("GatherND", x, place, attrs=GatherNDAttrs(0)), n.ints(1))


def by_rows(n: Net, x: Value, at: Value, more: int = 0) -> Value:
    """PyTorch's old exporter: rows of all clouds."""
    b, count, d = n.dims(x)
    flat = n.op("Reshape", x, n.ints(-1, d), attrs=ReshapeAttrs())  # type: ignore[arg-type]
    row = n.op("Add", at, n.const(np.arange(b) * count + more, np.int64))  # type: ignore[call-overload, operator]
    return n.op("Unsqueeze", n.op("Gather", flat, row, attrs=GatherAttrs(0)), n.ints(1))


def minimum(n: Net, d: Value, near: Value) -> Value:
    return n.op("Min", near, d)


def less(n: Net, d: Value, near: Value) -> Value:
    return n.op("Where", n.op("Less", d, near), d, near)


def greater(n: Net, d: Value, near: Value) -> Value:
    return n.op("Where", n.op("Greater", near, d), d, near)


def masked(n: Net, d: Value, near: Value) -> Value:
    """``near[d < near] = d[d < near]``, computed for all rows."""
    some = n.op("Less", d, near)
    return n.op("Where", some, n.op("Where", some, d, n.const(0.0)), near)


def sampled(
    read: Read = by_elements,
    nearer: Callable[[Net, Value, Value], Value] = minimum,
    *,
    clouds: int = 2,
    count: int = 30,
    steps: int = 5,
    first: bool = False,
    tapped: int = -1,
    axis: int = 1,
    last: bool = False,
    other: bool = False,
) -> Graph:
    """``first``: the first index is an input. ``tapped``: the step whose distances are read elsewhere. ``other``: a step reads the
    point of another cloud of points."""
    n = Net()
    x = n.input(clouds, count, 3)
    y = n.op("Neg", x)
    at = n.input(clouds, name="first", dtype=np.int64) if first else n.const(np.arange(clouds) + 1, np.int64)
    near, chosen, more = n.const(np.full((clouds, count), 1e10)), [], []
    for k in range(steps):
        way = n.op("Sub", x, read(n, y if other and k == 2 else x, at))
        d = n.op("ReduceSum", n.op("Mul", way, way), n.ints(-1), attrs=ReduceAttrs(keepdims=False))
        near = nearer(n, d, near)
        more += [n.op("Exp", near)] if k == tapped else []
        at = n.op("ArgMax", near, attrs=ArgAttrs(axis, keepdims=False, select_last_index=last))
        chosen.append(n.op("Unsqueeze", at, n.ints(1)))
    return n.done(n.op("Concat", *chosen, attrs=ConcatAttrs(1)), *more)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("clouds", [1, 3])
@pytest.mark.parametrize("read", [by_elements, by_positions, by_rows])
def test_steps_are_one(read: Read, clouds: int, first: bool) -> None:
    graph, _ = check_pass(FarthestPoints(), sampled(read, clouds=clouds, first=first), changes=1)
    (op,) = graph.of_kind("FarthestPoints")
    assert op.attrs == FarthestPointsAttrs(5)
    assert not {"ArgMax", "Gather", "GatherND", "GatherElements", "ReduceSum", "Min"} & set(graph.kinds())


@pytest.mark.parametrize("nearer", [less, greater, masked])
def test_distances_by_selection(nearer: Callable[[Net, Value, Value], Value]) -> None:
    graph, _ = check_pass(FarthestPoints(), sampled(nearer=nearer), changes=1, rules={"farthest_points": 1})
    assert "Where" not in graph.kinds()


def test_steps_before_distances_with_other_readers_stay() -> None:
    graph, _ = check_pass(FarthestPoints(), sampled(steps=8, tapped=2), changes=1)
    (op,) = graph.of_kind("FarthestPoints")
    assert op.attrs == FarthestPointsAttrs(5)
    assert graph.kinds()["ArgMax"] == 3


UNTOUCHED = {
    "few steps": sampled(steps=3),
    "the last of equal points": sampled(last=True),
    "the next point": sampled(lambda n, x, at: by_rows(n, x, at, 1)),
    "points of another tensor": sampled(other=True, steps=5),
    "the distances are an output": sampled(tapped=4),
    "the largest distance": sampled(nearer=lambda n, d, near: n.op("Max", d, near)),
    "the larger one": sampled(nearer=lambda n, d, near: n.op("Where", n.op("Less", d, near), near, d)),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_others_stay(name: str) -> None:
    check_untouched(FarthestPoints(), UNTOUCHED[name])


def test_large_clouds_are_refused() -> None:
    because = "a block of the kernel holds fewer points of 3 coordinates than 10241"
    check_refused(FarthestPoints(), sampled(clouds=1, count=10241), because=because)


def test_a_network_takes_one_launch() -> None:
    program = check_simulated(sampled(by_positions, less, count=200, steps=20))
    assert kinds(program).count("FarthestPoints") == 1
    assert len(program.steps) <= 2


def test_a_cloud_that_a_block_cannot_hold_runs_on_the_host() -> None:
    n = Net()
    x, near = n.input(1, 9000, 4), n.const(np.full((1, 9000), 1e10))
    y = n.op("FarthestPoints", x, near, n.ints(0), attrs=FarthestPointsAttrs(2))
    assert [s.executor for s in check_simulated(n.done(y)).steps][-1] == "host"
