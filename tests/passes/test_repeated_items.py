"""Arithmetic on constants that are the same for each item of a batch runs for one item."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net
from support.simulated import check_simulated, lowered

from optdnn.ir.graph import Value
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.canonicalize import Canonicalize

CANON = Canonicalize()
ITEMS, ROWS = 3, 64


def table(n: Net, *, last: float = 0.0, channels: int = 4) -> Value:
    """A table of ROWS x ROWS positions for each item; ``last`` changes an element of the last item."""
    found = np.repeat(n.rng.standard_normal((1, ROWS, ROWS, channels)), ITEMS, axis=0)
    found[-1, 3, 5, 1] += last
    return n.const(found)


def positions(n: Net, x: Value) -> Value:
    """ConViT's scores of positions: a product, a bias, and a softmax."""
    y = n.op("Transpose", n.op("Add", n.matmul(x, 2), n.random(2)), attrs=TransposeAttrs((0, 3, 1, 2)))
    return n.op("Softmax", y, attrs=SoftmaxAttrs(-1))


def test_a_table_of_positions_is_computed_for_one_item() -> None:
    n = Net(np.float64)
    y = n.op("Mul", positions(n, table(n)), n.random(1, 2, 1, 1))
    y = n.op("Add", n.op("Sigmoid", n.input(ITEMS, 2, ROWS, ROWS)), y)
    rules = {"repeated_items": 5, "redundant_expand": 1}
    graph, _ = check_pass(CANON, n.done(y), changes=6, rules=rules)
    assert not graph.of_kind("Expand")
    assert {graph.type(op.value).static_shape[0] for op in graph.of_kind("MatMul", "Softmax", "Transpose", "Mul")} == {
        1
    }


def test_the_result_is_expanded_where_nothing_else_has_the_batch() -> None:
    n = Net(np.float64)
    y = n.op("Concat", n.input(ITEMS, 2, ROWS, ROWS), n.op("Neg", positions(n, table(n))), attrs=ConcatAttrs(1))
    graph, _ = check_pass(CANON, n.done(y), changes=4, rules={"repeated_items": 4})
    assert [graph.type(op.value).static_shape for op in graph.of_kind("Expand")] == [(ITEMS, 2, ROWS, ROWS)]


def test_a_pointwise_operator_reads_one_item() -> None:
    n = Net(np.float64)
    x = n.input(ITEMS, ROWS, ROWS, 4)
    graph, _ = check_pass(CANON, n.done(n.op("Sub", table(n), x)), changes=1, rules={"repeated_operand": 1})
    assert graph.type(graph.of_kind("Sub")[0].inputs[0]).static_shape == (1, ROWS, ROWS, 4)


@pytest.mark.parametrize("place", ["first", "inner"])
def test_items_that_differ_stay(place: str) -> None:
    n = Net(np.float64)
    found = np.repeat(n.rng.standard_normal((1, ROWS, ROWS, 4)), ITEMS, axis=0)
    found[0 if place == "first" else 1, 0, 0, 0] += 1
    check_untouched(CANON, n.done(n.op("Sub", n.const(found), n.input(ITEMS, ROWS, ROWS, 4))))
    n = Net(np.float64)
    y = n.op("Concat", n.input(ITEMS, ROWS, ROWS, 2), n.matmul(table(n, last=1), 2), attrs=ConcatAttrs(3))
    check_untouched(CANON, n.done(y))


def test_zeros_of_different_sign_stay() -> None:
    n = Net(np.float64)
    zeros = np.zeros((ITEMS, ROWS, ROWS, 4))
    zeros[1] = -0.0
    check_untouched(CANON, n.done(n.op("Div", n.input(ITEMS, ROWS, ROWS, 4), n.const(zeros))))


def test_small_constants_and_operators_across_items_stay() -> None:
    n = Net(np.float64)
    small = n.const(np.ones((ITEMS, 2, 4)))
    check_untouched(CANON, n.done(n.op("Sub", small, n.input(ITEMS, 2, 4))))
    n = Net(np.float64)
    y = n.op("Transpose", table(n), attrs=TransposeAttrs((3, 0, 1, 2)))
    check_untouched(CANON, n.done(n.op("Concat", n.input(2, ITEMS, ROWS, ROWS), y, attrs=ConcatAttrs(0))))
    n = Net(np.float64)
    y = n.op("Softmax", table(n), attrs=SoftmaxAttrs(0))
    check_untouched(CANON, n.done(n.op("Concat", n.input(ITEMS, ROWS, ROWS, 4), y, attrs=ConcatAttrs(1))))
    n = Net(np.float64)
    rows = n.const(np.repeat(n.rng.standard_normal((1, 4096)), 4, axis=0))
    check_untouched(CANON, n.done(n.op("Concat", n.input(4, 8), n.matmul(rows, 8), attrs=ConcatAttrs(1))))


def test_an_expand_of_a_computed_value_stays() -> None:
    n = Net(np.float64)
    y = n.op("Expand", n.op("Relu", n.input(1, 8, ROWS)), n.ints(ITEMS, 8, ROWS))
    check_untouched(CANON, n.done(n.matmul(y, 4)))


def test_a_network_on_the_gpu() -> None:
    n = Net()
    y = n.op("Mul", positions(n, table(n)), n.random(1, 2, 1, 1))
    graph = n.done(n.op("Add", n.op("Sigmoid", n.input(ITEMS, 2, ROWS, ROWS)), y))
    assert len(lowered(graph, "fp16", target="cuda:sm_90a").steps) == 1
    check_simulated(graph, "fp16")
