"""gathered_sums: adaptive pools as PyTorch decomposes them are products; refused with the reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.rules import gathered_sums
from optdnn.passes.transform_products import TransformProducts

PASS = TransformProducts()
RULE = {"gathered_sums": 1}


def windows(size: int, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of each bin, with the last one repeated up to the longest bin, and the number of rows of each bin."""
    first = [i * size // bins for i in range(bins)]
    count = [-(-(i + 1) * size // bins) - f for i, f in enumerate(first)]
    places = [[f + min(k, c - 1) for k in range(max(count))] for f, c in zip(first, count, strict=True)]
    return np.array(places), np.array(count)


def adaptive(n: Net, x: Value, bins: int, *, own: bool = True, divided: bool = True) -> Value:
    """``adaptive_avg_pool2d`` of images [batch, channels, size, size], written as PyTorch's exporter does."""
    size = n.dims(x)[-1]
    assert isinstance(size, int)
    rows, count = windows(size, bins)
    longest = rows.shape[1]
    index = np.stack(np.broadcast_arrays(rows[:, :, None, None], rows[None, None]), -1)
    picked = n.op(
        "GatherND",
        n.op("Transpose", x, attrs=TransposeAttrs((2, 3, 0, 1))),
        n.const(index, np.int64),
        attrs=GatherNDAttrs(),
    )
    picked = n.op("Transpose", picked, attrs=TransposeAttrs((4, 5, 0, 1, 2, 3)))
    if own:
        beyond = np.arange(longest) >= count[:, None]
        picked = n.op("Where", n.const(beyond[:, :, None, None], bool), n.const(0.0), picked)
        picked = n.op("Where", n.const(beyond, bool), n.const(0.0), picked)
    total = None
    for i in range(longest):
        row = n.op("Gather", picked, n.const(i, np.int64), attrs=GatherAttrs(3))
        for j in range(longest):
            one = n.op("Gather", row, n.const(j, np.int64), attrs=GatherAttrs(4))
            total = one if total is None else n.op("Add", total, one)
    assert total is not None
    return n.op("Div", total, n.const(np.outer(count, count))) if divided else total


@pytest.mark.parametrize(("size", "bins"), [(16, 7), (8, 7), (10, 3), (9, 3)])
@pytest.mark.parametrize("batch", [1, 2])
def test_adaptive_pools_are_products(size: int, bins: int, batch: int) -> None:
    n = Net()
    graph = n.done(adaptive(n, n.op("Relu", n.input(batch, 3, size, size)), bins))
    result, _ = check_pass(PASS, graph, changes=1, rules=RULE)
    assert result.kinds()["MatMul"] == 1
    assert not {"Add", "Div", "Where", "Gather", "GatherND"} & set(result.kinds())
    assert result.type(result.of_kind("MatMul")[0].value).dims == (3 * batch, bins * bins)


def test_sums_that_others_read_stay() -> None:
    """The division has another reader of its operand: the product replaces the sum alone, and the result that is added stays."""
    n = Net()
    x = n.input(1, 2, 8, 8)
    total = adaptive(n, x, 3, divided=False)
    graph = n.done(n.op("Div", total, n.const(np.full((3, 3), 9.0))), n.op("Add", total, n.random(3, 3)))
    result, _ = check_pass(PASS, graph, changes=1, rules=RULE)
    assert result.kinds()["Div"] == result.kinds()["Add"] == 1


@pytest.mark.parametrize("change", ["a divisor of each channel", "the sum divides", "an addition"])
def test_what_follows_stays_outside(change: str) -> None:
    n = Net()
    total = adaptive(n, n.input(1, 2, 8, 8), 3, divided=False)
    if change == "an addition":
        graph = n.done(n.op("Add", total, n.input(1, 2, 3, 3, name="y")))
    elif change == "the sum divides":
        graph = n.done(n.op("Div", n.const(1.0), n.op("Abs", n.op("Add", total, n.const(50.0)))))
    else:
        graph = n.done(n.op("Div", total, n.const(np.arange(1.0, 3.0).reshape(1, 2, 1, 1))))
    result, _ = check_pass(PASS, graph, changes=1, rules=RULE)
    assert result.kinds()["MatMul"] == 1
    assert {"Div", "Add"} & set(result.kinds())


def few(terms: int, size: int = 8) -> Graph:
    n = Net()
    x = n.input(1, 2, size, size)
    parts = [n.op("Gather", x, n.const(k, np.int64), attrs=GatherAttrs(3)) for k in range(terms)]
    total = parts[0]
    for part in parts[1:]:
        total = n.op("Add", total, part)
    return n.done(total)


def test_few_terms_and_other_sums_are_no_candidates() -> None:
    check_untouched(PASS, few(gathered_sums.LEAST_TERMS - 1))
    n = Net()
    x = n.input(2, 3)
    total = x
    for k in range(6):
        total = n.op("Add", total, n.op("Mul", x, float(k + 2)))
    check_untouched(PASS, n.done(total))
    n = Net()
    x, y = n.input(2, 8), n.input(2, 8, name="y")
    parts = [n.op("Gather", v, n.const(k, np.int64), attrs=GatherAttrs(1)) for k in range(4) for v in (x, y)]
    total = parts[0]
    for part in parts[1:]:
        total = n.op("Add", total, part)
    check_untouched(PASS, n.done(total))


def test_matrices_of_zeros_are_refused() -> None:
    rows = gathered_sums.SPARSEST * gathered_sums.LEAST_TERMS + 1
    n = Net()
    x = n.input(2, rows)
    parts = [n.op("Gather", x, n.ints(*range(k, 20 + k)), attrs=GatherAttrs(1)) for k in range(4)]
    total = parts[0]
    for part in parts[1:]:
        total = n.op("Add", total, part)
    check_refused(PASS, n.done(total), because=f"a matrix of {rows} x 20 for sums of 4 elements is no gain")


def test_large_matrices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_sums, "MOST", 100)
    n = Net()
    graph = n.done(adaptive(n, n.input(1, 2, 8, 8), 3))
    check_refused(PASS, graph, because=f"a matrix of 64 x 9 for sums of {math.prod((4, 4))} elements is no gain")


def test_terms_of_different_entries_have_one_matrix_for_all() -> None:
    n = Net()
    x = n.input(4, 6)
    parts = [n.op("Gather", x, n.ints(k % 4), attrs=GatherAttrs(0)) for k in range(5)]
    total = parts[0]
    for part in parts[1:]:
        total = n.op("Add", total, part)
    result, _ = check_pass(PASS, n.done(total), changes=1, rules=RULE)
    assert result.type(result.of_kind("MatMul")[0].value).dims == (1, 6)
