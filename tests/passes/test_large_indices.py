"""Arithmetic on indices that a network converts to floats stays in fp32, if 16-bit floats do not hold such integers."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import from_text
from support.simulated import lowered, simulate

from optdnn.ir.verify import verify
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.large_indices import large_indices
from optdnn.passes.support.precision import PrecisionPlan

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'
CONSTANTS = (
    "<int64[1] few = {40}, int64 whole = {16384}, int64 width = {128}, float area = {16384.0}, float two = {2.0}>"
)


def graph_of(body: str, head: str = "(float[1,1310720] x, float[1,40] b) => (float[1,40] y)") -> str:
    """A network whose constants are the sizes of a heat map of 80 classes and 128 x 128 pixels."""
    return f"{HEAD}g {head}\n{CONSTANTS}\n{{ {body} }}"


def names(text: str) -> set[str]:
    graph = from_text(text)
    return {graph.op(i).outputs[0].name for i in large_indices(graph)}


TOP = "v, i = TopK(x, few) "


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("f = Cast<to = 1>(i) y = Div(f, area)", {"f", "y"}),  # the quotient reads a large float
        ("f = Cast<to = 1>(i) q = Div(f, area) y = Floor(q)", {"f", "q", "y"}),  # the rounding decides
        ("f = Cast<to = 1>(i) q = Div(f, area) y = Mul(q, two)", {"f", "q", "y"}),
        ("f = Cast<to = 1>(i) y = Add(f, b)", {"f", "y"}),  # offsets are added to positions
        ("d = Div(i, whole) f = Cast<to = 1>(d) y = Mul(f, two)", set()),  # 80 classes
        ("m = Mod(i, width) f = Cast<to = 1>(m) y = Add(f, b)", set()),  # 128 columns
        ("m = Mod(i, whole) d = Div(m, width) f = Cast<to = 1>(d) y = Add(f, b)", set()),
        ("m = Mod(i, whole) f = Cast<to = 1>(m) y = Sub(f, b)", {"f", "y"}),
        ("m = Mod(i, width) r = Relu(b) y = GatherElements<axis = 1>(r, m)", set()),  # the elements are no indices
    ],
)  # fmt: skip
def test_operators_on_large_indices(body: str, expected: set[str]) -> None:
    assert names(graph_of(TOP + body)) == expected


@pytest.mark.parametrize(("size", "found"), [(257, False), (258, True)])
@pytest.mark.parametrize("kind", ["ArgMax", "ArgMin"])
def test_the_largest_index_decides(kind: str, size: int, found: bool) -> None:
    head = f"(float[4,{size}] x) => (float[4,1] y)"
    assert bool(names(graph_of(f"i = {kind}<axis = 1>(x) y = Cast<to = 1>(i)", head))) == found


def test_a_layer_ends_the_chain() -> None:
    head = "(float[1,1310720] x, float[40,8] w) => (float[1,8] y)"
    assert names(graph_of(TOP + "f = Cast<to = 1>(i) q = Div(f, area) y = MatMul(q, w)", head)) == {"f", "q"}
    assert names(graph_of(TOP + "f = Cast<to = 1>(i) y = MatMul(f, w)", head)) == {"f", "y"}


def test_networks_without_indices() -> None:
    assert not names(graph_of("y = Add(b, two)", "(float[1,40] b) => (float[1,40] y)"))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_classes_are_right(precision: str) -> None:
    """In fp16 all indices from 65520 on would be infinite."""
    text = graph_of(TOP + "f = Cast<to = 1>(i) q = Div(f, area) k = Floor(q) y = Add(k, b)")
    graph = from_text(text)
    report = AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=PrecisionPlan(precision)))
    verify(graph)
    assert any("it computes with indices" in r.reason for r in report.refused)
    x, at = np.zeros((1, 1310720), np.float32), np.arange(40) * 32768 + 16383
    x[0, at] = np.arange(41, 1, -1)
    feeds = {"x": x, "b": np.zeros((1, 40), np.float32)}
    (found,) = simulate(lowered(from_text(text), precision), feeds).values()
    np.testing.assert_array_equal(found, [at // 16384])
