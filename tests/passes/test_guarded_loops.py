"""guarded_loops: Loops that computed values may end run all their iterations, of which those after the end change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support.check import check_pass, check_refused, check_untouched
from support.fallback import BOOL, I64, F, model, node
from support.simulated import check_simulated, simulate

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.passes import guarded_loops
from optdnn.passes.base import PassContext
from optdnn.passes.guarded_loops import GuardedLoops

TRIPS = 6
GPU = PassContext(target="cuda:sm_90a")
GROWS = [node("MatMul", "s w", "m"), node("Add", "m s", "t"), node("ReduceMax", "t", "top", keepdims=0)]
ENDS = node("Less", "top limit", "go")
WIDE = [node("MatMul", "s w", "m"), node("Concat", "m s", "t", axis=0), node("ReduceMax", "t", "top", keepdims=0)]
"""A state that grows by two rows in each iteration."""


def loop(
    nodes: list[onnx.NodeProto] = GROWS, *, ends: onnx.NodeProto = ENDS, begins: str = "", trips: int | None = TRIPS,
    row: str = "top", state: Any = (2, 3),
) -> Graph:  # fmt: skip
    """A state of (2, 3) that grows until its largest element reaches ``limit``. ``begins``: whether the first iteration runs."""
    inner = helper.make_graph(
        [*nodes, ends, node("Identity", row, "row")],
        "body",
        [helper.make_tensor_value_info(*x) for x in (("i", I64, []), ("c", BOOL, []), ("s", F, list(state)))],
        [helper.make_tensor_value_info(*x) for x in (("go", BOOL, None), ("t", F, list(state)), ("row", F, None))],
    )
    whole = node("Loop", f"{'-' if trips is None else 'trips'} {begins or '-'} s0", "end rows", body=inner)
    inputs = [("s0", F, [2, 3]), ("w", F, [3, 3]), ("limit", F, []), ("table", F, [TRIPS, 3]), ("on", BOOL, [])]
    constants = {"trips": np.array(trips or 0), "six": np.array(6), "true": np.array(True)}
    return import_model(model([whole], inputs, [("end", F, None), ("rows", F, None)], **constants))


def feeds(limit: float, on: bool = True) -> dict[str, np.ndarray]:
    r = np.random.default_rng(3)
    tensors = {"s0": r.random((2, 3)), "w": r.random((3, 3)), "table": r.random((TRIPS, 3)), "limit": np.array(limit)}
    return {**{k: v.astype(np.float32) for k, v in tensors.items()}, "on": np.array(on)}


@pytest.mark.parametrize("begins", ["", "true", "on"])
@pytest.mark.parametrize("limit", [0.0, 3.0, 9.0, 1e9])
def test_iterations_after_the_end_change_nothing(begins: str, limit: float) -> None:
    before = loop(begins=begins)
    after, _ = check_pass(GuardedLoops(), before, changes=1, rules={"guarded_loop": 1}, context=GPU)
    assert after.of_kind("Loop")
    for on in (True, False):
        given = feeds(limit, on)
        wanted, found = evaluate(before, given), evaluate(after, given)
        for want, got in zip(wanted.values(), found.values(), strict=True):
            np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize("limit", [3.0, 1e9])
def test_a_gpu_computes_the_iterations(limit: float) -> None:
    graph = loop()
    program = check_simulated(graph, "fp32")
    assert {s.executor for s in program.steps if s.executor != "host"} == {"cuda", "copy"}
    wanted, found = evaluate(graph, feeds(limit)), simulate(program, feeds(limit))
    for want, got in zip(wanted.values(), found.values(), strict=True):
        np.testing.assert_allclose(want, got, rtol=1e-5)


OTHER = [node("MatMul", "w w", "m"), node("Add", "m m", "t"), node("ReduceMax", "t", "top", keepdims=0)]
"""A state of three rows, whatever the state before was."""
NUMBERED = [node("Gather", "table i", "x", axis=0), *GROWS[:1], node("Add", "m x", "t"), GROWS[-1]]
"""It adds a row of a table that has as many rows as there are iterations."""
LATER = [node("Add", "i six", "k"), node("Gather", "table k", "x", axis=0), *NUMBERED[1:]]
LIGHT = [node("Add", "s w3", "t"), node("ReduceMax", "t", "top", keepdims=0), node("ReduceMax", "w", "w3", keepdims=0)]


def test_rows_of_a_table_with_enough_rows() -> None:
    check_pass(GuardedLoops(), loop(NUMBERED), changes=1, context=GPU)


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: loop(LATER), "an operator may fail after its end"),
        (lambda: loop(NUMBERED, trips=TRIPS + 1), "an operator may fail after its end"),
        (lambda: loop(NUMBERED, begins="on"), "an operator may fail after its end"),
        (lambda: loop(LIGHT[::-1]), "its iterations are short"),
        (lambda: loop(WIDE, state=("n", 3)), "depend on data"),
        (lambda: loop(OTHER, state=("n", 3)), "its states change their sizes"),
    ],
)
def test_refusals(graph: Any, because: str) -> None:
    check_refused(GuardedLoops(), graph(), because=because, context=GPU)


def test_too_many_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.passes.unroll.OPS", 10)
    check_refused(GuardedLoops(), loop(), because="10 are the limit", context=GPU)


def test_other_loops_and_targets_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    check_untouched(GuardedLoops(), loop(ends=node("Identity", "c", "go")), context=GPU)
    check_untouched(GuardedLoops(), loop(trips=None), context=GPU)
    check_untouched(GuardedLoops(), loop(), context=PassContext(target="cpu"))
    monkeypatch.setattr(guarded_loops, "TRIPS", TRIPS - 1)
    check_untouched(GuardedLoops(), loop(), context=GPU)
