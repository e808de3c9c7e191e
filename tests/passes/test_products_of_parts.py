"""products_of_parts: products of the parts of tensors are one product of stacks; others stay, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.products_of_parts import ProductsOfParts

PASS = ProductsOfParts()
EXCHANGED = TransposeAttrs((0, 1, 3, 2))
COUNT, ROWS, SIZE = 5, 4, 8


def sliced(n: Net, x: Value, t: int, made: dict[Value, Any]) -> Value:
    return n.op("Slice", x, n.ints(t * ROWS), n.ints((t + 1) * ROWS), n.ints(2))


def split(n: Net, x: Value, t: int, made: dict[Value, Any]) -> Value:
    if x not in made:
        made[x] = n.op("Split", x, n.ints(*[ROWS] * COUNT), attrs=SplitAttrs(2), outputs=COUNT)
    return made[x][t]


def taken(n: Net, x: Value, t: int, made: dict[Value, Any]) -> Value:
    if x not in made:
        made[x] = n.op("Reshape", x, n.ints(2, 3, COUNT, ROWS, SIZE))
    return n.op("Gather", made[x], n.const(t, np.int64), attrs=GatherAttrs(2))


def chunks(
    how: str = "slices", *, states: str = "none", relu: int = -1, swap: int = -1, softmax: bool = False,
    between: Callable[[Net, Value], Value] | None = None, count: int = COUNT, joined: bool = True,
) -> Graph:  # fmt: skip
    """Linear attention by chunks: ``q k^T`` of each chunk times its values, with ``states`` also the state of earlier chunks.
    ``relu``: a chunk whose queries are changed; ``swap``: a chunk with the values of the next one."""
    n, made = Net(), dict[Value, Any]()
    q, k, v = (n.op("Abs", n.input(2, 3, COUNT * ROWS, SIZE, name=name)) for name in "qkv")
    cut = {"slices": sliced, "gathers": taken, "splits": split}[how]
    decay, state = n.random(ROWS, ROWS), None
    found = []
    for t in range(count):
        a, b, c = cut(n, q, t, made), cut(n, k, t, made), cut(n, v, t if t != swap else t + 1, made)
        a = n.op("Relu", a) if t == relu else a
        b = n.op("Transpose", b, attrs=EXCHANGED)
        if between is not None:
            b = between(n, b)
        scores = n.op("MatMul", a, b)
        scores = n.op("Softmax", scores) if softmax else n.op("Mul", scores, decay)
        y = n.op("MatMul", scores, c)
        if states != "none":
            if state is not None:
                y = n.op("Add", y, n.op("MatMul", a, state))
            change = (
                c
                if states == "pointwise" or state is None
                else n.op("Sub", c, n.op("MatMul", cut(n, k, t, made), state))
            )
            grown = n.op("MatMul", b, change)
            state = grown if state is None else n.op("Add", n.op("Mul", state, n.const(0.5)), grown)
        found.append(y)
    return n.done(n.op("Concat", *found, attrs=ConcatAttrs(2))) if joined else n.done(*found)


@pytest.mark.parametrize("how", ["slices", "splits", "gathers"])
def test_products_of_parts_are_one(how: str) -> None:
    graph, _ = check_pass(PASS, chunks(how), changes=3, rules={"products_of_parts": 2, "stages_of_parts": 1})
    assert [graph.type(op.value).dims[0] for op in graph.of_kind("MatMul")] == [COUNT, COUNT]
    assert len(graph.of_kind("Mul")) == 1


def test_parts_that_no_concat_joins() -> None:
    graph, _ = check_pass(PASS, chunks(joined=False), changes=3)
    assert len(graph.of_kind("MatMul")) == 2


def test_states_of_pointwise_steps_are_joined() -> None:
    graph, _ = check_pass(
        PASS,
        chunks(states="pointwise"),
        changes=6,
        rules={"products_of_parts": 4, "stages_of_parts": 2},
    )
    assert len(graph.of_kind("MatMul")) == 4
    assert len(graph.of_kind("Add")) == 1 + COUNT - 1  # of the results, and of the states


def test_products_that_depend_on_one_another_stay() -> None:
    graph, report = check_pass(PASS, chunks(states="products"), changes=3)
    reasons = {r.reason for r in report.refused}
    assert "the product of one part depends on the product of another part" in reasons
    assert any("each operand depends on the previous one through a product" in reason for reason in reasons)
    assert len(graph.of_kind("MatMul")) == 3 * COUNT


def test_factors_of_such_products_are_computed_at_once() -> None:
    def scaled(n: Net, x: Value) -> Value:
        return n.op("Mul", x, n.op("Exp", n.op("ReduceMean", x, n.ints(-1), attrs=ReduceAttrs())))

    graph, _ = check_pass(PASS, chunks(states="products", between=scaled), changes=4)
    assert len(graph.of_kind("ReduceMean")) <= 3


@pytest.mark.parametrize(
    ("between", "kind"),
    [
        (lambda n, x: n.op("Unsqueeze", n.op("Squeeze", n.op("Unsqueeze", x, n.ints(0)), n.ints(0)), n.ints(0)), ""),
        (lambda n, x: n.op("Div", x, n.op("ReduceMax", x, n.ints(2), attrs=ReduceAttrs())), "ReduceMax"),
        (lambda n, x: n.op("Slice", x, n.ints(0), n.ints(ROWS), n.ints(-1)), ""),
        (lambda n, x: n.op("Where", n.op("Less", x, n.const(0.3)), x, n.random(ROWS)), "Where"),
        (lambda n, x: n.op("Add", x, n.op("Gather", x, n.ints(2), attrs=GatherAttrs(2))), ""),
        (lambda n, x: n.op("Clip", x, n.const(0.1), n.op("ReduceMean", x, attrs=ReduceAttrs(keepdims=False))), "Min"),
        (lambda n, x: n.op("PRelu", n.const(np.full((2, 3, SIZE, ROWS), -0.5)), x), "PRelu"),
    ],
    ids=["reshapes", "a maximum", "a slice", "a selection", "one row", "own bounds", "own slopes"],
)
def test_operators_of_parts_before_products(between: Callable[[Net, Value], Value], kind: str) -> None:
    graph, _ = check_pass(PASS, chunks(between=between), changes=3)
    assert len(graph.of_kind("MatMul")) == 2
    assert not kind or len(graph.of_kind(kind)) == 1


def test_a_changed_part_divides_the_run() -> None:
    graph, _ = check_pass(PASS, chunks(relu=2), changes=6)
    assert [len(graph.type(op.value).dims) for op in graph.of_kind("MatMul")].count(5) == 4
    assert len(graph.of_kind("MatMul")) == 6


def layers(*, own: bool = False, bias: bool = True, relu: int = 3) -> Graph:
    """A layer with the same weights for each part, or with ``own`` weights. ``relu``: the number of parts with an activation."""
    n = Net()
    x, w, b = n.op("Abs", n.input(2, 12, name="x")), n.random(4, 6), n.random(6)
    found = []
    for k, part in enumerate(n.op("Split", x, n.ints(4, 4, 4), attrs=SplitAttrs(1), outputs=3)):
        y = n.op("MatMul", part, n.random(4, 6) if own else w)
        y = n.op("Add", y, b) if bias else y
        found.append(n.op("Relu", y) if k < relu else y)
    return n.done(*found)


def test_stages_after_products_of_parts() -> None:
    rules = {"products_of_parts": 1, "stages_of_parts": 2}
    graph, _ = check_pass(PASS, layers(), changes=3, rules=rules)
    assert graph.kinds() == {**graph.kinds(), "MatMul": 1, "Add": 1, "Relu": 1, "Gather": 3}


def test_stages_of_some_parts_stay() -> None:
    rules = {"products_of_parts": 1, "stages_of_parts": 1}
    graph, _ = check_pass(PASS, layers(relu=2), changes=2, rules=rules)
    assert graph.kinds() == {**graph.kinds(), "MatMul": 1, "Add": 1, "Relu": 2, "Gather": 3}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_program_has_a_launch_for_all_parts(precision: str) -> None:
    found = kinds(check_simulated(chunks(states="pointwise"), precision))
    assert found.count("MatMul") + found.count("ReduceSum") == 4  # very small products are sums
    assert found.count("PointwiseScan") <= 1


def lone() -> Graph:
    n = Net()
    x = n.op("Abs", n.input(2, 3, 8, 8))
    part = n.op("Slice", x, n.ints(0), n.ints(4), n.ints(2))
    return n.done(n.op("MatMul", part, n.random(8, 8)))


def overlapping() -> Graph:
    n = Net()
    x = n.op("Abs", n.input(2, 3, 8, 8))
    parts = [n.op("Slice", x, n.ints(t), n.ints(t + 4), n.ints(2)) for t in range(4)]
    return n.done(*(n.op("MatMul", p, n.random(8, 8)) for p in parts))


def vectors() -> Graph:
    n = Net()
    x = n.op("Abs", n.input(8, 8))
    y = n.op("Abs", n.input(8, name="y"))
    return n.done(*(n.op("MatMul", n.op("Slice", x, n.ints(t), n.ints(t + 2), n.ints(0)), y) for t in (0, 2, 4, 6)))


def large() -> Graph:
    n = Net()
    x, w = n.op("Abs", n.input(1, 2048, 256)), n.random(256, 1024)
    parts = n.op("Split", x, n.ints(1024, 1024), attrs=SplitAttrs(1), outputs=2)
    return n.done(*(n.op("MatMul", p, w) for p in parts))


def outer() -> Graph:
    """Products of a column and a row of each step."""
    n = Net()
    x, y = n.op("Abs", n.input(4, 8, 1)), n.op("Abs", n.input(4, 1, 8, name="y"))
    parts = [[n.op("Slice", v, n.ints(t), n.ints(t + 1), n.ints(0)) for v in (x, y)] for t in range(4)]
    return n.done(*(n.op("MatMul", *pair) for pair in parts))


REFUSED = {
    "it is a part of attention": chunks(softmax=True),
    "each part's product is large enough": large(),
    "computed differently": vectors(),
    "each part has a matrix of its own": layers(own=True),
    "a product of one term": outer(),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    check_refused(PASS, REFUSED[why], because=why)


def test_parts_of_different_places() -> None:
    graph, report = check_pass(PASS, chunks(swap=1, count=3, joined=False), changes=2)
    assert any("computed differently" in r.reason for r in report.refused)
    assert len(graph.of_kind("MatMul")) == 1 + 3


@pytest.mark.parametrize("graph", [lone(), overlapping()], ids=["one part", "overlapping"])
def test_no_candidates(graph: Graph) -> None:
    check_untouched(PASS, graph)


def test_equal_operators_for_all_parts_are_one() -> None:
    """Passes that rewrite products make such operators: a transpose of the same matrix for each part."""
    n, made = Net(), dict[Value, Any]()
    x, matrix = n.input(2, 3, COUNT * ROWS, SIZE, name="x"), n.op("Abs", n.input(2, 3, SIZE, SIZE, name="m"))
    rows, parts = n.op("Abs", x), []
    for t in range(COUNT):
        other = n.op("Transpose", matrix, attrs=EXCHANGED)
        parts.append(n.op("Mul", n.op("MatMul", sliced(n, rows, t, made), other), 0.5))
    graph, _ = check_pass(PASS, n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2))), changes=2)
    (product,) = graph.of_kind("MatMul")
    assert graph.type(product.value).dims[0] == COUNT
