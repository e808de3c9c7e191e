"""common_features: features that many rows have in common are multiplied once."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes import gathered_products
from optdnn.passes.gathered_products import ADDITION, GatheredProducts

B, N, C, D, MADE = 2, 12, 8, 16, 24
FIRES = {"common_features": 1}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks are rewritten, too."""
    monkeypatch.setattr(gathered_products, "LEAST_SAVED", 1)
    monkeypatch.setattr(gathered_products, "ADDITION", 0)


def of_points(n: Net, points: int = N, features: int = D) -> tuple[Value, Value]:
    """Features of each point, and those of the whole cloud, repeated for each point (PointNet)."""
    x = n.op("Relu", n.input(B, C, points))
    whole = n.op("Relu", n.input(B, features, 1, name="g"))
    return x, n.op("Expand", whole, n.ints(B, features, points))


def points(n: Net, count: int = N, features: int = D) -> Value:
    return n.op("Concat", *of_points(n, count, features), attrs=ConcatAttrs(1))


def pairs(n: Net) -> Value:
    """The features of two objects and of a question (Relation Networks), for each pair of objects."""
    x, q = n.op("Relu", n.input(B, N, D)), n.op("Relu", n.input(B, C, name="q"))
    first = n.op("Expand", n.op("Unsqueeze", x, n.ints(2)), n.ints(B, N, N, D))
    second = n.op("Expand", n.op("Unsqueeze", x, n.ints(1)), n.ints(B, N, N, D))
    asked = n.op("Expand", n.op("Unsqueeze", q, n.ints(1, 2)), n.ints(B, N, N, C))
    return n.op("Concat", first, second, asked, attrs=ConcatAttrs(3))


def made(graph: Graph, kind: str) -> list[tuple[int, ...]]:
    return sorted(graph.type(op.value).static_shape for op in graph.of_kind(kind))


@pytest.mark.usefixtures("small")
def test_features_of_the_cloud_beside_those_of_its_points() -> None:
    n = Net(np.float64)
    y = n.op("Relu", n.conv(points(n), MADE, 1, pads=0, bias=True))
    graph, _ = check_pass(GatheredProducts(), n.done(y), changes=1, rules=FIRES)
    assert made(graph, "Conv") == [(B, MADE, 1), (B, MADE, N)]
    assert graph.kinds() == {"Add": 1, "Conv": 2, "Relu": 3}


@pytest.mark.usefixtures("small")
def test_pairs_of_objects() -> None:
    """No operand has a row for each pair; only the sum has."""
    n = Net(np.float64)
    y = n.op("Relu", n.op("Add", n.matmul(pairs(n), MADE), n.random(MADE)))
    graph, _ = check_pass(GatheredProducts(), n.done(y), changes=1, rules=FIRES)
    assert made(graph, "MatMul") == [(B, N, MADE), (B, N, MADE), (B, MADE)]
    assert not list(graph.of_kind("Concat", "Expand"))


@pytest.mark.usefixtures("small")
def test_other_features_stay_side_by_side() -> None:
    n = Net(np.float64)
    x, whole = of_points(n)
    joined = n.op("Concat", n.op("Tanh", x), whole, x, attrs=ConcatAttrs(1))
    graph, _ = check_pass(GatheredProducts(), n.done(n.conv(joined, MADE, 1, pads=0)), changes=1, rules=FIRES)
    assert made(graph, "Concat") == [(B, 2 * C, N)]
    assert made(graph, "Conv") == [(B, MADE, 1), (B, MADE, N)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_a_gemm(bias: bool) -> None:
    n = Net(np.float64)
    own, state = n.op("Relu", n.input(N, C)), n.op("Relu", n.input(D, name="s"))
    rows = n.op("Concat", n.op("Expand", state, n.ints(N, D)), own, attrs=ConcatAttrs(1))
    given = [n.random(MADE, C + D), *([n.random(MADE)] if bias else [])]
    y = n.op("Tanh", n.op("Gemm", rows, *given, attrs=GemmAttrs(transB=True)))
    graph, _ = check_pass(GatheredProducts(), n.done(y), changes=1, rules=FIRES)
    assert made(graph, "MatMul") == [(N, MADE), (MADE,)]
    assert len(list(graph.of_kind("Add"))) == 1 + bias


@pytest.mark.usefixtures("small")
def test_nothing_but_repeated_rows() -> None:
    """The product is repeated in place of its rows."""
    n = Net(np.float64)
    rows = n.op("Expand", n.op("Relu", n.input(B, 1, D)), n.ints(B, N, D))
    graph, _ = check_pass(GatheredProducts(), n.done(n.op("Tanh", n.matmul(rows, MADE))), changes=1, rules=FIRES)
    assert made(graph, "MatMul") == [(B, 1, MADE)]
    assert made(graph, "Expand") == [(B, N, MADE)]


@pytest.mark.usefixtures("small")
def test_what_stays() -> None:
    n = Net()
    x, whole = of_points(n)
    more = n.op("Concat", x, n.op("Add", whole, n.input(B, D, N, name="y")), attrs=ConcatAttrs(1))
    check_untouched(GatheredProducts(), n.done(n.conv(more, MADE, 1, pads=0)))  # the sum has features of each point
    n = Net()
    check_untouched(GatheredProducts(), n.done(n.conv(points(n), MADE, 3, pads=1)))  # its border reads zeros
    n = Net()
    joined = n.op("Concat", *of_points(n, features=C), attrs=ConcatAttrs(0))
    check_untouched(GatheredProducts(), n.done(n.conv(joined, MADE, 1, pads=0)))  # more clouds, not more features


@pytest.mark.usefixtures("small")
def test_rows_that_others_read() -> None:
    n = Net()
    joined = points(n)
    graph = n.done(n.conv(joined, MADE, 1, pads=0), n.op("Tanh", joined))
    check_refused(GatheredProducts(), graph, because="its rows are also read by others", rule="common_features")


LAUNCH = "what it would save takes less time than a launch that adds the products"


def test_few_multiplications() -> None:
    """In a small network, launches take longer than what is saved."""
    n = Net()
    check_refused(GatheredProducts(), n.done(n.conv(points(n), MADE, 1, pads=0)), because=LAUNCH)


@pytest.mark.parametrize("features", [ADDITION + 100, ADDITION])
def test_many_multiplications(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they save more time than the addition takes."""
    monkeypatch.setattr(gathered_products, "LEAST_SAVED", B * MADE * N * 50)
    n = Net(np.float64)
    graph = n.done(n.conv(points(n, N, features), MADE, 1, pads=0))
    if features > ADDITION:
        check_pass(GatheredProducts(), graph, changes=1, rules=FIRES)
    else:
        check_refused(GatheredProducts(), graph, because=LAUNCH)


def test_rows_of_nothing_but_common_features_need_no_further_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_products, "LEAST_SAVED", B * MADE * (N - 1) * D)
    n = Net(np.float64)
    rows = n.op("Expand", n.op("Relu", n.input(B, 1, D)), n.ints(B, N, D))
    check_pass(GatheredProducts(), n.done(n.op("Tanh", n.matmul(rows, MADE))), changes=1, rules=FIRES)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_simulated(precision: str) -> None:
    n = Net()
    check_simulated(n.done(n.op("Relu", n.conv(points(n), MADE, 1, pads=0, bias=True))), precision)
    n = Net()
    check_simulated(n.done(n.op("Relu", n.op("Add", n.matmul(pairs(n), MADE), n.random(MADE)))), precision)
