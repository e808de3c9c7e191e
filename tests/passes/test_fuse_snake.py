"""fuse_snake: ``x + gain sin(rate x)^2`` becomes one op, and a stage of the convolution before it."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph, Value
from optdnn.optimize import optimize
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.fuse_snake import FuseSnake


def wave(n: Net, x: Value, rate: bool = True) -> Value:
    return n.op("Sin", n.op("Mul", x, n.positive(4, 1)) if rate else x)


def snake(*, rate: bool = True, gain: bool = True, power: bool = False, turned: bool = False) -> Graph:
    n = Net(np.float64)
    x = n.conv(n.input(2, 3, 9), 4)
    s = wave(n, x, rate)
    y = n.op("Pow", s, 2.0) if power else n.op("Mul", s, s)
    y = n.op("Mul", y, n.positive(1, 4, 1)) if gain else y
    return n.done(n.op("Add", y, x) if turned else n.op("Add", x, y))


@pytest.mark.parametrize(
    "graph",
    [
        snake(),
        snake(turned=True),
        snake(power=True),
        snake(rate=False),
        snake(gain=False),
        snake(rate=False, gain=False),
    ],
)
def test_each_form_is_one_op(graph: Graph) -> None:
    after, _ = check_pass(FuseSnake(), graph, changes=1, kinds={"Conv": 1, "Snake": 1})
    check_pass(FuseEpilogue(), after, changes=1, kinds={"Conv": 1}, rules={"epilogue_activation": 1})


def test_exported_forms_arrive_in_one_of_these_forms() -> None:
    """DAC: a reciprocal and a power."""
    n = Net()
    x = n.conv(n.input(2, 3, 9), 4)
    rate = n.positive(1, 4, 1)
    gain = n.op("Reciprocal", n.op("Add", rate, 1e-9))
    graph = n.done(n.op("Add", x, n.op("Mul", gain, n.op("Pow", n.op("Sin", n.op("Mul", rate, x)), 2.0))))
    optimize(graph, BuildOptions(target="cuda:sm_90a", precision="fp16"), "cuda:sm_90a")
    (conv,) = graph.of_kind("Conv")
    assert [s.kind for s in conv.attrs.epilogue] == ["Snake"]


def test_a_wave_that_is_read_elsewhere_stays() -> None:
    n = Net(np.float64)
    x = n.input(2, 4, 9)
    s = wave(n, x)
    graph = n.done(n.op("Add", x, n.op("Mul", n.op("Mul", s, s), n.positive(4, 1))), n.op("Relu", s))
    check_refused(FuseSnake(), graph, because="is used")


def test_numbers_that_enlarge_it_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(1, 4, 9)
    s = wave(n, x)
    graph = n.done(n.op("Add", x, n.op("Mul", n.op("Mul", s, s), n.positive(2, 4, 1))))
    check_refused(FuseSnake(), graph, because="its operand is")


def test_other_waves_are_not_seen() -> None:
    n = Net(np.float64)
    x, y = n.input(2, 4, 9), n.input(2, 4, 9, name="y")
    s, t = wave(n, x), wave(n, y)
    others = [n.op("Add", y, n.op("Mul", s, s)), n.op("Add", x, n.op("Mul", s, t)), n.op("Add", x, s)]
    computed = n.op("Sin", n.op("Mul", x, y))
    check_untouched(FuseSnake(), n.done(*others, n.op("Add", x, n.op("Mul", computed, computed))))
