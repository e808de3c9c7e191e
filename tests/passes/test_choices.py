"""choice_is_bound: bounds written as choices, as ONNX defines Clip. NaN stays NaN."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.passes.canonicalize import Canonicalize

CANON = Canonicalize()
SPECIAL = np.array([np.nan, -np.inf, -3.0, -0.5, 0.0, 0.5, 3.0, np.inf], np.float32)


def same_for_special_numbers(before: Graph, after: Graph) -> None:
    feeds = {"x": SPECIAL}
    assert np.array_equal(evaluate(after, feeds)["y0"], evaluate(before, feeds)["y0"], equal_nan=True)


def where(n: Net, condition: Value, first: Value | float, second: Value | float, negated: bool) -> Value:
    return n.op("Where", n.op("Not", condition), second, first) if negated else n.op("Where", condition, first, second)


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize(
    ("test", "kind"),
    [("Less", "Max"), ("LessOrEqual", "Max"), ("Greater", "Min"), ("GreaterOrEqual", "Min")],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_number_beyond_a_bound_is_replaced_by_it(test: str, kind: str, swapped: bool, negated: bool) -> None:
    n = Net()
    x, bound = n.input(8), n.const(0.5)
    mirrored = test.replace("Less", "Greater") if kind == "Max" else test.replace("Greater", "Less")
    condition = n.op(mirrored, bound, x) if swapped else n.op(test, x, bound)
    before = n.done(where(n, condition, bound, x, negated))
    after, _ = check_pass(CANON, before, changes=1, kinds={kind: 1}, rules={"choice_is_bound": 1})
    same_for_special_numbers(before, after)


@pytest.mark.parametrize("test", ["Greater", "GreaterOrEqual"])
def test_zero_below_a_threshold_of_zero_is_a_thresholded_relu(test: str) -> None:
    n = Net()
    x = n.input(8)
    before = n.done(n.op("Where", n.op(test, x, 0.0), x, 0.0))
    after, _ = check_pass(CANON, before, changes=1, kinds={"ThresholdedRelu": 1})
    same_for_special_numbers(before, after)


def test_zero_up_to_a_threshold_is_a_thresholded_relu() -> None:
    n = Net()
    x = n.input(8)
    before = n.done(n.op("Where", n.op("Less", 0.5, x), x, 0.0))
    after, _ = check_pass(CANON, before, changes=1, kinds={"ThresholdedRelu": 1})
    same_for_special_numbers(before, after)


def test_bounds_of_integers_ask_for_no_nan() -> None:
    n = Net(np.int64)
    x = n.op("Mul", n.input(8), 5)
    before = n.done(n.op("Where", n.op("Greater", x, 3), x, 3))
    check_pass(CANON, before, changes=1, kinds={"Mul": 1, "Max": 1})


def test_a_bound_that_replaces_nan_stays() -> None:
    n = Net()
    x = n.input(8)
    before = n.done(n.op("Where", n.op("Greater", x, 0.5), x, 0.5))
    check_refused(CANON, before, because="it gives the bound for NaN", rule="choice_is_bound")


def test_other_choices_stay() -> None:
    n = Net()
    x, z = n.input(8), n.input(8, name="z")
    found = [
        n.op("Where", n.op("Less", x, 0.5), 0.25, x),  # another number
        n.op("Where", n.op("Less", z, 0.5), 0.5, x),  # another tensor
        n.op("Where", n.op("Less", x, z), z, x),  # no number
        n.op("Where", n.op("Less", x, np.nan), np.nan, x),
        n.op("Where", n.op("GreaterOrEqual", x, 0.5), x, 0.0),  # 0.5 stays itself
        n.op("Where", n.op("LessOrEqual", x, 0.5), 0.0, x),  # NaN stays NaN
        n.op("Where", n.op("Equal", x, 0.5), 0.5, x),
        n.op("Where", n.op("Less", x, n.const([[0.5]])), 0.5, x),  # one more axis
    ]
    check_untouched(CANON, n.done(*found))
