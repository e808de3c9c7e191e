"""divided_loops: long Scans and Loops, of which only what needs the previous step stays in the loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.fallback import BOOL, I64, F, body, model, node
from support.simulated import check_simulated, kinds

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.passes import divided_loops, long_scans
from optdnn.passes.base import PassContext
from optdnn.passes.divided_loops import DividedLoops
from optdnn.passes.unroll import too_much

LENGTH = 7
GPU = PassContext(target="cuda:sm_90a")
MAMBA = [
    node("Unsqueeze", "d last", "dt"), node("Mul", "dt rates", "powers"), node("Exp", "powers", "factor"),
    node("Mul", "d x", "dx"), node("Unsqueeze", "dx last", "scaled"), node("Unsqueeze", "b first", "row"),
    node("Mul", "scaled row", "new"), node("Mul", "factor s", "kept"), node("Add", "kept new", "t"),
    node("Unsqueeze", "b last", "column"), node("MatMul", "t column", "read"), node("Squeeze", "read last", "y"),
]  # fmt: skip
"""A state of (2, 3, 4): three channels of two sequences, with four numbers each."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of more than three steps are long here, and none is unrolled."""
    monkeypatch.setattr(divided_loops, "TRIPS", 3)
    monkeypatch.setattr(long_scans, "TRIPS", 3)
    monkeypatch.setattr("optdnn.passes.unroll.MOST_TRIPS", 3)


def constants() -> dict[str, np.ndarray]:
    axes = {"first": np.array([1]), "last": np.array([-1])}
    return {"rates": -np.arange(1, 13, dtype=np.float32).reshape(3, 4) / 7, **axes}


def scan(
    nodes: list[onnx.NodeProto] = MAMBA,
    *,
    backward: bool = False,
    out: int = 0,
    length: Any = LENGTH,
    last: bool = True,
) -> Graph:
    """A Scan with sequences ``d`` and ``x`` of (2, 3) along axis 1, and ``b`` of (2, 4) along axis 0."""
    inner = body(
        nodes, [("s", F, [2, 3, 4]), ("d", F, [2, 3]), ("x", F, [2, 3]), ("b", F, [2, 4])], [("t", F, [2, 3, 4]), ("y", F, None)]
    )  # fmt: skip
    way = int(backward)
    scanned = node(
        "Scan", "s0 ds xs bs", "end ys", body=inner, num_scan_inputs=3, scan_input_axes=[1, 1, 0],
        scan_input_directions=[way] * 3, scan_output_axes=[out], scan_output_directions=[way],
    )  # fmt: skip
    inputs = [("s0", F, [2, 3, 4]), ("ds", F, [2, length, 3]), ("xs", F, [2, length, 3]), ("bs", F, [length, 2, 4])]
    inputs += [("w", F, [4, 4])]
    outputs = [("ys", F, None), *([("end", F, [2, 3, 4])] if last else [])]
    return import_model(model([scanned], inputs, outputs, **constants()))


def loop(nodes: list[onnx.NodeProto], states: list[str], made: list[str], row: str, *, size: int = LENGTH) -> Graph:
    """A Loop whose states are (2, 3). ``xs``: (2, size, 3), of which a step gathers a position; ``table``: (9, 2, 3)."""
    inner = body(
        [node("Identity", "c", "go"), node("Gather", "xs i", "x", axis=1), *nodes],
        [("i", I64, []), ("c", BOOL, []), *((s, F, [2, 3]) for s in states)],
        [("go", BOOL, []), *((m, F, None) for m in made), (row, F, None)],
    )
    ends = [f"end{k}" for k in range(len(states))]
    whole = node("Loop", " ".join(["trips", "-", *(f"{s}0" for s in states)]), " ".join([*ends, "ys"]), body=inner)
    inputs = [
        *((f"{s}0", F, [2, 3]) for s in states),
        ("xs", F, [2, size, 3]),
        ("table", F, [9, 2, 3]),
        ("w", F, [3, 3]),
    ]
    outputs = [("ys", F, None), *((e, F, None) for e in ends)]
    more = {"trips": np.array(LENGTH), "one": np.array(1), "six": np.array(6), "axis": np.array([1])}
    return import_model(model([whole], inputs, outputs, **more))


READ = [node("Add", "s x", "t"), node("MatMul", "s w", "y")]
COUNTED = [
    node("Sub", "six i", "k"), node("Gather", "table k", "row", axis=0), node("Softmax", "row", "p", axis=-1),
    node("Mul", "s p", "m"), node("Add", "m x", "t"), node("ReduceSum", "t axis", "y", keepdims=0),
]  # fmt: skip
CELL = [
    node("MatMul", "x w", "a"),
    node("MatMul", "s w", "b"),
    node("Add", "a b", "sum"),
    node("Tanh", "sum", "t"),
    node("Relu", "t", "y"),
]


