"""stacked_columns: columns that a Concat joins are computed at once; refusals."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ArgAttrs, ReduceAttrs
from optdnn.passes import stacked_columns
from optdnn.passes.stacked_columns import StackedColumns
from optdnn.types import FP32

PASS = StackedColumns()
ROWS, FEATURES = 3, 4


def column(n: Net, x: Value, *positions: int) -> Value:
    return n.op("Gather", x, n.ints(*positions), attrs=GatherAttrs(1))  # type: ignore[no-any-return]


def powers(n: Net, x: Value, degree: int = 2) -> list[Value]:
    """Scikit-learn's polynomial features of one degree: products of all combinations of columns."""
    chosen = combinations_with_replacement(range(FEATURES), degree)
    return [n.op("ReduceProd", column(n, x, *c), n.ints(1), attrs=ReduceAttrs(keepdims=True)) for c in chosen]


def polynomial(rows: object = ROWS) -> Graph:
    n = Net()
    x = n.input(rows, FEATURES)  # type: ignore[arg-type]
    single = [column(n, x, k) for k in range(FEATURES)]
    return n.done(n.op("Concat", *single, *powers(n, x), *powers(n, x, 3), attrs=ConcatAttrs(1)))


def test_polynomial_features() -> None:
    """The products of two and of three columns are two stacks; single columns stay."""
    kinds = {"Gather": FEATURES + 2, "ReduceProd": 2, "Concat": 1}
    graph, _ = check_pass(PASS, polynomial(), changes=1, rules={"stacked_columns": 1})
    assert {kind: graph.kinds()[kind] for kind in kinds} == kinds


def bins(n: Net, x: Value, k: int, last: Value) -> Value:
    """Scikit-learn's KBinsDiscretizer: the first edge above the number, as one-hot columns."""
    below = n.op("Cast", n.op("Less", column(n, x, k), n.random(3)), attrs=CastAttrs(FP32))
    at = n.op("ArgMax", n.op("Concat", below, last, attrs=ConcatAttrs(1)), attrs=ArgAttrs(axis=1))
    equal = n.op("Equal", n.op("Unsqueeze", at, n.ints(-1)), n.ints(0, 1, 2, 3))
    return n.op("Reshape", n.op("Cast", equal, attrs=CastAttrs(FP32)), n.ints(-1, 4))  # type: ignore[no-any-return]


def test_bins_of_features() -> None:
    n = Net()
    x = n.input(5, FEATURES)
    last = n.op("Add", n.op("Mul", column(n, x, 0), 0.0), 1.0)
    y = n.op("Concat", *(bins(n, x, k, last) for k in range(FEATURES)), attrs=ConcatAttrs(1))
    graph, _ = check_pass(PASS, n.done(y), changes=1, rules={"stacked_columns": 1})
    assert graph.kinds()["ArgMax"] == 1
    assert graph.kinds()["Concat"] == 2, "the edges of all columns, and their last edge"


def test_columns_along_the_first_axis() -> None:
    n = Net()
    x = n.input(FEATURES, 5)
    rows = [n.op("Gather", x, n.ints(k, 3 - k), attrs=GatherAttrs(0)) for k in range(4)]
    y = n.op(
        "Concat",
        *(n.op("ReduceMax", r, n.ints(0), attrs=ReduceAttrs(keepdims=True)) for r in rows),
        attrs=ConcatAttrs(0),
    )
    check_pass(PASS, n.done(y), changes=1, rules={"stacked_columns": 1})


def test_a_network_of_columns_takes_few_launches() -> None:
    graph = polynomial()
    program = check_simulated(graph)
    assert len([s for s in program.steps if s.executor == "cuda"]) <= 6


def test_large_columns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_columns, "MOST_ELEMENTS", 64)
    check_refused(PASS, polynomial(), because="large enough for a launch of its own")


def test_other_columns_stay() -> None:
    check_untouched(PASS, polynomial(symbol("n")))
    n = Net()
    x = n.input(ROWS, FEATURES)
    check_untouched(PASS, n.done(n.op("Concat", *powers(n, x)[:3], attrs=ConcatAttrs(1))))  # few
    n = Net()
    x = n.input(ROWS, FEATURES)  # pointwise operators need no launch of their own
    check_untouched(
        PASS, n.done(n.op("Concat", *(n.op("Exp", column(n, x, k)) for k in range(4)), attrs=ConcatAttrs(1)))
    )
    n = Net()
    x, z = n.input(ROWS, FEATURES), n.input(ROWS, FEATURES, name="z")  # of different tensors
    sums = [
        n.op("ReduceProd", column(n, v, 0, k), n.ints(1), attrs=ReduceAttrs(keepdims=True))
        for v in (x, z)
        for k in (1, 2)
    ]
    check_untouched(PASS, n.done(n.op("Concat", *sums, attrs=ConcatAttrs(1))))
    n = Net()
    x = n.input(ROWS, FEATURES)  # of equal values
    same = n.op("ReduceProd", column(n, x, 0, 1), n.ints(1), attrs=ReduceAttrs(keepdims=True))
    check_untouched(PASS, n.done(n.op("Concat", same, same, same, same, attrs=ConcatAttrs(1))))
