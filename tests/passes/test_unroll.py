"""unroll: loops of known length, scans, and known branches; refused if they depend on data."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support.check import check_pass, check_refused, check_untouched
from support.fallback import BOOL, I64, F, body, model, node

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.lowering.host import MOST_TRIPS, NUMPY_US, host_us
from optdnn.passes import unroll
from optdnn.passes.base import PassContext
from optdnn.passes.unroll import Unroll

GPU = PassContext(target="cuda:sm_90a")


def loop(condition: str = "Identity", **constants: Any) -> Graph:
    """v = tanh(v * w + i), three times or as ``trips`` says; every v is stacked. ``w`` is captured."""
    ends = {"Identity": node("Identity", "c", "go"), "Not": node("Not", "c", "go")}[condition]
    inner = body(
        [ends, node("Cast", "i", "f", to=F), node("Mul", "v w", "a"), node("Add", "a f", "b"), node("Tanh", "b", "next"),
         node("Identity", "next", "row")],
        [("i", I64, []), ("c", BOOL, []), ("v", F, [2, 3])], [("go", BOOL, []), ("next", F, [2, 3]), ("row", F, [2, 3])],
    )  # fmt: skip
    nodes = [node("Loop", "trips - x", "y rows", body=inner)]
    inputs = [("x", F, [2, 3]), ("w", F, [3])] + ([] if "trips" in constants else [("trips", I64, [])])
    return import_model(model(nodes, inputs, [("y", F, [2, 3]), ("rows", F, None)], **constants))


def scan(length: Any = 4) -> Graph:
    """Two sequences, one of them along its second axis and backwards; a state and two stacked results, one backwards."""
    inner = body(
        [node("Mul", "s a", "m"), node("Add", "m b", "t"), node("Sin", "t", "p"), node("Relu", "t", "q")],
        [("s", F, [3]), ("a", F, [3]), ("b", F, [3])], [("t", F, [3]), ("p", F, [3]), ("q", F, [3])],
    )  # fmt: skip
    scanned = node(
        "Scan", "s0 xs ys", "last ps qs", body=inner, num_scan_inputs=2, scan_input_axes=[0, -1],
        scan_input_directions=[0, 1], scan_output_axes=[0, 1], scan_output_directions=[0, 1],
    )  # fmt: skip
    inputs = [("s0", F, [3]), ("xs", F, [length, 3]), ("ys", F, [3, length])]
    return import_model(model([scanned], inputs, [("last", F, [3]), ("ps", F, None), ("qs", F, None)]))


def branch(condition: bool | None = None) -> Graph:
    """-x or exp(x), as an input says; ``condition``: what takes the input's place (the importer itself takes known branches)."""
    then = helper.make_graph([node("Neg", "x", "yes")], "then", [], [helper.make_tensor_value_info("yes", F, [3])])
    other = helper.make_graph([node("Exp", "x", "no")], "else", [], [helper.make_tensor_value_info("no", F, [3])])
    nodes = [node("If", "which", "y", then_branch=then, else_branch=other)]
    graph = import_model(model(nodes, [("x", F, [3]), ("which", BOOL, [])], [("y", F, [3])]))
    if condition is not None:
        graph.replace_uses(graph.op(graph.inputs[1]).value, graph.add_constant(np.array(condition)))
    return graph


def branches(first: tuple[str, str], dtype: int = F, size: Any = 3) -> Graph:
    """``first`` or the negated input, as an input of one element says."""
    kind, operands = first
    attrs = {"axis": 0} if kind == "Concat" else {}
    shape = [size if kind in ("Neg", "Div") else None]
    then = helper.make_graph(
        [node(kind, operands, "yes", **attrs)], "then", [], [helper.make_tensor_value_info("yes", dtype, shape)]
    )
    negated = [node("Neg", "x" if dtype == F else "i", "no")]
    other = helper.make_graph(
        negated, "else", [], [helper.make_tensor_value_info("no", dtype, [size if dtype == F else 3])]
    )
    nodes = [node("Greater", "a b", "which"), node("If", "which", "y", then_branch=then, else_branch=other)]
    inputs = [("x", F, [size]), ("i", I64, [3]), ("a", F, [1]), ("b", F, [])]
    return import_model(model(nodes, inputs, [("y", dtype, None)]))


