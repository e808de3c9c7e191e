"""Ensembles of decision trees on a GPU: a warp for each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forests import CASES, forest
from support.host import needs_compiler
from support.net import Net
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, lowered, simulate

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.kernels.builder import Builder
from optdnn.kernels.index import trees
from optdnn.runtime.cuda.gpu_facts import named
from optdnn.types import FP32, FP64, INT64, DType


def graph_of(dtype: DType = FP32, **case: Any) -> Graph:
    n = Net()
    x = n.input(5, 6, dtype=dtype)
    return n.done(forest(n, x, **case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forests_have_a_kernel(case: dict[str, Any]) -> None:
    graph = graph_of(**case)
    program = lowered(graph, "fp32")
    assert [s.executor for s in program.steps] == ["cuda"]
    feeds = feeds_of(graph)
    (got,), (want,) = simulate(program, feeds).values(), evaluate(graph, feeds).values()
    np.testing.assert_array_equal(got, want)


@needs_compiler
@pytest.mark.parametrize("case", [*CASES, {"dtype": INT64}, {"dtype": FP64}], ids=str)
def test_the_kernel_on_the_processor(case: dict[str, Any], tmp_path: Path) -> None:
    graph = graph_of(**case)
    feeds = feeds_of(graph)
    if feeds["x"].dtype.kind == "f":
        feeds["x"] = np.round(feeds["x"], 1)  # values that equal thresholds
        feeds["x"][1, 2:4] = np.nan
        feeds["x"][2] = np.inf
    assert compare_steps(lowered(graph, "fp32"), feeds, 1e-6, tmp_path) == 1


def test_comparisons_are_not_rounded_in_fp16() -> None:
    """A feature that is rounded may take the other branch."""
    n = Net()
    x = n.op("Mul", n.op("Add", n.input(64, 6), 1000.0), 3.0)
    graph = n.done(n.op("Mul", forest(n, x, depth=0), forest(n, n.op("Div", x, 3003.0), depth=4)))
    check_simulated(graph, "fp16")


def test_forests_without_constant_trees_run_on_the_cpu() -> None:
    n = Net()
    value = forest(n, n.input(5, 6))
    op = n.graph.op(value)
    weights = n.graph.constant_value(op.inputs[9])
    assert weights is not None
    given = n.op("Relu", n.input(*weights.shape, name="weights"))
    y = n.op("TreeEnsemble", *op.inputs[:9], given, attrs=op.attrs)
    (row,) = lowered(n.done(y), "fp32").meta["host"]["operators"]
    assert "its trees are not constants" in row["why"]


def test_a_forest_without_trees_runs_on_the_cpu() -> None:
    n = Net()
    op = n.graph.op(forest(n, n.input(5, 6)))
    y = n.op("TreeEnsemble", *op.inputs[:7], n.ints(), *op.inputs[8:], attrs=op.attrs)
    program = lowered(n.done(n.op("Add", y, n.input(5, 1, name="z"))), "fp32")
    assert "TreeEnsemble" not in [s.params["op"]["kind"] for s in program.steps if s.executor == "cuda"]


def test_a_table_of_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "NODE", 1 << 24)
    graph = graph_of(depth=3, count=10)
    b = Builder(graph, named("h200"))
    (op,) = graph.of_kind("TreeEnsemble")
    assert "more nodes than a kernel can count" in str(trees.TACTIC.refuse(b, op))


def test_the_predicted_time_grows_with_trees_depth_and_rows() -> None:
    def seconds(rows: int, **case: Any) -> float:
        n = Net()
        graph = n.done(forest(n, n.input(rows, 6), **case))
        (op,) = graph.of_kind("TreeEnsemble")
        found = trees.TACTIC.seconds(Builder(graph, named("h200")), op)
        assert found is not None
        return found

    least = seconds(5)
    assert least == seconds(4000)
    assert all(seconds(*more[0], **more[1]) > least for more in (((5,), {"depth": 5}), ((5,), {"count": 100}), ((9000,), {})))  # fmt: skip
