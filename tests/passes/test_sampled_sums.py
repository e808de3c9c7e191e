"""sampled_sums: deformable attention and deformable convolutions become weighted sums of sampled images."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net, built
from support.sampled_cases import CASES, POINTS, QUERIES, deformed, graph_of, pictures

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.detect import DeformConvAttrs, GridSampleAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes import sampled_sums
from optdnn.passes.sampled_sums import SampledSums

PASS = SampledSums()
SUMS = [name for name in CASES if "warped" not in name and name != "nearest"]


@pytest.mark.parametrize("name", SUMS)
def test_each_form(name: str) -> None:
    graph, _ = check_pass(PASS, graph_of(name), changes=2 if name.startswith("pictures") else 1)
    (total,) = graph.of_kind("SampledSum")
    assert not graph.of_kind("GridSample", "DeformConv", "ReduceSum")
    groups = 4 if name.startswith("pictures") else {"offset_groups": 2, "offset_groups_of_one": 4}.get(name, 1)
    assert graph.type(total.inputs[1]).dims[1] == groups


def test_levels_are_operands_in_turn() -> None:
    graph, _ = check_pass(PASS, graph_of("levels"), changes=1, rules={"sampled_sum": 1})
    (total,) = graph.of_kind("SampledSum")
    shapes = [graph.type(v).static_shape for v in total.inputs if v is not None]
    places = (2, 1, QUERIES, POINTS, 2)
    assert shapes == [(2, 8, 6, 5), places, (2, 8, 3, 3), places, (2, 1, QUERIES, 2 * POINTS)]


@pytest.mark.parametrize("name", ["pictures", "pictures_joined", "pictures_channels"])
def test_heads_of_pictures_are_groups_of_channels(name: str) -> None:
    graph, _ = check_pass(PASS, graph_of(name), changes=2, rules={"sampled_sum": 1, "sampled_heads": 1})
    (total,) = graph.of_kind("SampledSum")
    shapes = [graph.type(v).static_shape for v in total.inputs if v is not None]
    places = (3, 4, QUERIES, POINTS, 2)
    assert shapes == [(3, 32, 6, 5), places, (3, 32, 3, 3), places, (3, 4, QUERIES, 2 * POINTS)]


def test_heads_of_one_picture_are_a_view() -> None:
    check_pass(PASS, built(pictures, batch=1), changes=1, rules={"sampled_sum": 1})


def test_columns_are_multiplied_with_one_matrix() -> None:
    graph, _ = check_pass(PASS, graph_of("deformed"), changes=1, rules={"deformed_columns": 1})
    (product,) = graph.of_kind("MatMul")
    assert graph.type(product.inputs[0]).static_shape == (2, 63, 9 * 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [4, 5])
def test_samples_joined_along_another_axis_stay(rank: int) -> None:
    n = Net()
    places = n.op("Tanh", n.input(1, 3, 3, 2, name="places"))
    y = n.op("GridSample", n.input(1, 8, 5, 5), places)
    z = n.op("GridSample", n.input(1, 8, 6, 6, name="z"), places)
    if rank == 5:
        y, z = (n.op("Unsqueeze", v, n.ints(4)) for v in (y, z))
        joined = n.op("Reshape", n.op("Concat", y, z, attrs=ConcatAttrs(4)), n.ints(1, 8, 3, 6))
    else:
        joined = n.op("Concat", y, z, attrs=ConcatAttrs(2))
    check_untouched(PASS, n.done(n.op("ReduceSum", joined, n.ints(-1), attrs=ReduceAttrs())))


def test_other_sums_are_no_candidates() -> None:
    n = Net()
    y = n.op("GridSample", n.input(1, 8, 5, 5), n.op("Tanh", n.input(1, 3, 3, 2, name="places")))
    check_untouched(PASS, n.done(n.op("ReduceSum", y, n.ints(1), attrs=ReduceAttrs())))
    n = Net()
    y = n.op("GridSample", n.input(1, 8, 5, 5), n.op("Tanh", n.input(1, 3, 3, 2, name="places")))
    check_untouched(PASS, n.done(y, n.op("ReduceSum", y, n.ints(3), attrs=ReduceAttrs())))
    n = Net()
    check_untouched(PASS, n.done(n.op("ReduceSum", n.input(1, 8, 5, 5), n.ints(3), attrs=ReduceAttrs())))


def mixed(**changes: Any) -> Graph:
    """Two images that differ in one thing."""
    n = Net()
    places = n.op("Tanh", n.input(1, 3, 4, 2, name="places"))
    y = n.op("GridSample", n.input(1, 8, 5, 5), places)
    other = n.op("GridSample", n.input(1, 8, 6, 6, name="z"), places, attrs=GridSampleAttrs(**changes))
    y = n.op("Concat", y, other, attrs=ConcatAttrs(3))
    return n.done(n.op("ReduceSum", y, n.ints(-1), attrs=ReduceAttrs()))


def test_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(PASS, mixed(align_corners=True), because="sampled in different ways")
    n = Net()
    y = n.op("GridSample", n.input(1, 8, 5, 5), n.op("Tanh", n.input(1, 3, 4, 2, name="places")))
    y = n.op("Mul", y, n.input(1, 8, 3, 4, name="weights"))
    graph = n.done(n.op("ReduceSum", y, n.ints(-1), attrs=ReduceAttrs()))
    check_refused(PASS, graph, because="differ from channel to channel")
    monkeypatch.setattr(sampled_sums, "MOST_IMAGES", 1)
    check_refused(PASS, mixed(), because="it adds samples of 2 images")


def convolution(units: Any = None, sizes: tuple[Any, ...] = (6, 5), batch: Any = 1) -> Graph:
    n = Net()
    x, offset = n.input(batch, 4, *sizes), n.op("Tanh", n.input(batch, 18, *sizes, name="offset"))
    w = n.input(8, 4, 3, 3, name="w") if units is None else n.random(units, 4, 3, 3)
    attrs = DeformConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))
    return n.done(n.op("DeformConv", x, w, offset, attrs=attrs))


def test_it_refuses_deformable_convolutions() -> None:
    check_refused(PASS, built(deformed, group=2), because="it has 2 groups")
    check_refused(PASS, convolution(), because="its weights are not constant")
    check_refused(PASS, convolution(8, (6, 1)), because="only one row or column")
    check_refused(PASS, convolution(8, batch=symbol("n", 1, 8)), because="sizes are not known")
