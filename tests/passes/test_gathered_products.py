"""gathered_products: rows are multiplied before they are gathered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.gathered_products import TABLE, GatheredProducts
from optdnn.types import INT64

CAST = CastAttrs(INT64)
POINTS, NEAR, C, MADE = 12, 5, 8, 16
EDGES = 40


def places(n: Net, count: int = POINTS * NEAR) -> Value:
    """Indices that are computed, some from the end."""
    return n.op("Cast", n.op("Clip", n.op("Mul", n.input(count, name="i"), 6.0), -12.0, 11.0), attrs=CAST)


def gathered_elements(n: Net, x: Value, batch: int = 1) -> Value:
    """Each point's neighbors: [batch, C, POINTS, NEAR]."""
    index = n.op("Reshape", places(n, batch * POINTS * NEAR), n.ints(batch, 1, POINTS * NEAR))
    wide = n.op("Expand", index, n.ints(batch, C, POINTS * NEAR))
    found = n.op("GatherElements", x, wide, attrs=GatherAttrs(2))
    return n.op("Reshape", found, n.ints(batch, C, POINTS, NEAR))


def edges(n: Net, batch: int = 1) -> Value:
    """The operand of an edge convolution: [batch, 2 C, POINTS, NEAR]."""
    x = n.op("Relu", n.input(batch, C, POINTS))
    here = n.op("Expand", n.op("Unsqueeze", x, n.ints(3)), n.ints(batch, C, POINTS, NEAR))
    return n.op("Concat", n.op("Sub", gathered_elements(n, x, batch), here), here, attrs=ConcatAttrs(1))


def joined(n: Net) -> Value:
    """Gathered pixels, concatenated with others."""
    x = n.op("Relu", n.input(1, C, POINTS, 4))
    return n.op(
        "Concat",
        n.op("Gather", x, places(n, NEAR * 4), attrs=GatherAttrs(2)),
        n.input(1, C, NEAR * 4, 4, name="y"),
        attrs=ConcatAttrs(1),
    )


def edge_convolution(n: Net, batch: int = 1) -> Graph:
    y = n.op("LeakyRelu", n.conv(edges(n, batch), MADE, 1, pads=0, bias=True))
    return n.done(n.op("ReduceMax", y, n.ints(3)))


def nodes(n: Net) -> Value:
    return n.op("Relu", n.input(POINTS, C))


def ends(n: Net, x: Value, *more: Value) -> Value:
    """The features of both ends of each edge, side by side."""
    both = [
        n.op("Gather", x, n.op("Add", places(n, EDGES), n.const(0, np.int64)), attrs=GatherAttrs(0)) for _ in (0, 1)
    ]
    return n.op("Concat", *both, *more, attrs=ConcatAttrs(1))


def test_an_edge_convolution() -> None:
    n = Net(np.float64)
    graph, report = check_pass(GatheredProducts(), edge_convolution(n), changes=2)
    assert {f.rule for f in report.fired} == {"gathered_products", "gather_by_one_index"}
    assert sorted(graph.type(op.value).static_shape for op in graph.of_kind("Conv")) == [(1, MADE, POINTS)] * 2
    assert not list(graph.of_kind("Concat", "Sub", "GatherElements"))


def test_several_clouds() -> None:
    n = Net(np.float64)
    graph, _ = check_pass(GatheredProducts(), edge_convolution(n, 2), changes=2)
    assert [graph.type(op.value).static_shape for op in graph.of_kind("Gather")] == [(2 * POINTS * NEAR, MADE)]


def turned_edges(n: Net, batch: int, repeat: bool = True) -> Graph:
    """Edges as rows, turned before the convolution: DGCNN as published. Without ``repeat``, others read the points."""
    x = n.op("Relu", n.input(batch, POINTS, C))
    rows = n.op("Gather", n.op("Reshape", x, n.ints(batch * POINTS, C)), places(n, batch * POINTS * NEAR))
    there = n.op("Reshape", rows, n.ints(batch, POINTS, NEAR, C))
    here = n.op("Reshape", x, n.ints(batch, POINTS, 1, C))
    wide = n.op("Expand", here, n.ints(1, 1, NEAR, 1)) if repeat else n.input(batch, POINTS, NEAR, C, name="y")
    parts = n.op("Concat", n.op("Sub", there, here), wide, attrs=ConcatAttrs(3))
    turned = n.op("Transpose", parts, attrs=TransposeAttrs((0, 3, 1, 2)))
    return n.done(n.op("ReduceMax", n.op("LeakyRelu", n.conv(turned, MADE, 1, pads=0, bias=True)), n.ints(3)))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_difference_that_is_turned_before_the_convolution(batch: int) -> None:
    graph, _ = check_pass(GatheredProducts(), turned_edges(Net(np.float64), batch), changes=1)
    products = [graph.type(op.value).static_shape for op in graph.of_kind("MatMul")]
    assert products == [(batch, POINTS, MADE)] * 2
    assert not list(graph.of_kind("Concat", "Sub", "Expand", "Conv"))


