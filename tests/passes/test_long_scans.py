"""long_scans: Scans and Loops of pointwise steps that are too long to be unrolled; refused for other steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.fallback import BOOL, I64, F, body, model, node
from support.host import needs_compiler
from support.on_processor import compare_graph
from support.simulated import check_simulated, kinds

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.passes import long_scans
from optdnn.passes.long_scans import LongScans

LENGTH = 7


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans of more than three steps are long here."""
    monkeypatch.setattr(long_scans, "TRIPS", 3)


GATED = [
    node("Sigmoid", "a", "gate"), node("Mul", "s gate", "kept"), node("Mul", "b w", "new"), node("Add", "kept new", "t"),
    node("Tanh", "t", "y"),
]  # fmt: skip


def scan(
    nodes: list[onnx.NodeProto] = GATED, *, length: Any = LENGTH, directions: tuple[int, int, int] = (0, 0, 0), out: int = 1,
    last: bool = True, row: list[int] | None = None, second: bool = False,
) -> Graph:  # fmt: skip
    """A state of (2, 3), sequences along the first and along the last axis, and ``w``, which is captured.

    ``out``: the axis of the results; ``last``: whether the last state is read; ``second``: whether there is a second state, the sum
    of the results.
    """
    states = ["s", "u"] if second else ["s"]
    more = [node("Add", "u y", "v")] if second else []
    shape, row = [2, 3], row or [2, 3]
    inner = body(
        nodes + more,
        [*((s, F, shape) for s in states), ("a", F, shape), ("b", F, row)],
        [("t", F, shape), *([("v", F, shape)] if second else []), ("y", F, None)],
    )
    begins, ends = ("s0 u0", "last sum") if second else ("s0", "last")
    scanned = node(
        "Scan", f"{begins} xs zs", f"{ends} ys", body=inner, num_scan_inputs=2, scan_input_axes=[0, -1],
        scan_input_directions=list(directions[:2]), scan_output_axes=[out], scan_output_directions=[directions[2]],
    )  # fmt: skip
    inputs = [("s0", F, shape), *([("u0", F, shape)] if second else [])]
    inputs += [("xs", F, [length, *shape]), ("zs", F, [*row, length]), ("w", F, [3])]
    outputs = [("ys", F, None), *([("last", F, shape)] if last else []), *([("sum", F, shape)] if second else [])]
    return import_model(model([scanned], inputs, outputs))


def loop(*, trips: int = LENGTH, ends: str = "Identity", axis: int = 1, other: str = "", rows: bool = True) -> Graph:
    """A state that is multiplied with a position of ``xs`` and gets 0.5. ``other``: what the step reads besides."""
    going = {"Identity": node("Identity", "c", "go"), "Not": node("Not", "c", "go")}[ends]
    nodes = [going, node("Gather", "xs i", "x", axis=axis), node("Mul", "s x", "m"), node("Add", "m half", "t")]
    if other == "number":
        nodes += [node("Cast", "i", "f", to=F), node("Mul", "t f", "t1")]
    if other == "product":
        nodes += [node("MatMul", "t w", "t1")]
    final = "t1" if other else "t"
    inner = body(
        [*nodes, *([node("Identity", final, "row")] if rows else [])],
        [("i", I64, []), ("c", BOOL, []), ("s", F, [2, 3])],
        [("go", BOOL, []), (final, F, [2, 3]), *([("row", F, [2, 3])] if rows else [])],
    )
    dims = [2, 3]
    dims.insert(axis, LENGTH)
    inputs = [("s0", F, [2, 3]), ("xs", F, dims), ("w", F, [3, 3])]
    outputs = [("y", F, [2, 3]), *([("rows", F, None)] if rows else [])]
    nodes = [node("Loop", "trips - s0", "y rows" if rows else "y", body=inner)]
    constants = {"trips": np.array(trips, np.int64), "half": np.array(0.5, np.float32)}
    return import_model(model(nodes, inputs, outputs, **constants))


