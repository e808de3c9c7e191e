"""counted_loops: conditions on counters become trip counts; refused where a condition depends on data."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support.check import check_pass, check_refused, check_untouched
from support.fallback import BOOL, I64, F, model, node

from optdnn.importers.onnx import import_model
from optdnn.ir import counters
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.counted_loops import CountedLoops


def ports(*given: tuple[str, int, list[int]]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(*port) for port in given]


def counted(
    first: Any = 0,
    end: Any = 5,
    going: bool = True,
    limit: Any = None,
    reads: str = "k",
    step: int = 2,
    by: str = "Add",
) -> Graph:
    """TensorFlow's ``while k < end: v = tanh(v); k += step``; every v is stacked.

    ``first``, ``end``, ``limit``: a number, or "input".
    """
    given = {"first": first, "end": end, "most": limit}
    inputs = [("x", F, [2, 3])] + [(n, I64, []) for n, v in given.items() if v == "input"]
    constants = {n: np.array(v, np.int64) for n, v in given.items() if isinstance(v, int)}
    total = [node("ReduceSum", "v", "sum", keepdims=0), node("Cast", "sum", "data", to=I64)]
    listed = [node("Range", "step k step", "all"), node("ReduceSum", "all", "length", keepdims=0)]
    inner = helper.make_graph(
        [*{"data": total, "length": listed}.get(reads, []), node(by, "k step", "next_k"), node("Cast", "next_k", "f", to=F),
         node("Cast", "end" if reads == "k" else reads, "e", to=F), node("Less", "f e", "go"), node("Tanh", "v", "next"),
         node("Identity", "next", "row")],
        "body", ports(("i", I64, []), ("c", BOOL, []), ("k", I64, []), ("v", F, [2, 3])),
        ports(("go", BOOL, []), ("next_k", I64, []), ("next", F, [2, 3]), ("row", F, [2, 3])),
    )  # fmt: skip
    inner.initializer.append(onnx.numpy_helper.from_array(np.array(step, np.int64), "step"))
    names = f"{'' if limit is None else 'most'} going first x".split(" ")
    loop = helper.make_node("Loop", [n if n != "-" else "" for n in names], ["", "y", "rows"], body=inner)
    outputs = [("y", F, [2, 3]), ("rows", F, None)]
    return import_model(model([loop], inputs, outputs, going=np.array(going), **constants))


def trips(graph: Graph) -> int:
    (loop,) = graph.of_kind("Loop")
    assert loop.input(1) is None
    return int(graph.constant_value(loop.input(0)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graph", "times"),
    [
        (counted(), 3),
        (counted(first=1, end=11), 5),
        (counted(limit=2), 2),
        (counted(limit=9), 3),
        (counted(end=-7), 1),  # as TensorFlow's loops, whose first condition is computed before them
        (counted(reads="i", end=-1, first=1, step=-1, limit=8), 1),
    ],
)
def test_a_condition_on_counters_is_a_count(graph: Graph, times: int) -> None:
    result, _ = check_pass(CountedLoops(), graph, changes=1, kinds={"Loop": 1}, rules={"counted_loop": 1})
    assert trips(result) == times
    (loop,) = result.of_kind("Loop")
    assert loop.outputs[2].type.shape == (times, 2, 3)


def test_values_of_unknown_size_are_evaluated_while_they_are_small() -> None:
    """It adds up the even numbers below ``k``."""
    result, _ = check_pass(CountedLoops(), counted(first=8, end=-1, reads="length", limit=9), changes=1)
    assert trips(result) == 9
    because = "or its condition cannot be evaluated"
    check_refused(CountedLoops(), counted(first=8, end=-1, reads="length", limit=40), because=because)


def test_a_loop_that_never_begins() -> None:
    graph = counted(going=False)
    assert CountedLoops()(graph, PassContext()).changes == 1
    assert trips(graph) == 0


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: counted(end="input"), "its condition depends on data"),
        (lambda: counted(first="input"), "its condition depends on data"),
        (lambda: counted(reads="data"), "its condition depends on data"),
        (lambda: counted(limit="input"), "the most iterations that it runs, depend on data"),
        (lambda: counted(step=0), "it runs more than 4096 times"),
        (
            lambda: counted(step=0, by="Div", first=4),
            "it runs more than 4096 times, or its condition cannot be evaluated",
        ),
    ],
)
def test_refusals(graph: Any, because: str) -> None:
    check_refused(CountedLoops(), graph(), because=because)


def test_conditions_of_large_values_or_many_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "OPS", 2)
    check_refused(CountedLoops(), counted(), because="its condition depends on data")


def test_loops_that_only_their_count_ends() -> None:
    ends = helper.make_graph(
        [node("Identity", "c", "go"), node("Tanh", "v", "next")], "body",
        [helper.make_tensor_value_info(*x) for x in (("i", I64, []), ("c", BOOL, []), ("v", F, [2]))],
        [helper.make_tensor_value_info(*x) for x in (("go", BOOL, []), ("next", F, [2]))],
    )  # fmt: skip
    nodes = [node("Loop", "n - x", "y", body=ends)]
    check_untouched(CountedLoops(), import_model(model(nodes, [("x", F, [2])], [("y", F, [2])], n=3)))


def bounded(end: Any = 5, limit: int | None = None, join: str = "And") -> Graph:
    """``while k < end and sum(v) < most``: a counter bounds the number of iterations, and computed values may end it before."""
    inner = helper.make_graph(
        [node("Add", "k one", "next_k"), node("Less", "next_k end", "left"), node("Mul", "v v", "next"),
         node("ReduceSum", "next", "sum", keepdims=0), node("Less", "sum most", "small"), node(join, "left small", "both"),
         node("Identity", "both", "go"), node("Identity", "next", "row")],
        "body", ports(("i", I64, []), ("c", BOOL, []), ("k", I64, []), ("v", F, [2, 3])),
        ports(("go", BOOL, []), ("next_k", I64, []), ("next", F, [2, 3]), ("row", F, [2, 3])),
    )  # fmt: skip
    inputs = [("x", F, [2, 3]), ("most", F, []), *([("end", I64, [])] if end == "input" else [])]
    constants = {"first": np.array(0), "one": np.array(1), **({} if limit is None else {"limit": np.array(limit)})}
    constants |= {} if end == "input" else {"end": np.array(end)}
    loop = helper.make_node("Loop", ["" if limit is None else "limit", "", "first", "x"], ["", "y", "rows"], body=inner)
    return import_model(model([loop], inputs, [("y", F, [2, 3]), ("rows", F, None)], **constants))


@pytest.mark.parametrize("limit", [None, 9, 2**62])
def test_a_counter_bounds_a_loop_that_data_may_end(limit: int | None) -> None:
    after, _ = check_pass(CountedLoops(), bounded(limit=limit), changes=1, rules={"bounded_loop": 1})
    (loop,) = after.of_kind("Loop")
    assert after.constant_value(loop.input(0)) == 5
    assert loop.attrs.body.graph.of_kind("And"), "the condition stays"


@pytest.mark.parametrize("graph", [bounded(end="input"), bounded(limit=5), bounded(limit=4), bounded(join="Or")])
def test_loops_that_no_counter_bounds(graph: Graph) -> None:
    check_refused(CountedLoops(), graph, because="its condition depends on data")
