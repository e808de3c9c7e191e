"""segment_decays: decays between the steps of a chunk are differences of one running sum; other running sums stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import CumulativeAttrs
from optdnn.passes.unrolled_scans import UnrolledScans

PASS = UnrolledScans()
STEPS = 6


def selected(n: Net, x: Value, diagonal: int, fill: float, negated: bool) -> Value:
    """``x`` up to a diagonal, and ``fill`` above it; ``negated``: as masked_fill is exported."""
    lower = np.tril(np.ones((STEPS, STEPS), bool), diagonal)
    if negated:
        return n.op("Where", n.const(~lower, bool), n.const(fill), x)
    return n.op("Where", n.const(lower, bool), x, n.const(fill))


def segments(
    *, negated: bool = True, known: bool = False, axis: int = -2, fill: float = 0.0, below: int = -1, upto: int = 0,
    before: str = "Neg", read: bool = False, **attrs: Any,
) -> Graph:  # fmt: skip
    """The decays of a chunk as Mamba-2 exports them. ``known``: the network also computes the running sum of the steps. ``read``:
    the sums themselves are needed."""
    n = Net(np.float64)
    a = n.op(before, n.op("Softplus", n.input(2, 3, STEPS)))
    rows = selected(n, n.op("Unsqueeze", a, n.ints(-1)), below, fill, negated)
    total = n.op("CumSum", rows, n.const(axis, np.int64), attrs=CumulativeAttrs(**attrs))
    y = n.op("Exp", selected(n, total, upto, -np.inf, negated))
    others = [n.op("Exp", n.op("CumSum", a, n.const(-1, np.int64)))] if known else []
    return n.done(y, *others, *([n.op("Tanh", total)] if read else []))


@pytest.mark.parametrize("negated", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_decays_are_differences_of_one_running_sum(negated: bool, known: bool) -> None:
    graph, _ = check_pass(PASS, segments(negated=negated, known=known), changes=1, rules={"segment_decays": 1})
    (total,) = graph.of_kind("CumSum")
    assert graph.type(total.value).static_shape == (2, 3, STEPS)
    assert len(graph.of_kind("Sub")) == len(graph.of_kind("Where")) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"axis": -1}, {"fill": 1.0}, {"below": 0}, {"upto": 1}, {"read": True}, {"exclusive": True}, {"reverse": True}
    ],
    ids=str,
)  # fmt: skip
def test_other_running_sums_stay(options: dict[str, Any]) -> None:
    check_untouched(PASS, segments(**options))


def test_exponents_that_may_be_infinite_are_refused() -> None:
    check_refused(PASS, segments(before="Log"), because="a step may have an infinite exponent")


def test_decays_take_no_launch_of_their_own() -> None:
    n = Net()
    a = n.op("Neg", n.op("Softplus", n.input(2, 3, STEPS)))
    rows = selected(n, n.op("Unsqueeze", a, n.ints(-1)), -1, 0.0, True)
    total = n.op("CumSum", rows, n.const(-2, np.int64))
    program = check_simulated(n.done(n.op("Exp", selected(n, total, 0, -np.inf, True))), "fp16")
    assert kinds(program) == ["Pointwise", "CumSum", "Pointwise"]
