"""segment_sums: sums scattered to constant positions become sums of segments, with the operators that compute their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.segment_cases import CASES, EDGES, NODES, edges, graph_of, rows_of, scattered

from optdnn.dim import symbol
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import ScatterElementsAttrs, ScatterNDAttrs
from optdnn.passes.segment_sums import SegmentSums
from optdnn.types import INT64

PASS = SegmentSums()


@pytest.mark.parametrize("name", CASES)
def test_scatters_become_sums_of_segments(name: str) -> None:
    changes = {"attention": 2, "attention_heads": 2, "narrow": 2, "activated": 5, "activated_odd": 5}
    changes |= {"largest": 2, "largest_odd": 2, "stable_softmax": 2}
    graph, _ = check_pass(PASS, graph_of(name), changes=changes.get(name, 1))
    assert not graph.of_kind("ScatterND", "ScatterElements", "Gather", "GatherND")


def test_the_weights_of_an_attention_are_added_in_a_sum_of_their_own() -> None:
    graph, _ = check_pass(PASS, graph_of("attention"), changes=2)
    weights, sent = graph.of_kind("SegmentSum")
    assert [s.kind for s in weights.attrs.stages] == ["Add", "Tanh", "Exp"]
    assert [s.kind for s in sent.attrs.stages] == ["Add", "Tanh", "Exp", "Mul"]
    assert sent.attrs.factors == ("Div",)


def test_factors_of_a_node_move_after_its_sum() -> None:
    graph, _ = check_pass(PASS, graph_of("degrees"), changes=1)
    (total,) = graph.of_kind("SegmentSum")
    assert [s.kind for s in total.attrs.stages] == ["Mul"]
    assert total.attrs.factors == ("Mul",)


def test_rows_that_others_read_are_stored_where_they_are_many() -> None:
    n = Net()
    x = n.input(EDGES, 2048)
    sent = n.op("Exp", x)
    graph, _ = check_pass(
        PASS, n.done(scattered(n, sent, edges(1), 2048), n.op("ReduceMax", sent, n.ints(1))), changes=1
    )
    (total,) = graph.of_kind("SegmentSum")
    assert not total.attrs.stages


@pytest.mark.parametrize("kind", ["MatMul", "Sin"])
@pytest.mark.parametrize("read", [False, True])
def test_rows_that_an_epilogue_computes_are_stored_where_others_read_them(kind: str, read: bool) -> None:
    """The residual block of DimeNet++: the next block reads the rows as well."""
    n = Net()
    x = n.input(EDGES, 8)
    made = n.matmul(x, 8) if kind == "MatMul" else n.op(kind, x)
    sent = n.op("Add", x, n.op("Tanh", made))
    others = [n.op("ReduceMax", sent, n.ints(1))] if read else []
    graph, _ = check_pass(PASS, n.done(scattered(n, sent, edges(1), 8), *others), changes=1)
    (total,) = graph.of_kind("SegmentSum")
    stages = [] if kind == "MatMul" and read else ["Tanh", "Add"] if kind == "MatMul" else ["Sin", "Tanh", "Add"]
    assert [s.kind for s in total.attrs.stages] == stages


def test_long_rows_of_operators_are_cut() -> None:
    n = Net()
    x = n.input(EDGES, 8)
    for _ in range(20):
        x = n.op("Tanh", x)
    graph, _ = check_pass(PASS, n.done(scattered(n, x, edges(1), 8)), changes=1)
    (total,) = graph.of_kind("SegmentSum")
    assert (len(total.attrs.stages), len(graph.of_kind("Tanh"))) == (16, 4)


def places(change: str) -> Any:
    """A scatter that the rule refuses."""
    n = Net()
    x, target = n.input(EDGES, 8), edges(1)
    if change == "computed":
        index = n.op("Cast", n.input(EDGES, 1, name="i"), attrs=CastAttrs(INT64))
        return n.done(n.op("ScatterND", n.const(np.zeros((NODES, 8))), index, x, attrs=ScatterNDAttrs("add")))
    start = n.const(np.zeros((NODES, 8)))
    if change == "deep":
        index = n.const(np.stack([target, target % 8], 1), np.int64)
        return n.done(n.op("ScatterND", start, index, n.input(EDGES, name="u"), attrs=ScatterNDAttrs("add")))
    if change == "elements":
        index = n.const(np.random.default_rng(0).integers(0, NODES, (EDGES, 8)), np.int64)
        return n.done(n.op("ScatterElements", start, index, x, attrs=ScatterElementsAttrs(0, "add")))
    if change == "few":
        return n.done(scattered(n, n.input(9, 8, name="few"), target[:9], 8))
    assert change == "symbolic"
    return n.done(scattered(n, n.op("Add", x, 1.0), target, 8, start=n.input(symbol("N"), 8, name="s")))


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ("computed", "positions are not known when"),
        ("deep", "positions are not a list of row numbers"),
        ("elements", "does not scatter whole rows"),
        ("few", "only 9 rows"),
        ("symbolic", "sizes are not known when"),
    ],
)
def test_refusals(change: str, because: str) -> None:
    check_refused(PASS, places(change), because=because)


def test_what_follows_the_sums() -> None:
    graph, _ = check_pass(PASS, graph_of("activated"), changes=5)
    (total,) = graph.of_kind("SegmentSum")
    assert [s.kind for s in total.attrs.epilogue] == ["Add", "Elu", "Clip", "Mul"]


@pytest.mark.parametrize(
    ("kind", "because"),
    [
        ("computed", "reads another tensor that is computed"),
        ("wider", "another type than the sums"),
        ("elsewhere", "sums have other readers"),
        ("long", "16 stages already"),
    ],
)
def test_other_operators_stay_after_the_sums(kind: str, because: str) -> None:
    n = Net()
    total = scattered(n, n.input(EDGES, 8), edges(1), 8)
    if kind == "computed":
        y = [n.op("Add", total, n.input(NODES, 8, name="z"))]
    elif kind == "wider":
        y = [n.op("Mul", total, n.random(2, NODES, 8))]
    elif kind == "elsewhere":
        y = [n.op("Tanh", total), total]
    else:
        y = [total]
        for _ in range(17):
            y = [n.op("Tanh", y[0])]
    graph = n.done(*y)
    report = PASS(graph)
    assert any(r.rule == "segment_epilogue" and because in r.reason for r in report.refused)


def test_other_scatters_are_no_candidates() -> None:
    n = Net()
    product = scattered(n, n.input(EDGES, 8), edges(1), 8, reduction="mul")
    check_untouched(PASS, n.done(product, n.op("Relu", rows_of(n, n.input(NODES, 4, name="y"), edges(2)))))


def test_maxima_take_what_was_there_and_no_factors() -> None:
    graph, _ = check_pass(PASS, graph_of("largest"), changes=2)
    (total,) = graph.of_kind("SegmentSum")
    assert (total.attrs.reduction, [s.kind for s in total.attrs.epilogue]) == ("max", ["Max"])
    graph, _ = check_pass(PASS, graph_of("smallest"), changes=1)
    assert (graph.of_kind("SegmentSum")[0].attrs.reduction, len(graph.of_kind("Min"))) == ("min", 1)
    n = Net()
    x, norm = n.input(NODES, 16), n.op("Sigmoid", n.input(NODES, 1, name="norm"))
    sent = n.op("Mul", rows_of(n, x, edges(2)), rows_of(n, norm, edges(1)))
    graph, _ = check_pass(PASS, n.done(scattered(n, sent, edges(1), 16, reduction="max")), changes=2)
    assert graph.of_kind("SegmentSum")[0].attrs.factors == ()
