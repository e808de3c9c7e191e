"""substitution: consecutive replacements of rows become products of matrices."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated
from support.sweep import all_pairs

from optdnn.ir.graph import Graph, Value
from optdnn.ops.create import TriluAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.unrolled_scans import UnrolledScans

GPU = PassContext(target="cuda:sm_90a")


def part(n: Net, x: Value, axis: int, begin: int, end: int) -> Value:
    return n.op("Slice", x, n.ints(begin), n.ints(end), n.ints(axis), n.ints(1))


def replaced(
    n: Net, a: Value, row: int, size: int, *, turned: bool = False, scaled: bool = False, every: bool = False
) -> Value:
    """``a[row, :row] += a[row, :row] @ a[:row, :row]``, as exporters write it; ``every``: ``a[row] @ a[:, :row]``."""
    whole = n.op("Gather", a, n.const(row, np.int64), attrs=GatherAttrs(1))
    own, rest = part(n, whole, 1, 0, row), part(n, whole, 1, row, size)
    block = part(n, a if every else part(n, a, 1, 0, row), 2, 0, row)
    column = n.op("Unsqueeze", whole if every else own, n.ints(2))
    product = n.op("Mul", *((block, column) if turned else (column, block)))
    total = n.op("ReduceSum", product, n.ints(-2), attrs=ReduceAttrs(keepdims=False))
    if scaled:
        total = n.op("Mul", total, n.const(0.5))
    added = n.op("Add", *((total, own) if turned else (own, total)))
    line = n.op("Unsqueeze", n.op("Concat", added, rest, attrs=ConcatAttrs(1)), n.ints(1))
    rows = [part(n, a, 1, 0, row), line, *([part(n, a, 1, row + 1, size)] if row + 1 < size else [])]
    return n.op("Concat", *rows, attrs=ConcatAttrs(1))


def substituted(
    size: int,
    first: int = 1,
    last: int | None = None,
    *,
    scaled: int = -1,
    turned: bool = False,
    masked: str = "zeros second",
    every: bool = False,
) -> Graph:
    n = Net()
    a = n.op("Mul", n.input(2, size, size), n.const(0.2))
    below = np.tril(np.ones((size, size)), -1) > 0
    if masked == "zeros first":
        a = n.op("Where", n.const(~below, np.bool_), n.const(0.0), a)
    elif masked == "lower":
        a = n.op("Neg", n.op("Trilu", a, n.const(-1, np.int64), attrs=TriluAttrs(upper=False)))
    elif masked:
        below[0, -1] = masked == "one is left"
        a = n.op("Where", n.const(below, np.bool_), a, n.const(0.0))
    for row in range(first, size if last is None else last):
        a = replaced(n, a, row, size, turned=turned, scaled=row == scaled, every=every)
    return n.done(n.op("Neg", a))


@all_pairs(
    {
        "turned": [False, True],
        "size": [8, 13, 16],
        "masked": ["zeros first", "zeros second", "lower"],
    }
)
def test_rows_become_rounds(size: int, turned: bool, masked: str) -> None:
    graph = substituted(size, turned=turned, masked=masked)
    done, _ = check_pass(UnrolledScans(), graph, changes=1, rules={"substitution": 1}, context=GPU)
    rounds = int(np.ceil(np.log2(size)))
    kinds = done.kinds()
    assert kinds["MatMul"] == 2 * (rounds - 1)
    assert kinds["Where"] == rounds + 1 + (masked != "lower")


@pytest.mark.parametrize("masked", ["zeros first", "lower"])
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_all_columns_with_triangular_matrices(turned: bool, masked: str) -> None:
    graph = substituted(13, turned=turned, masked=masked, every=True)
    done, _ = check_pass(UnrolledScans(), graph, changes=1, rules={"substitution": 1}, context=GPU)
    assert done.kinds()["MatMul"] == 2 * 3


@pytest.mark.parametrize("masked", ["", "one is left"])
def test_products_of_all_columns_with_other_matrices_stay(masked: str) -> None:
    graph = substituted(9, masked=masked, every=True)
    check_refused(UnrolledScans(), graph, because="rows are multiplied by all rows", rule="substitution", context=GPU)


@pytest.mark.parametrize("masked", ["", "one is left"])
def test_matrices_that_are_not_known_to_be_triangular(masked: str) -> None:
    done, _ = check_pass(UnrolledScans(), substituted(9, masked=masked), changes=1, context=GPU)
    assert done.kinds()["MatMul"] == 2 * 3 + 2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_program_has_few_launches(precision: str) -> None:
    program = check_simulated(substituted(16), precision)
    assert len(program.steps) < 25


@pytest.mark.parametrize(
    "graph", [substituted(7), substituted(9, 3), substituted(9, 1, 8), substituted(9, scaled=5), substituted(9, 2, masked="")],
    ids=["few rows", "not from the first row", "not to the last row", "another sum", "two rows of any matrix"],
)  # fmt: skip
def test_others_are_no_candidates(graph: Graph) -> None:
    check_untouched(UnrolledScans(), graph, GPU)