@pytest.mark.parametrize(
    "graph",
    [
        lambda: scan(),
        lambda: scan(out=-1),
        lambda: scan(last=False),
        lambda: scan(directions=(1, 1, 1)),
        lambda: scan(second=True),
        lambda: scan(row=[1, 3]),
        lambda: loop(),
        lambda: loop(axis=0, rows=False),
        lambda: loop(axis=2),
    ],
)
def test_all_steps_are_one_scan(graph: Any) -> None:
    after, _ = check_pass(LongScans(), graph(), changes=1)
    assert len(after.of_kind("PointwiseScan")) == 1
    assert not after.of_kind("Scan", "Loop")


@pytest.mark.parametrize("graph", [scan, loop])
def test_a_target_computes_it(graph: Any) -> None:
    program = check_simulated(graph(), "fp32")
    assert "PointwiseScan" in kinds(program)
    assert not [s for s in program.steps if s.executor == "host"]


def delayed(length: int = LENGTH) -> Graph:
    """A filter that reads its last two results: the state ``v`` becomes what the state ``u`` was."""
    nodes = [node("Mul", "u half", "h"), node("Sub", "h v", "d"), node("Add", "d x", "y"), node("Identity", "u", "v1")]
    inner = body(
        [*nodes, node("Identity", "y", "u1")],
        [("u", F, [2, 3]), ("v", F, [2, 3]), ("x", F, [2, 3])],
        [("u1", F, [2, 3]), ("v1", F, [2, 3]), ("y", F, [2, 3])],
    )
    whole = node("Scan", "u0 v0 xs", "last before ys", body=inner, num_scan_inputs=1)
    inputs = [("u0", F, [2, 3]), ("v0", F, [2, 3]), ("xs", F, [length, 2, 3])]
    outputs = [("ys", F, None), ("last", F, None), ("before", F, None)]
    return import_model(model([whole], inputs, outputs, half=np.array(0.5, np.float32)))


def test_a_state_that_another_state_becomes() -> None:
    after, _ = check_pass(LongScans(), delayed(), changes=1)
    assert not after.of_kind("Scan")


@pytest.mark.slow
@needs_compiler
def test_the_kernel_exchanges_states_at_once(tmp_path: Path) -> None:
    compare_graph(delayed(), "fp32", tmp_path)


PASSED = [node("Identity", "a", "t"), node("Add", "s b", "y")]
NARROW = [node("Mul", "s a", "t"), node("Mul", "b w", "y")]


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: scan(length="n"), "its number of iterations is not known"),
        (lambda: scan(directions=(0, 0, 1)), "it reads its sequences and stacks its results in different directions"),
        (lambda: scan([*GATED[:-1], node("Softmax", "t", "y")]), "a step has a Softmax, which is not pointwise"),
        (lambda: scan([*GATED[:-1], node("Less", "t w", "l"), node("Cast", "l", "y", to=F)]), "which is no floats"),
        (lambda: scan(PASSED), "a result of a step is not computed in it"),
        (lambda: scan(NARROW, row=[1, 3]), "its states and results differ in shape"),
        (lambda: loop(ends="Not"), "its condition depends on data"),
        (lambda: loop(other="product"), "a step has a MatMul, which is not pointwise"),
        (lambda: loop(other="number"), "more than states, positions and other floats"),
    ],
)
def test_refusals(graph: Any, because: str) -> None:
    check_refused(LongScans(), graph(), because=because)


@pytest.mark.parametrize(
    ("limit", "because"),
    [("MOST_STAGES", "takes too many registers"), ("MOST_ELEMENTS", "take longer than a launch for each step")],
)
def test_limits(limit: str, because: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_scans, limit, 3)
    check_refused(LongScans(), scan(), because=because)


def test_what_is_unrolled_is_left() -> None:
    check_untouched(LongScans(), scan(length=3))
    check_untouched(LongScans(), loop(trips=3))