def test_both_branches_are_computed() -> None:
    context: Any = {"context": GPU, "rules": {"both_branches": 1}}
    result, _ = check_pass(Unroll(), branches(("Exp", "x")), changes=1, **context)
    assert result.kinds() == {"Exp": 1, "Greater": 1, "Neg": 1, "Reshape": 1, "Where": 1}


def test_large_branches_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll, "OPS", 1)
    check_refused(Unroll(), branches(("Exp", "x")), because="its branches have 2 ops; 1 are the limit", context=GPU)


def nested(inner: onnx.NodeProto) -> Graph:
    """``inner`` or exp(x) as b < 0 says, where a < 0; else -x."""

    def choice(condition: str, result: str, yes: onnx.NodeProto, no: onnx.NodeProto) -> onnx.NodeProto:
        branches = {
            f"{side}_branch": helper.make_graph(
                [made], side, [], [helper.make_tensor_value_info(made.output[0], F, [3])]
            )
            for side, made in (("then", yes), ("else", no))
        }
        return node("If", condition, result, **branches)

    own = choice("low", "own", inner, node("Exp", "x", "grown"))
    nodes = [
        node("Less", "a zero", "which"),
        node("Less", "b zero", "low"),
        choice("which", "y", own, node("Neg", "x", "z")),
    ]
    inputs = [("x", F, [3]), ("i", I64, [3]), ("axis", I64, []), ("a", F, []), ("b", F, [])]
    return import_model(model(nodes, inputs, [("y", F, [3])], zero=np.float32(0)))


def test_a_branch_may_have_a_choice_of_its_own() -> None:
    kinds = {"Less": 2, "Where": 2, "Tanh": 1, "Exp": 1, "Neg": 1}
    check_pass(Unroll(), nested(node("Tanh", "x", "t")), changes=2, kinds=kinds, context=GPU)


@pytest.mark.parametrize(("kind", "operands"), [("Gather", "x i"), ("CumSum", "x axis")])
def test_a_branch_whose_own_choice_may_fail_is_left_alone(kind: str, operands: str) -> None:
    check_refused(Unroll(), nested(node(kind, operands, "t")), because="may fail where it is not taken", context=GPU)


def test_branches_with_loops_are_left_alone() -> None:
    inner = body([node("Identity", "c", "go"), node("Tanh", "v", "w")], [("k", I64, []), ("c", BOOL, []), ("v", F, [3])],
        [("go", BOOL, []), ("w", F, [3])])  # fmt: skip
    then = helper.make_graph(
        [node("Loop", "trips - x", "yes", body=inner)], "then", [], [helper.make_tensor_value_info("yes", F, [3])]
    )
    other = helper.make_graph([node("Neg", "x", "no")], "else", [], [helper.make_tensor_value_info("no", F, [3])])
    nodes = [node("Greater", "a b", "which"), node("If", "which", "y", then_branch=then, else_branch=other)]
    inputs = [("x", F, [3]), ("trips", I64, []), ("a", F, []), ("b", F, [])]
    graph = import_model(model(nodes, inputs, [("y", F, [3])]))
    check_refused(Unroll(), graph, because="may fail where it is not taken", context=GPU)


def test_a_loop_becomes_its_iterations() -> None:
    result, _ = check_pass(Unroll(), loop(trips=3), changes=1, rules={"unroll_loop": 1}, context=GPU)
    kinds = result.kinds()
    assert (kinds["Tanh"], kinds["Unsqueeze"], kinds["Concat"]) == (3, 3, 1)
    assert "Loop" not in kinds


