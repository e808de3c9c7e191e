"""appended_rows: states to which an iteration may append a row; refused where rows are of other sizes, or may not be computable."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support.check import check_pass, check_refused, check_untouched
from support.fallback import BOOL, I64, F, model, node
from support.simulated import check_simulated, feeds_of, lowered, simulate

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.passes.appended_rows import AppendedRows
from optdnn.passes.base import PassContext

TRIPS = 7
GPU = PassContext(target="cuda:sm_90a")
ROW = [node("Tanh", "x", "y"), node("Unsqueeze", "y first", "one")]
Nodes = list[onnx.NodeProto]


def branch(nodes: Nodes, result: str) -> onnx.GraphProto:
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info(result, F, None)])


def loop(
    row: Nodes = ROW, *, taken: bool = True, start: Any = 0, axis: int = 0, reads: bool = False, order: str = "acc one",
    other: Nodes | None = None,
) -> Graph:  # fmt: skip
    """Appends the hyperbolic tangents of a row of ``xs`` if the row's sum is larger than a state, the row's sum before."""
    grown = branch([*row, node("Concat", order, "more", axis=axis)], "more")
    same = branch(
        other or [node("Identity", "acc", "acc_same")], (other or [node("Identity", "acc", "acc_same")])[-1].output[0]
    )
    chosen = helper.make_node(
        "If", ["take"], ["acc1"], then_branch=grown if taken else same, else_branch=same if taken else grown
    )
    nodes = [
        node("Identity", "c", "go"), node("Gather", "xs i", "x", axis=0), node("ReduceSum", "x", "sum", keepdims=0),
        node("Greater" if taken else "LessOrEqual", "sum before", "take"), chosen, node("Mul", "x half", "scaled"),
    ]  # fmt: skip
    if reads:
        nodes += [node("Shape", "acc", "size")]
    states = [("before", F, []), ("acc", F, ["n", 3]), ("again", F, [3])]
    made = [("sum", F, []), ("acc1", F, None), ("scaled", F, [3]), ("size", I64, [2]) if reads else ("x", F, [3])]
    inner = helper.make_graph(
        nodes,
        "body",
        [helper.make_tensor_value_info(*v) for v in [("i", I64, []), ("c", BOOL, []), *states]],
        [helper.make_tensor_value_info(*v) for v in [("go", BOOL, []), *made]],
    )
    inputs = [("xs", F, [TRIPS, 3]), ("begin", F, []), ("a0", F, [start, 3]), ("z0", F, [3]), ("k", I64, [])]
    whole = node("Loop", "trips - begin a0 z0", "last acc_end scaled_end rows", body=inner)
    outputs = [("last", F, None), ("acc_end", F, None), ("scaled_end", F, None), ("rows", I64 if reads else F, None)]
    constants = {"trips": np.array(TRIPS), "half": np.array(0.5, np.float32), "first": np.array([0])}
    return import_model(model([whole], inputs, outputs, **constants))


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("start", [0, 2])
def test_appended_rows_are_selected_after_the_loop(taken: bool, start: int) -> None:
    after, _ = check_pass(
        AppendedRows(), loop(taken=taken, start=start), changes=1, rules={"appended_rows": 1}, context=GPU
    )
    (whole,) = after.of_kind("Loop")
    assert not whole.attrs.body.graph.of_kind("If")
    assert len(after.of_kind("Compress")) == 1
    assert len(after.of_kind("Concat")) == bool(start)


def test_only_the_selection_runs_on_the_host() -> None:
    program = check_simulated(loop(), "fp32")
    assert [s.params["kind"] for s in program.steps if s.executor == "host"] == ["Compress"]


FAILS = [node("Gather", "xs k", "y", axis=0), node("Unsqueeze", "y first", "one")]
TWICE = [node("Tanh", "x", "y"), node("Unsqueeze", "y first", "a"), node("Concat", "a a", "one", axis=0)]


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: loop(TWICE), "an iteration appends several rows"),
        (lambda: loop(FAILS), "an operator may fail in an iteration that appends nothing"),
        (lambda: loop(start="m"), "sizes of the rows that it appends are not known"),
    ],
)
def test_refusals(graph: Any, because: str) -> None:
    check_refused(AppendedRows(), graph(), because=because, context=GPU)


@pytest.mark.parametrize(
    "graph",
    [
        lambda: loop(reads=True),
        lambda: several("same"),
        lambda: several("grown"),
        lambda: loop(order="one acc"),
        lambda: loop(other=[node("Neg", "acc", "negative")]),
    ],
)
def test_other_states_are_left(graph: Any) -> None:
    check_untouched(AppendedRows(), graph(), context=GPU)


def test_other_targets_are_left() -> None:
    check_untouched(AppendedRows(), loop(), context=PassContext(target="cpu"))


def several(reads: str = "") -> Graph:
    """A decoder without blanks: a larger row is appended, and it becomes the state with which the next rows are compared.

    ``reads``: the branch that also computes that state from the rows."""
    total = node("ReduceSum", "acc first", "turned" if reads == "same" else "now", keepdims=0)
    grown = helper.make_graph(
        [
            total if reads == "grown" else node("Mul", "x half", "now"), node("Unsqueeze", "now first", "one"),
            node("Concat", "acc one", "more", axis=0),
        ],
        "grown", [], [helper.make_tensor_value_info("now", F, None), helper.make_tensor_value_info("more", F, None)],
    )  # fmt: skip
    same = helper.make_graph(
        [total if reads == "same" else node("Neg", "state", "turned"), node("Identity", "acc", "acc_same")],
        "same", [], [helper.make_tensor_value_info("turned", F, None), helper.make_tensor_value_info("acc_same", F, None)],
    )  # fmt: skip
    chosen = helper.make_node("If", ["take"], ["state1", "acc1"], then_branch=grown, else_branch=same)
    nodes = [
        node("Identity", "c", "go"), node("Gather", "xs i", "x", axis=0), node("ReduceSum", "x", "sum", keepdims=0),
        node("ReduceSum", "state", "before", keepdims=0), node("Greater", "sum before", "take"), chosen,
    ]  # fmt: skip
    inner = helper.make_graph(
        nodes,
        "body",
        [
            helper.make_tensor_value_info(*v)
            for v in (("i", I64, []), ("c", BOOL, []), ("state", F, [3]), ("acc", F, ["n", 3]))
        ],
        [helper.make_tensor_value_info(*v) for v in (("go", BOOL, []), ("state1", F, [3]), ("acc1", F, None))],
    )
    whole = node("Loop", "trips - s0 a0", "last acc_end", body=inner)
    inputs = [("xs", F, [TRIPS, 3]), ("s0", F, [3]), ("a0", F, [2, 3])]
    constants = {"trips": np.array(TRIPS), "half": np.array(0.5, np.float32), "first": np.array([0])}
    return import_model(model([whole], inputs, [("last", F, None), ("acc_end", F, None)], **constants))


def test_other_results_of_the_if_remain() -> None:
    after, _ = check_pass(AppendedRows(), several(), changes=1, context=GPU)
    (whole,) = after.of_kind("Loop")
    (chosen,) = whole.attrs.body.graph.of_kind("If")
    assert len(chosen.outputs) == 1
    program = lowered(several(), "fp32")
    assert not [s for s in program.steps if s.executor == "host" and s.params["kind"] in ("If", "Loop")]
    feeds = feeds_of(several())
    for want, got in zip(evaluate(several(), feeds).values(), simulate(program, feeds).values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