def test_a_difference_beside_as_many_other_rows_stays() -> None:
    check_untouched(GatheredProducts(), turned_edges(Net(np.float64), 1, repeat=False))


def test_an_index_for_each_channel_stays() -> None:
    n = Net(np.float64)
    x, index = n.op("Relu", n.input(C, POINTS)), n.op("Reshape", places(n, C * NEAR), n.ints(C, NEAR))
    check_untouched(GatheredProducts(), n.done(n.op("GatherElements", x, index, attrs=GatherAttrs(1))))
    n = Net(np.float64)
    x, index = n.op("Relu", n.input(C, POINTS)), n.op("Reshape", places(n, C), n.ints(C, 1))
    wide = n.op("Expand", index, n.ints(C, NEAR))
    check_untouched(GatheredProducts(), n.done(n.op("GatherElements", x, wide, attrs=GatherAttrs(0))))


def queries(n: Net, given: tuple[int, ...], batch: int = 2, dtype: Any = np.int64) -> Graph:
    """A detector's best rows: ``given`` is the shape of the index before it is repeated for all channels."""
    index = n.const(n.rng.integers(-POINTS, POINTS, given), dtype)
    x = n.op("Relu", n.input(batch, POINTS, 3, C))
    wide = n.op("Expand", n.op("Identity", index), n.ints(batch, NEAR, 3, C))
    return n.done(n.op("GatherElements", x, wide, attrs=GatherAttrs(1)))


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize(
    ("given", "batch", "kind"),
    [((1, NEAR, 1, 1), 1, "Gather"), ((NEAR, 1, 1), 2, "Gather"), ((2, NEAR, 1, 1), 2, "GatherND")],
)
def test_rows_by_one_index(given: tuple[int, ...], batch: int, kind: str, dtype: Any) -> None:
    graph = queries(Net(np.float64), given, batch, dtype)
    after, _ = check_pass(GatheredProducts(), graph, changes=1, rules={"rows_by_one_index": 1})
    (op,) = after.of_kind("Gather", "GatherElements", "GatherND")
    assert op.kind == kind
    assert not list(after.of_kind("Expand"))


@pytest.mark.parametrize("given", [(2, NEAR, 3, 1), (1, 1, 1, 1), (2, NEAR, 1, C)])
def test_an_index_for_other_axes_stays(given: tuple[int, ...]) -> None:
    check_untouched(GatheredProducts(), queries(Net(np.float64), given))


@pytest.mark.parametrize("bias", [True, False])
def test_the_ends_of_edges(bias: bool) -> None:
    n = Net(np.float64)
    rows = ends(n, nodes(n))
    attrs = GemmAttrs(transB=True)
    y = (
        n.op("Gemm", rows, n.random(MADE, 2 * C), *([n.random(MADE)] if bias else []), attrs=attrs)
        if bias
        else n.matmul(rows, MADE)
    )
    graph, _ = check_pass(GatheredProducts(), n.done(n.op("Relu", y)), changes=1)
    assert [graph.type(op.value).static_shape for op in graph.of_kind("MatMul")] == [(POINTS, MADE)] * 2
    assert len(list(graph.of_kind("Gather"))) == 2


def codes(n: Net, rows: int = 64) -> Value:
    """Rows of a constant table."""
    return n.op("Gather", n.random(rows, C), places(n, 4), attrs=GatherAttrs(0))


def test_a_table_is_multiplied_when_the_network_is_built() -> None:
    """Also if it has more rows than are gathered."""
    n = Net(np.float64)
    y = n.op("Gemm", codes(n), n.random(MADE, C), n.random(MADE), attrs=GemmAttrs(transB=True))
    graph = n.done(n.op("Tanh", y))
    after, _ = check_pass(GatheredProducts(), graph, changes=1, rules={"products_of_tables": 1})
    FoldConstants()(after)
    assert after.kinds() == {"Cast": 1, "Clip": 1, "Gather": 1, "Mul": 1, "Tanh": 1}