def test_a_scan_becomes_its_steps() -> None:
    result, _ = check_pass(Unroll(), scan(), changes=1, rules={"unroll_scan": 1}, context=GPU)
    assert result.kinds()["Gather"] == 8
    assert result.kinds()["Concat"] == 2


@pytest.mark.parametrize(("condition", "kind"), [(True, "Neg"), (False, "Exp")])
def test_a_known_condition_leaves_its_branch(condition: bool, kind: str) -> None:
    check_pass(Unroll(), branch(condition), changes=1, kinds={kind: 1}, rules={"known_branch": 1}, context=GPU)


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (loop, "its number of iterations is not known"),
        (lambda: loop("Not", trips=3), "its condition depends on data"),
        (lambda: loop(trips=0), "it runs zero times, but stacks results"),
        (lambda: loop(trips=1025), "it runs 1025 times; 1024 are unrolled"),
        (lambda: scan("n"), "its number of iterations is not known"),
        (branch, "the values of small inputs, for which an engine makes plans"),
        (lambda: branches(("Gather", "x i")), "an operator that may fail where it is not taken"),
        (lambda: branches(("Div", "i i"), I64), "an operator that may fail where it is not taken"),
        (lambda: branches(("Concat", "x x")), "its branches do not give the same sizes"),
        (lambda: branches(("Neg", "x"), size="n"), "its branches do not give the same sizes"),
    ],
)
def test_refusals(graph: Any, because: str) -> None:
    check_refused(Unroll(), graph(), because=because, context=GPU)


def test_a_large_loop_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll, "OPS", 10)
    check_refused(Unroll(), loop(trips=3), because="unrolled, it would be 18 ops; 10 are the limit", context=GPU)


def test_the_cpu_keeps_its_loops() -> None:
    check_untouched(Unroll(), loop(trips=3), context=PassContext(target="cpu"))


# ---------------------------------------------------------------- what is not unrolled


def test_a_loop_on_the_host_costs_its_iterations() -> None:
    def cost(graph: Graph, kind: str) -> float:
        (op,) = graph.of_kind(kind)
        return host_us(graph, op)

    assert cost(loop(trips=300), "Loop") == pytest.approx(300 * 5 * NUMPY_US, rel=0.4)
    assert cost(loop(trips=10**7), "Loop") == cost(loop(trips=MOST_TRIPS), "Loop")
    assert cost(loop(), "Loop") < 10 * NUMPY_US  # the number of iterations depends on data
    assert cost(scan(8), "Scan") == pytest.approx(2 * cost(scan(4), "Scan"), rel=0.2)
    assert cost(branch(), "If") < 3 * NUMPY_US


def chosen(rows: int) -> Graph:
    """An If whose branch takes the row of the best of five scores from a table."""
    best = [node("ArgMax", "scores", "best", axis=0, keepdims=1), node("Squeeze", "best", "token")]
    then = body([node("Gather", "table token", "row", axis=0)], [], [("row", F, [3])])
    other = body([node("Neg", "x", "n")], [], [("n", F, [3])])
    nodes = [node("Greater", "a b", "which"), node("If", "which", "y", then_branch=then, else_branch=other)]
    inputs = [("x", F, [3]), ("a", F, []), ("b", F, []), ("scores", F, [5]), ("table", F, [rows, 3])]
    return import_model(model([*best, *nodes], inputs, [("y", F, [3])]))


@pytest.mark.parametrize("rows", [5, 6])
def test_a_branch_that_takes_the_best_row_cannot_fail(rows: int) -> None:
    after, _ = check_pass(Unroll(), chosen(rows), changes=1, rules={"both_branches": 1}, context=GPU)
    assert not after.of_kind("If")


def test_the_best_of_more_numbers_than_rows_may_fail() -> None:
    check_refused(Unroll(), chosen(4), because="may fail where it is not taken", context=GPU)
