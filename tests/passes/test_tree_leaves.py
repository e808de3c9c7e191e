"""tree_leaves: functions of one tree's result become its leaves, sums of trees one ensemble; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.forests import forest
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ArgAttrs, ReduceAttrs
from optdnn.ops.trees import TreeEnsembleAttrs
from optdnn.passes import tree_leaves
from optdnn.passes.tree_leaves import TreeLeaves
from optdnn.types import BOOL, FP32, INT64

PASS = TreeLeaves()
ROWS, FEATURES = 5, 4


def tree(n: Net, x: Value, columns: int = 1, weights: Any = None) -> Value:
    """A tree with three nodes and four leaves."""
    random = n.rng.integers
    arrays = [
        random(0, FEATURES, 7),
        np.append(np.round(n.rng.standard_normal(3), 1), np.zeros(4)).astype(FP32),
        np.array([0, 0, 0, 6, 6, 6, 6], np.uint8),
        np.array([1, 3, 5, 0, 0, 0, 0]),
        np.array([2, 4, 6, 0, 0, 0, 0]),
        np.zeros(7, np.bool_),
        np.zeros(1, np.int64),
        np.array([0, 0, 0, 0, 1, 2, 3]),
        (n.rng.standard_normal((4, columns)) if weights is None else np.array(weights)).astype(FP32),
    ]
    return n.op("TreeEnsemble", x, *(n.const(a, a.dtype) for a in arrays), attrs=TreeEnsembleAttrs())  # type: ignore[no-any-return]


def depth_of_leaf(n: Net, x: Value) -> Value:
    """Scikit-learn's isolation forest: a leaf's number is searched among the keys, and looked up."""
    leaf = n.op("Cast", tree(n, x, weights=[[3], [4], [5], [6]]), attrs=CastAttrs(INT64))
    equal = n.op("Equal", n.op("Unsqueeze", leaf, n.ints(-1)), n.ints(6, 4, 3))
    numbers = n.op("Cast", equal, attrs=CastAttrs(INT64))
    some = n.op(
        "Cast", n.op("ReduceMax", numbers, n.ints(-1), attrs=ReduceAttrs(keepdims=False)), attrs=CastAttrs(BOOL)
    )
    at = n.op("ArgMax", numbers, attrs=ArgAttrs(axis=-1, keepdims=False))
    found = n.op("Where", some, n.op("Gather", n.random(3), at, attrs=GatherAttrs(0)), 0.5)
    return n.op("Add", n.op("Exp", found), n.op("Mul", found, -2.0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [ROWS, 1, symbol("n")])
def test_lookups_by_the_number_of_a_leaf(rows: Any) -> None:
    n = Net()
    x = n.input(rows, FEATURES)
    y = n.op("Add", depth_of_leaf(n, x), n.op("Add", depth_of_leaf(n, x), depth_of_leaf(n, x)))
    graph, _ = check_pass(
        PASS, n.done(y), changes=4, kinds={"TreeEnsemble": 1}, rules={"functions_of_leaves": 3, "sums_of_trees": 1}
    )
    assert graph.constant_value(graph.of_kind("TreeEnsemble")[0].inputs[7]).size == 3  # type: ignore[union-attr]


def function(n: Net, y: Value, which: str) -> Value:
    if which == "softmax and matrix":
        return n.op("MatMul", n.op("Softmax", y), n.random(3, 2), attrs=MatMulAttrs())  # type: ignore[no-any-return]
    if which == "columns":
        return n.op("Relu", n.op("Gather", y, n.ints(2, 0), attrs=GatherAttrs(1)))  # type: ignore[no-any-return]
    if which == "parts":
        z = n.op("Mul", n.op("Reshape", y, n.ints(0, 3, 1)), n.random(1, 3, 2))
        return n.op("ReduceSum", z, n.ints(1), attrs=ReduceAttrs(keepdims=False))  # type: ignore[no-any-return]
    z = n.op("ReduceMean", y, n.ints(1), attrs=ReduceAttrs(keepdims=False))
    return n.op("Sqrt", n.op("Abs", z))  # type: ignore[no-any-return]


@pytest.mark.parametrize("which", ["softmax and matrix", "columns", "parts", "vector"])
def test_functions_of_rows(which: str) -> None:
    n = Net()
    y = function(n, tree(n, n.input(ROWS, FEATURES), 3), which)
    kinds = {"TreeEnsemble": 1, **({"Reshape": 1} if which == "vector" else {})}
    check_pass(PASS, n.done(y), changes=1, kinds=kinds, rules={"functions_of_leaves": 1})


def test_classes_are_integers() -> None:
    n = Net()
    scores = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]]
    y = n.op("ArgMax", tree(n, n.input(4 * ROWS, FEATURES), 3, scores), attrs=ArgAttrs(axis=1))
    y = n.op("Gather", n.ints(7, -2, 9), y, attrs=GatherAttrs(0))
    check_pass(PASS, n.done(y), changes=1, kinds={"TreeEnsemble": 1, "Cast": 1}, rules={"functions_of_leaves": 1})


def test_large_integers_are_refused() -> None:
    n = Net()
    y = n.op("ArgMax", tree(n, n.input(ROWS, FEATURES), 3), attrs=ArgAttrs(axis=1))
    y = n.op("Gather", n.ints(2**24 + 1, 2**24 + 1, 2**24 + 1), y, attrs=GatherAttrs(0))
    check_refused(PASS, n.done(y), because="too large for floats")


def test_large_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_leaves, "MOST_ELEMENTS", 7)
    n = Net()
    y = n.op("Mul", tree(n, n.input(ROWS, FEATURES)), n.random(1, 2))
    check_refused(PASS, n.done(y), because="for all leaves would be too large")


def test_two_functions_of_one_leaf_are_refused() -> None:
    n = Net()
    y = tree(n, n.input(ROWS, FEATURES), 3)
    check_refused(PASS, n.done(n.op("Exp", y), n.op("Neg", y)), because="several functions of its leaf are read")


def test_functions_of_several_rows_stay() -> None:
    n = Net()
    y = tree(n, n.input(ROWS, FEATURES), 3)
    check_untouched(PASS, n.done(n.op("ReduceSum", y, n.ints(0), attrs=ReduceAttrs(keepdims=True))))
    n = Net()
    y = tree(n, n.input(ROWS, FEATURES), 3)
    check_untouched(PASS, n.done(n.op("Mul", y, n.random(ROWS, 1))))  # a constant for each row
    n = Net()
    y = tree(n, n.input(ROWS, FEATURES), 3)
    check_untouched(PASS, n.done(n.op("Concat", y, y, attrs=ConcatAttrs(0))))


def test_a_function_of_a_forest_stays() -> None:
    n = Net()
    check_untouched(PASS, n.done(n.op("Exp", forest(n, n.input(ROWS, 6)))))


def test_forests_are_added_with_other_terms() -> None:
    n = Net()
    x = n.input(ROWS, 6)
    a, b = forest(n, x, columns=2), forest(n, x, columns=2, depth=1, modes=(0, 3))
    y = n.op("Add", n.op("Add", a, n.op("Exp", n.input(ROWS, 2, name="z"))), b)
    check_pass(PASS, n.done(y), changes=1, kinds={"TreeEnsemble": 1, "Exp": 1, "Add": 1}, rules={"sums_of_trees": 1})


@pytest.mark.parametrize("case", ["inputs", "maxima", "columns", "read"])
def test_other_sums_are_refused(case: str) -> None:
    n = Net()
    x = n.input(ROWS, 6)
    a = forest(n, x)
    b = forest(
        n, n.input(ROWS, 6, name="other") if case == "inputs" else x, aggregate="MAX" if case == "maxima" else "SUM"
    )
    more = [n.op("Exp", b)] if case == "read" else []
    if case == "columns":  # an ensemble of one column is repeated
        check_untouched(PASS, n.done(n.op("Add", a, forest(n, x, columns=2))))
        return
    check_refused(PASS, n.done(n.op("Add", a, b), *more), because="read different features, are read elsewhere")


def test_selected_features() -> None:
    n = Net()
    x = n.op("Gather", n.input(ROWS, 9), n.ints(3, 1, 8, 0, -1, 5), attrs=GatherAttrs(1))
    check_pass(PASS, n.done(forest(n, x)), changes=1, kinds={"TreeEnsemble": 1}, rules={"selected_features": 1})
    n = Net()
    x = n.op("Gather", n.input(9, 6), n.ints(3, 1, 8), attrs=GatherAttrs(0))
    check_untouched(PASS, n.done(forest(n, x)))


@pytest.mark.slow
def test_a_sum_of_many_trees() -> None:
    """A forest may have more trees than Python allows nested calls."""
    n = Net()
    x = n.input(ROWS, FEATURES)
    one = tree(n, x)
    operands = n.graph.op(one).inputs
    y = one
    for _ in range(1200):
        y = n.op("Add", y, n.op("TreeEnsemble", *operands, attrs=TreeEnsembleAttrs()))
    graph, _ = check_pass(PASS, n.done(y), changes=1, kinds={"TreeEnsemble": 1}, rules={"sums_of_trees": 1})
    assert graph.constant_value(graph.of_kind("TreeEnsemble")[0].inputs[7]).size == 1201  # type: ignore[union-attr]