def test_a_codebook_before_a_convolution() -> None:
    """A vector quantizer gathers codes, turns them into channels, and projects them."""
    n = Net(np.float64)
    picture = n.op("Transpose", n.op("Unsqueeze", codes(n), n.ints(0)), attrs=TransposeAttrs((0, 2, 1)))
    graph = n.done(n.conv(picture, MADE, 1, pads=0, bias=True))
    after, _ = check_pass(GatheredProducts(), graph, changes=1, rules={"products_of_tables": 1})
    FoldConstants()(after)
    assert "Conv" not in after.kinds()
    assert "MatMul" not in after.kinds()


def test_a_large_table_stays() -> None:
    n = Net()
    graph = n.done(n.matmul(codes(n, TABLE // MADE + 1), MADE))
    check_refused(GatheredProducts(), graph, because=f"the product of its table would have {TABLE + MADE} elements")


def test_rows_of_a_table_that_others_read_stay() -> None:
    n = Net()
    rows = codes(n)
    graph = n.done(n.matmul(rows, MADE), n.op("Tanh", rows))
    check_refused(GatheredProducts(), graph, because="its rows are also read by others", rule="products_of_tables")


def test_a_constant_that_is_not_gathered_is_no_table() -> None:
    n = Net(np.float64)
    turned = n.op("Transpose", n.random(C, 4), attrs=TransposeAttrs((1, 0)))
    check_untouched(GatheredProducts(), n.done(n.op("Add", n.matmul(turned, MADE), n.input(4, MADE))))


def test_turned_rows_and_parts_that_are_not_gathered() -> None:
    n = Net(np.float64)
    x = n.op("Transpose", n.op("Relu", n.input(C, POINTS)), attrs=TransposeAttrs((1, 0)))
    y = n.matmul(ends(n, x, n.op("Relu", n.input(EDGES, 2, name="e"))), MADE)
    graph, _ = check_pass(GatheredProducts(), n.done(y), changes=1)
    assert sorted(graph.type(op.value).static_shape for op in graph.of_kind("MatMul")) == [(POINTS, MADE)] * 2 + [
        (EDGES, MADE)
    ]


def test_refusals() -> None:
    n = Net(np.float64)
    more = n.op("Relu", n.input(EDGES, 4 * C, name="e"))
    check_refused(GatheredProducts(), n.done(n.matmul(ends(n, nodes(n), more), MADE)), because="are not half as many")
    n = Net(np.float64)
    rows = ends(n, nodes(n))
    check_refused(GatheredProducts(), n.done(n.matmul(rows, MADE), n.op("Relu", rows)), because="also read by others")


def test_networks_without_a_candidate() -> None:
    n = Net(np.float64)
    check_untouched(GatheredProducts(), n.done(n.matmul(nodes(n), MADE)))
    n = Net(np.float64)
    check_untouched(GatheredProducts(), n.done(n.op("MatMul", ends(n, nodes(n)), n.input(2 * C, MADE, name="w"))))
    n = Net(np.float64)
    check_untouched(GatheredProducts(), n.done(n.conv(joined(n), MADE, 3)))
    n = Net(np.float64)
    grouped = n.op("Conv", joined(n), n.random(MADE, C, 1, 1), attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), 2))
    check_untouched(GatheredProducts(), n.done(grouped))
    n = Net(np.float64)
    sums = n.op("Gemm", ends(n, nodes(n)), n.random(2 * C, MADE), attrs=GemmAttrs(alpha=0.5))
    check_untouched(GatheredProducts(), n.done(sums))


def test_a_long_chain_of_sums_stays() -> None:
    """A loop of 1,000 steps with a shortcut, unrolled. Of Fibonacci's sums, each has more parts than the one before."""
    n = Net(np.float64)
    x, before = n.op("Relu", n.input(POINTS, C)), n.op("Tanh", n.input(POINTS, C, name="y"))
    for _ in range(1000):
        x, before = n.op("Add", x, before), x
    check_untouched(GatheredProducts(), n.done(n.matmul(x, MADE)))


def test_a_network_on_the_gpu() -> None:
    check_simulated(edge_convolution(Net()), "fp16")
    n = Net()
    check_simulated(n.done(n.op("Relu", n.matmul(ends(n, nodes(n)), MADE))), "fp16")
