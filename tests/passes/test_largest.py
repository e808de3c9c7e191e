"""largest: what does not change which element is the largest is not computed before an ArgMax or ArgMin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.reduce import ArgAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import RulePass
from optdnn.passes.canonicalize_arithmetic import CanonicalizeArithmetic
from optdnn.passes.rules.largest import largest_of_growing, largest_of_sum

ROWS, FEATURES, CODES = 24, 5, 16


class Largest(RulePass):
    """The two rules alone."""

    name = "largest"
    rules = (largest_of_growing, largest_of_sum)


def search(n: Net, x: Value, kind: str = "ArgMax", axis: int = -1) -> Graph:
    return n.done(n.op(kind, x, attrs=ArgAttrs(axis=axis, keepdims=False)))


def distance(order: str, negated: bool) -> Graph:
    """The code nearest to each row: ``|x|^2 - 2 x c + |c|^2`` in an order of its terms."""
    n = Net()
    x, codes = n.input(ROWS, FEATURES), n.random(FEATURES, CODES)
    terms = {"x": n.op("ReduceSumSquare", x, n.ints(1)), "p": n.op("MatMul", x, codes), "c": n.random(1, CODES)}
    first, second, third = (terms[t] for t in order.replace("-", ""))
    found = n.op("Sub" if order[1] == "-" else "Add", first, second)
    found = n.op("Sub" if order[-2] == "-" else "Add", found, third)
    return search(n, n.op("Neg", found) if negated else found, "ArgMax" if negated else "ArgMin")


@pytest.mark.parametrize("negated", [True, False])
@pytest.mark.parametrize(
    ("order", "kinds"),
    [("x-pc", {"Sub": 1, "ArgMin": 1}), ("cx-p", {"Sub": 1, "ArgMin": 1}), ("pxc", {"Add": 1, "ArgMin": 1})],
)
def test_nearest_code(order: str, kinds: dict[str, int], negated: bool) -> None:
    check_pass(Largest(), distance(order, negated), changes=1 + negated, kinds={"MatMul": 1} | kinds)


def test_only_negative_terms_turn_the_search() -> None:
    n = Net()
    rows = n.input(ROWS, 1, name="r")
    graph = search(n, n.op("Sub", n.op("Sub", rows, n.input(ROWS, CODES)), n.random(CODES)))
    check_pass(Largest(), graph, changes=1, kinds={"Add": 1, "ArgMin": 1})


def test_another_axis() -> None:
    n = Net()
    graph = search(n, n.op("Add", n.input(2, CODES, ROWS), n.input(ROWS, name="r")), axis=1)
    check_pass(Largest(), graph, changes=1, kinds={"ArgMax": 1})


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (("Softmax", SoftmaxAttrs(-1)), "ArgMax"),
        (("LogSoftmax", SoftmaxAttrs(1)), "ArgMax"),
        (("Sqrt", None), "ArgMax"),
        (("Neg", None), "ArgMin"),
        (("Mul", 0.25), "ArgMax"),
        (("Div", -2.0), "ArgMin"),
    ],
)
def test_growing(step: tuple[str, Any], kind: str) -> None:
    n = Net()
    x, (name, more) = n.op("Exp", n.input(ROWS, CODES)), step
    y = n.op(name, x, more) if isinstance(more, float) else n.op(name, x, attrs=more)
    check_pass(Largest(), search(n, y), changes=1, kinds={"Exp": 1, kind: 1})


@pytest.mark.parametrize("case", ["other axis", "zero", "integers", "rows and columns", "shared", "columns"])
def test_untouched(case: str) -> None:
    n = Net()
    x = n.input(ROWS, CODES)
    if case == "integers":
        return check_untouched(Largest(), search(n, n.op("Neg", n.input(ROWS, CODES, name="i", dtype=np.int64))))
    if case == "shared":  # the inner sum is read elsewhere, too
        inner = n.op("Add", n.input(ROWS, 1, name="r"), x)
        found = n.op("ArgMax", n.op("Add", inner, n.random(CODES)), attrs=ArgAttrs(axis=1))
        return check_untouched(Largest(), n.done(found, inner))
    y = {
        "other axis": lambda: n.op("Softmax", x, attrs=SoftmaxAttrs(0)),
        "zero": lambda: n.op("Mul", x, 0.0),
        "rows and columns": lambda: n.op("Add", n.input(ROWS, 1, name="r"), n.random(CODES)),
        "columns": lambda: n.op("Add", x, n.random(CODES)),
    }[case]()
    return check_untouched(Largest(), search(n, y))


def test_it_is_part_of_the_arithmetic() -> None:
    check_pass(CanonicalizeArithmetic(), distance("x-pc", False), changes=1, rules={"largest_of_sum": 1})
