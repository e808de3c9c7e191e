"""The reasons why an operator has no form on 8-bit integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.passes.support.precision import no_integers
from optdnn.types import INT32


def weighted_mean(n: Net) -> Value:
    return n.op("MatMul", n.op("Softmax", n.input(2, 8)), n.random(8, 1))


CASES: dict[str, Callable[[Net], Value]] = {
    "it is the mean of constants, weighted by a softmax: one kernel of floats computes both": weighted_mean,
    "it computes int32[2, 8], not floating point": lambda n: n.op("Concat", n.input(2, 8, dtype=INT32), attrs=None),
    "it gives positions besides the largest elements": lambda n: n.op(
        "MaxPool", n.input(1, 2, 4, 4), attrs=MaxPoolAttrs((2, 2), (2, 2), (0,) * 4, (1, 1), indices=True), outputs=2
    )[0],
    "its weights are not constant": lambda n: n.op("Gemm", n.input(2, 8), n.input(8, 4, name="w"), attrs=GemmAttrs()),
    "one of its operands is a vector": lambda n: n.op("MatMul", n.input(2, 8), n.random(8)),
    "its bias is not constant": lambda n: n.op(
        "Gemm", n.input(2, 8), n.random(8, 4), n.input(4, name="b"), attrs=GemmAttrs()
    ),
    "its bias fp32[2, 4] is not one number per column": lambda n: n.op(
        "Gemm", n.input(2, 8), n.random(8, 4), n.random(2, 4), attrs=GemmAttrs()
    ),
}


@pytest.mark.parametrize("because", CASES)
def test_operators_without_a_form_on_integers(because: str) -> None:
    n = Net()
    y = CASES[because](n)
    graph = n.done(y)
    assert no_integers(graph, graph.op(y), "cuda" if "softmax" in because else "") == because
