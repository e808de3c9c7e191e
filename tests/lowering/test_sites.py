"""Plans of graphs: regions, sites that other regions cover, and operators without a launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import from_text
from support.net import Net
from support.simulated import feeds_of, kinds, lowered, results_of, simulate

from optdnn.config import BuildOptions
from optdnn.errors import UnsupportedError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, Move
from optdnn.kernels.pointwise.elementwise import Elementwise
from optdnn.lowering.choose import Selection, Site
from optdnn.lowering.cuda import Planned, plan
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Step


def planned(graph: Graph, **given: Any) -> Planned:
    options = BuildOptions(target="simulate", precision="fp16", **given)
    copy = graph.copy()
    optimize(copy, options, "simulate")
    return plan(copy, options, of_arch("sm_90a"), Selection.of(options))


def sites(found: Planned) -> list[Site]:
    return [entry for entry in found.b.plan if isinstance(entry, Site)]


def regions(found: Planned) -> list[list[str]]:
    """The kinds of the operators of each site."""
    return [[op.kind for op in site.region.ops] for site in sites(found) if not site.dropped]


def residual_norm() -> Graph:
    """An addition; its sum is normalized, and read by another operator."""
    n = Net()
    a, b = n.input(4, 96, name="a"), n.input(4, 96, name="b")
    total = n.op("Add", a, b)
    normal = n.op("LayerNormalization", total, n.random(96), n.random(96), attrs=LayerNormAttrs(axis=-1))
    return n.done(n.op("Mul", normal, total))


def separable(*, also_read: bool = False) -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 16, 28, 28), 64, 1, pads=0))
    deep = n.op("Relu", n.conv(x, 64, group=64, bias=True))
    out = n.conv(deep, 32, 1, pads=0)
    return n.done(*((n.op("Sigmoid", deep), out) if also_read else (out,)))


def test_a_plan_has_no_launch_and_a_place_for_every_result() -> None:
    found = planned(residual_norm())
    assert not found.b.steps
    assert not found.b.kernels
    assert found.b.plan
    assert all(isinstance(entry, (Site, Move, Step)) for entry in found.b.plan)
    for site in sites(found):
        assert all(op.value in found.b.place for op in site.region.ops)


def test_operators_after_the_anchor_have_no_site_of_their_own() -> None:
    assert ["Add", "LayerNormalization"] in regions(planned(residual_norm()))
    assert not any("LayerNormalization" in kinds for kinds in regions(planned(residual_norm())) if len(kinds) == 1)


def test_the_site_of_an_operator_before_the_anchor_is_dropped() -> None:
    found = planned(separable())
    assert ["Conv", "Conv"] in regions(found)
    (dropped,) = [site for site in sites(found) if site.dropped]
    assert dropped.op.attrs.group == 64
    rows = lowered(separable()).meta["tactics"]
    (row,) = [row for row in rows if row.get("dropped") and row["kind"] == "Conv"]
    assert row["nodes"] == sorted(dropped.op.src)
    assert row["launches"] == 0


def test_a_value_with_another_reader_is_computed_by_its_own_site() -> None:
    found = planned(separable(also_read=True))
    assert not any(site.dropped for site in sites(found))
    assert ["Conv", "Conv"] not in regions(found)


def slices_of_a_pad(*, also_read: bool) -> Graph:
    n = Net()
    x = n.input(2, 3, 8, 5)
    padded = n.op("Pad", x, n.ints(0, 0, 1, 0, 0, 0, 1, 0))
    taps = [n.op("Slice", padded, n.ints(t), n.ints(t + 8), n.ints(2)) for t in range(3)]
    joint = n.op("Concat", *taps, attrs=ConcatAttrs(1))
    return n.done(*((joint, n.op("Sigmoid", padded)) if also_read else (joint,)))


def test_slices_side_by_side_leave_out_the_pad_unless_it_is_read() -> None:
    assert kinds(lowered(slices_of_a_pad(also_read=False), "fp32")) == ["Frames"]
    assert "Pad" in kinds(lowered(slices_of_a_pad(also_read=True), "fp32"))


def test_operators_that_cannot_be_launched_run_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    n = Net()
    x = n.op("Softmax", n.input(4, 32))
    graph = n.done(n.op("Softmax", n.op("Erf", x)))
    before = Elementwise.emit

    def emit(self: Elementwise, b: Builder, op: Op, config: Any = None) -> str:
        if op.kind == "Erf":
            raise UnsupportedError("it has too many elements")
        return before(self, b, op, config)

    monkeypatch.setattr(Elementwise, "emit", emit)
    program = lowered(graph, "fp32")
    (row,) = program.meta["host"]["operators"]
    assert (row["kind"], row["why"], row["forced"]) == ("Erf", "it has too many elements", True)
    for got, want in results_of(program, graph):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    with pytest.raises(UnsupportedError, match="strict forbids"):
        lowered(graph, "fp32", strict=True)


def test_a_pool_after_a_convolution_is_in_its_region() -> None:
    n = Net()
    y = n.op("Relu", n.conv(n.input(16, 64, 56, 56), 64, bias=True))
    found = planned(n.done(n.max_pool(y, kernel=2, strides=2, pads=0)))
    assert ["Conv", "MaxPool"] in regions(found)
    pool = next(site.region.after[0] for site in sites(found) if site.region.after)
    conv = next(site.op for site in sites(found) if site.region.after)
    assert pool.value in found.b.place
    assert conv.value not in found.b.place, "the convolution's own result is not stored"


NO_ROWS = """<ir_version: 9, opset_import: ["": 17]>
g (float[8] x, float[8] y) => (float[6] z, float[n] more)
<int64[1] flat = {-1}, int64[0] none = {}, int64[2] pads = {0, 6}, float seven = {7}>
{ chosen = NonZero(x) i = Reshape(chosen, flat) some = Gather(y, i) rows = Gather(some, none) z = Pad(rows, pads, seven)
  more = Exp(some) }"""


def test_no_rows_of_a_selection_are_a_constant() -> None:
    """The number of selected rows depends on data, so their Gather would run on the host; the Pad has a kernel."""
    graph = from_text(NO_ROWS)
    feeds = feeds_of(graph)
    found = simulate(lowered(graph, "fp32"), feeds)
    assert found["z"].tolist() == [7] * 6
    np.testing.assert_allclose(found["more"], evaluate(graph, feeds)["more"], rtol=1e-5)
