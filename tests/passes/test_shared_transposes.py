"""canonicalize: a tensor is transposed once, also if it is transposed again after a pointwise operator."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from test_canonicalize import CANON

from optdnn.ir.graph import Graph

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