@pytest.mark.parametrize("keywords", [{}, {"out": 1}, {"backward": True, "out": -1}, {"last": False}])
def test_a_pointwise_core_remains(keywords: dict[str, Any]) -> None:
    after, _ = check_pass(DividedLoops(), scan(**keywords), changes=1, rules={"divided_loop": 1}, context=GPU)
    (core,) = after.of_kind("Scan")
    inside = core.attrs.body.graph.kinds()
    assert {"Exp", "Add", "Mul"} <= set(inside), "pointwise operators stay with the states"
    assert not {"Unsqueeze", "MatMul", "Squeeze"} & set(inside)
    assert len(after.of_kind("MatMul")) == 1, "one product for all steps"


def test_nothing_runs_on_the_host() -> None:
    program = check_simulated(scan(), "fp32")
    assert "PointwiseScan" in kinds(program)
    assert not [s for s in program.steps if s.executor == "host"]


def test_a_sum_after_the_loop_reads_states_before_each_step() -> None:
    after, _ = check_pass(DividedLoops(), loop(READ, ["s"], ["t"], "y"), changes=1, context=GPU)
    (core,) = after.of_kind("Scan")
    assert core.attrs.body.graph.kinds() == {"Add": 1}
    assert len(after.of_kind("MatMul")) == 1


@pytest.mark.parametrize("size", [LENGTH, LENGTH + 2])
def test_values_of_the_previous_step_are_a_sequence(size: int) -> None:
    nodes = [node("Tanh", "x", "now"), node("MatMul", "before w", "b"), node("Add", "now b", "y")]
    after, _ = check_pass(DividedLoops(), loop(nodes, ["before"], ["now"], "y", size=size), changes=1, context=GPU)
    assert not after.of_kind("Scan", "Loop")


def test_a_chain_of_previous_values() -> None:
    nodes = [
        node("Tanh", "x", "now"),
        node("Sin", "b1", "again"),
        node("MatMul", "b2 w", "m"),
        node("Add", "now m", "y"),
    ]
    after, _ = check_pass(DividedLoops(), loop(nodes, ["b1", "b2"], ["now", "again"], "y"), changes=1, context=GPU)
    assert not after.of_kind("Scan", "Loop")


def test_what_the_number_of_the_step_selects() -> None:
    after, _ = check_pass(DividedLoops(), loop(COUNTED, ["s"], ["t"], "y"), changes=1, context=GPU)
    (core,) = after.of_kind("Scan")
    assert set(core.attrs.body.graph.kinds()) == {"Mul", "Add"}


def test_a_cell_that_is_not_unrolled_keeps_its_own_product() -> None:
    after, _ = check_pass(DividedLoops(), loop(CELL, ["s"], ["t"], "y"), changes=1, context=GPU)
    (core,) = after.of_kind("Scan")
    assert set(core.attrs.body.graph.kinds()) == {"MatMul", "Add", "Tanh"}
    assert [len(after.of_kind(k)) for k in ("MatMul", "Relu")] == [1, 1]


def test_a_cell_that_is_unrolled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.passes.unroll.MOST_TRIPS", LENGTH)
    graph = loop(CELL, ["s"], ["t"], "y")
    assert too_much(graph.of_kind("Loop")[0].attrs.body, LENGTH) is None
    check_untouched(DividedLoops(), graph, context=GPU)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [node("MatMul", "s w", "m"), node("Add", "m x", "t"), node("Identity", "t", "y")]
    check_refused(
        DividedLoops(), loop(alone, ["s"], ["t"], "y"), because="need what the step before computed", context=GPU
    )
    check_refused(DividedLoops(), scan(length="n"), because="its number of iterations is not known", context=GPU)
    monkeypatch.setattr(divided_loops, "MOST_BYTES", 100)
    check_refused(DividedLoops(), scan(), because="take too much memory", context=GPU)


def test_short_loops_and_other_targets_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    check_untouched(DividedLoops(), scan(length=3), context=GPU)
    check_untouched(DividedLoops(), scan(), context=PassContext(target="cpu"))


def test_a_short_loop_without_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_loops, "TRIPS", LENGTH)
    nodes = [node("Tanh", "x", "now"), node("MatMul", "before w", "b"), node("Add", "now b", "y")]
    after, _ = check_pass(DividedLoops(), loop(nodes, ["before"], ["now"], "y"), changes=1, context=GPU)
    assert not after.of_kind("Scan", "Loop")
    check_untouched(DividedLoops(), loop(READ, ["s"], ["t"], "y"), context=GPU)


def test_a_core_that_reads_no_sequence() -> None:
    nodes = [node("Tanh", "s", "t"), node("MatMul", "t w", "y")]
    after, _ = check_pass(DividedLoops(), loop(nodes, ["s"], ["t"], "y"), changes=1, context=GPU)
    (core,) = after.of_kind("Scan")
    assert core.attrs.body.graph.kinds() == {"Tanh": 1}
    assert core.attrs.scan_input_axes == (0,), "its length is the number of steps"
    program = check_simulated(loop(nodes, ["s"], ["t"], "y"), "fp32")
    assert "PointwiseScan" in kinds(program)
