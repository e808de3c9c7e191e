"""Regions: few, convex, and in an order that can run."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from optdnn.dim import symbol
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.extract import extract, regions, single, whole
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.ops.base import Stage
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import tensor


def random_dag(choices: list[tuple[int, int]]) -> Graph:
    """A DAG of Add and Relu over one input, by ``choices``."""
    g = Graph()
    values = [g.add_input("x", tensor(np.float32, 2, 3))]
    constant = g.add_constant(np.float32(0.5))
    for a, b in choices:
        left = values[a % len(values)]
        op = g.add("Relu", [left]) if b < 0 else g.add("Add", [left, values[b % len(values)] if b % 3 else constant])
        values.append(op.value)
    g.add_output(values[-1], "y")
    g.add_output(values[len(values) // 2], "z")
    g.remove_dead({op.id for op in g.ops()})
    return g


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-5, 30)), min_size=1, max_size=14))
def test_regions_run_in_order_and_give_the_same_result(choices: list[tuple[int, int]]) -> None:
    graph = random_dag(choices)
    feeds = random_feeds(graph, seed=len(choices))
    want = evaluate(graph, feeds)
    known = dict(feeds)
    found = regions(graph, lambda op: "a" if op.kind == "Relu" else "b")
    computing = sorted(op.id for op in graph.ops() if op.kind not in STRUCTURAL)
    assert sorted(op.id for r in found for op in r.ops) == computing
    for region in found:
        part = extract(graph, region)
        known.update(evaluate(part, {graph.output(v).name: known[graph.output(v).name] for v in region.inputs}))
    for i in graph.outputs:
        op = graph.op(i)
        source = op.inputs[0]
        assert source is not None
        np.testing.assert_array_equal(known[graph.output(source).name], want[op.outputs[0].name])


def test_one_class_gives_one_region() -> None:
    graph = random_dag([(0, 1), (1, 2), (2, -1), (0, 4)])
    assert len(regions(graph, lambda op: "all")) == 1
    assert {op.id for op in whole(graph).ops} == {op.id for op in graph.ops() if op.kind not in STRUCTURAL}


def test_single_keeps_constants_and_names() -> None:
    g = Graph()
    x = g.add_input("x", tensor(np.float32, 2))
    c = g.add_constant(np.float32([1, 2]), "c")
    y = g.add("Add", [x, c], names=["y"], src=["n"])
    g.add_output(y.value, "y")
    part = single(g, y)
    assert part.kinds() == {"Add": 1}
    assert [part.op(i).outputs[0].name for i in part.inputs] == ["x"]
    np.testing.assert_array_equal(evaluate(part, {"x": np.float32([1, 1])})["y"], np.float32([2, 3]))


def test_a_region_keeps_known_numbers_at_its_border() -> None:
    """A Reshape outside of the region determines the number of columns of the bias. Its target is a border value of the region."""
    g = Graph()
    n = symbol("n")
    x, bias = g.add_input("x", tensor(np.float32, n, 4)), g.add_input("bias", tensor(np.float32, 2, 2))
    w = g.add_constant(np.ones((4, 4), np.float32), "w")
    flat = g.add("Shape", [x], OPDEFS["Shape"].attrs())
    last = g.add("Gather", [flat.value, g.add_constant(np.array([1]), "one")], OPDEFS["Gather"].attrs())
    shaped = g.add("Reshape", [bias, last.value], OPDEFS["Reshape"].attrs(), names=["shaped"])
    stage = Stage("Add", (~0, 2), OPDEFS["Add"].attrs())
    y = g.add("MatMul", [x, w, shaped.value], MatMulAttrs(epilogue=(stage,)), names=["y"])
    g.add_output(y.value, "y")
    assert g.type(y.value).dims == (n, 4)
    inside = {"Reshape", "MatMul"}
    part = next(r for r in regions(g, lambda op: "in" if op.kind in inside else "out") if r.label == "in")
    cut = extract(g, part)
    assert {o.name: o.type for op in cut.ops() for o in op.outputs}["y"] == g.type(y.value)
    assert {o.name: o.type for op in cut.ops() for o in op.outputs}["shaped"].dims == (4,)
