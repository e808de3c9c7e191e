"""canonicalize: a tensor is transposed once, also if it is transposed again after a pointwise operator."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from test_canonicalize import CANON

from optdnn.ir.graph import Graph, Value

HEADS = (0, 2, 1, 3)


def network(
    *, factor: str = "constant", read: bool = False, perm: tuple[int, ...] = HEADS, joined: bool = False
) -> Graph:
    """Queries that are multiplied before one Transpose, and multiplied by one another behind another Transpose."""
    n = Net()
    x = n.op("Exp", n.input(2, 4, 4, 4))
    made = {
        "constant": lambda: n.random(4, 1, 4),
        "scalar": lambda: n.const(0.5),
        "computed": lambda: n.input(4, 1, 4, name="f"),
        "whole": lambda: n.input(2, 4, 4, 4, name="f"),
    }
    y = n.op("Mul", x, made[factor]())
    a, b = n.transposed(x, *HEADS), n.transposed(y, *perm)
    product = n.op("Add", a, b) if joined else n.op("MatMul", b, a)
    return n.done(product, *([n.op("Tanh", y)] if read else []))


@pytest.mark.parametrize(("factor", "more"), [("constant", {}), ("scalar", {}), ("computed", {"Reshape": 1})])
def test_one_transpose_is_left(factor: str, more: dict[str, int]) -> None:
    kinds = {"Exp": 1, "MatMul": 1, "Mul": 1, "Transpose": 1, **more}
    graph, _ = check_pass(CANON, network(factor=factor), changes=1, kinds=kinds, rules={"shared_transpose": 1})
    (mul,) = graph.of_kind("Mul")
    assert mul.outputs[0].type.dims == (2, 4, 4, 4)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"factor": "whole"}, "reads another tensor, which would have to be transposed"),
        ({"read": True}, "is also read in its first order"),
    ],
)
def test_refusals(options: dict[str, Any], because: str) -> None:
    check_refused(CANON, network(**options), because=because)


def test_another_permutation() -> None:
    check_untouched(CANON, network(perm=(0, 2, 3, 1)))


def test_transposes_that_sink_are_left_to_it() -> None:
    check_pass(CANON, network(joined=True), changes=1, kinds={"Exp": 1, "Mul": 1, "Add": 1, "Transpose": 1})


@pytest.mark.parametrize("shared", [False, True])
def test_two_paths_that_meet_sink_together(shared: bool) -> None:
    """Neither Transpose can pass the sum alone."""
    n = Net()
    x = n.op("Exp", n.input(1, 4, 3, 2))
    t = n.transposed(x, 0, 2, 3, 1)
    a = n.op("Div", n.op("Tanh", t), n.random(4))
    b = n.op("Add", n.op("Softplus", t if shared else n.transposed(x, 0, 2, 3, 1)), n.random(3, 1, 1))
    graph = n.done(n.transposed(n.op("Mul", n.op("Add", a, b), n.random(4)), 0, 3, 1, 2))
    kinds = {"Exp": 1, "Tanh": 1, "Div": 1, "Softplus": 1, "Add": 2, "Mul": 1}
    check_pass(CANON, graph, changes=7, kinds=kinds)


def test_paths_that_meet_often_are_examined_once() -> None:
    """Each of 8 layers reads the one before 4 times: 65536 paths lead back to the Transposes."""
    n = Net()
    values = [n.transposed(n.op("Exp", n.input(1, 4, 3, 2, name=f"x{i}")), 0, 2, 3, 1) for i in range(5)]
    for _ in range(8):
        values = [n.op("Max", *(v for k, v in enumerate(values) if k != i)) for i in range(5)]
    graph = n.done(*(n.transposed(v, 0, 3, 1, 2) for v in values))
    check_pass(CANON, graph, changes=45, kinds={"Exp": 5, "Max": 40})


@pytest.mark.parametrize(("mean", "changes"), [(False, 8), (True, 12)])
def test_paths_that_part_sink_together(mean: bool, changes: int) -> None:
    def gated(y: Value) -> Value:
        return n.op("Mul", y, n.op("ReduceMean", y, n.ints(1, 2)) if mean else n.op("Sigmoid", y))

    n = Net()
    t = n.transposed(n.op("Exp", n.input(1, 4, 3, 2)), 0, 2, 3, 1)
    graph = n.done(n.transposed(n.op("Add", gated(n.op("Tanh", t)), gated(n.op("Softplus", t))), 0, 3, 1, 2))
    gates = {"ReduceMean": 2} if mean else {"Sigmoid": 2}
    check_pass(CANON, graph, changes=changes, kinds={"Exp": 1, "Tanh": 1, "Softplus": 1, **gates, "Mul": 2, "Add": 1})


def test_a_path_is_not_moved_back() -> None:
    """One path moves at a time. shared_transpose must not move it back, although the other cannot move without it."""
    n = Net()
    t = n.transposed(n.op("Exp", n.input(1, 4, 3, 2)), 0, 2, 3, 1)
    a, b = (n.op("Softmax", n.op(kind, t)) for kind in ("Tanh", "Softplus"))
    graph = n.done(n.transposed(n.op("Add", a, b), 0, 3, 1, 2))
    kinds = {"Exp": 1, "Tanh": 1, "Softplus": 1, "Softmax": 2, "Add": 1, "Transpose": 3}
    check_pass(CANON, graph, changes=1, kinds=kinds)
