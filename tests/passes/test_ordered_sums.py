"""ordered_sums: convolutions and products add all other terms of a sum; other sums stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.hoist_views import HoistViews
from optdnn.passes.ordered_sums import OrderedSums

PASS = OrderedSums()


def branch(n: Net, x: Value, *after: str, deep: bool = False) -> Value:
    """A convolution of ``x``, perhaps after another one, and operators after it."""
    y = n.conv(n.op("Tanh", n.conv(x, 8, 3)) if deep else x, 8, 3)
    for kind in after:
        y = n.op(kind, y, 0.5) if kind == "Mul" else n.op(kind, y)
    return y


def branches(*, depths: tuple[bool, ...] = (False, False), after: tuple[str, ...] = (), ordered: bool = False) -> Graph:
    """``(a(x) + b(x) + …) + x``. ``ordered``: ``(x + a(x)) + …``."""
    n = Net()
    x = n.op("Sigmoid", n.input(2, 8, 6, 5))
    terms = [branch(n, x, *after, deep=deep) for deep in depths]
    total, *others = (x, *terms) if ordered else (*terms, x)
    for term in others:
        total = n.op("Add", total, term)
    return n.done(n.op("Relu", total))


def order_of_terms(graph: Graph) -> list[str]:
    """The kinds that compute the terms of the only sum, in the order in which they are added."""
    (last,) = [op for op in graph.of_kind("Add") if graph.op(graph.users(op.value)[0].value).kind != "Add"]
    found: list[str] = []
    while last.kind == "Add":
        first, second = (graph.op(v) for v in last.inputs if v is not None)
        found.append(second.kind)
        last = first
    return [last.kind, *reversed(found)]


def test_a_sum_begins_with_the_term_that_no_convolution_computes() -> None:
    graph, _ = check_pass(PASS, branches(), changes=1)
    assert order_of_terms(graph) == ["Sigmoid", "Conv", "Conv"]


def test_the_deepest_convolution_adds_last() -> None:
    graph, _ = check_pass(PASS, branches(depths=(True, False)), changes=1)
    assert order_of_terms(graph) == ["Sigmoid", "Conv", "Conv"]
    last = graph.op(graph.of_kind("Relu")[0].inputs[0])  # type: ignore[arg-type]
    convolution = graph.op(last.inputs[1])  # type: ignore[arg-type]
    assert graph.op(convolution.inputs[0]).kind == "Tanh"  # type: ignore[arg-type]


def test_activations_and_factors_stay_between_convolution_and_sum() -> None:
    graph, _ = check_pass(PASS, branches(after=("Relu", "Mul")), changes=1)
    assert order_of_terms(graph) == ["Sigmoid", "Mul", "Mul"]


def test_all_additions_are_in_epilogues() -> None:
    """The first and last launch convert input and output; the convolutions of the input are one."""
    program = check_simulated(branches(depths=(True, False, False)), "fp16")
    assert kinds(program) == ["JointPointwise", "Conv", "ConvSum", "Pointwise"]


def outer() -> Graph:
    n = Net()
    x = n.op("Sigmoid", n.input(2, 8, 6, 5))
    return n.done(n.op("Add", n.op("Add", branch(n, x), x), n.op("Sin", x)))


def read_twice() -> Graph:
    n = Net()
    x = n.op("Sigmoid", n.input(2, 8, 6, 5))
    inner = n.op("Add", branch(n, x), branch(n, x))
    return n.done(n.op("Add", inner, x), n.op("Exp", inner))


def channels() -> Graph:
    n = Net()
    x = n.op("Sigmoid", n.input(2, 8, 6, 5))
    return n.done(n.op("Add", n.op("Add", branch(n, x), branch(n, x)), n.op("ReduceMax", x, n.ints(2, 3))))


@pytest.mark.parametrize(
    "graph",
    [
        lambda: branches(depths=(False,)),  # two terms
        outer,  # the only convolution adds already
        read_twice,  # the inner sum is needed
        channels,  # a broadcast term
        lambda: branches(after=("Softmax",)),  # no epilogue computes the terms
        lambda: branches(ordered=True),
    ],
)
def test_other_sums_stay(graph: Callable[[], Graph]) -> None:
    check_untouched(PASS, graph())


def test_a_convolution_that_adds_a_tensor_leaves_further_additions_to_others() -> None:
    """The deeper convolution has added the input: the other one adds its result."""
    n = Net()
    x = n.op("Sigmoid", n.input(2, 8, 6, 5))
    graph = n.done(n.op("Add", n.op("Add", branch(n, x, deep=True), x), branch(n, x)))
    after, _ = check_pass(FuseEpilogue(), graph, changes=3)
    assert sorted(sum(s.kind == "Add" for s in c.attrs.epilogue) for c in after.of_kind("Conv")) == [0, 1, 1]


def products(n: Net, bias: bool = False) -> tuple[Value, Value, Value]:
    """Two products of rows of an input, perhaps with biases, and the input."""
    x = n.input(2, 5, 6)
    p, q = (n.matmul(n.op(kind, x), 6) for kind in ("Relu", "Tanh"))
    return (n.op("Add", p, n.random(6)), n.op("Add", q, n.random(6)), x) if bias else (p, q, x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("last", [True, False])
def test_each_product_adds_one_tensor(bias: bool, last: bool) -> None:
    """Parallel units of a transformer's block, and the residual."""
    n = Net(np.float64)
    p, q, x = products(n, bias)
    total = n.op("Add", p, q)
    graph, _ = check_pass(PASS, n.done(n.op("Add", *((total, x) if last else (x, total)))), changes=1)
    fused, _ = check_pass(FuseEpilogue(), graph, changes=4 if bias else 2)
    assert sorted(len(op.attrs.epilogue) for op in fused.of_kind("MatMul")) == ([2, 2] if bias else [1, 1])


def test_a_sum_is_ordered_again_when_no_view_hides_its_products() -> None:
    n = Net(np.float64)
    _, q, x = products(n)
    flat = n.op("Add", n.matmul(n.op("Reshape", n.op("Relu", x), n.ints(10, 6)), 6), n.random(6))
    total = n.op("Add", n.op("Add", n.op("Reshape", flat, n.ints(2, 5, 6)), q), x)
    check_pass(HoistViews(), n.done(total), changes=2, rules={"hoist_view": 1, "order_sum": 1})
