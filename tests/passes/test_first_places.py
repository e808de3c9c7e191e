"""masked_rows and pad_rows: the first rows that a mask selects have a known size; refusals."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused
from support.net import Net

from optdnn.dim import DimLike, symbol
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import ShapeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.counted_places import CountedPlaces
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.pad_rows import PadRows
from optdnn.passes.rules import first_places
from optdnn.types import Array

RULES = {"first_places": 1, "first_rows_count": 1, "first_rows_filled": 1}
GPU = PassContext(target="cuda:sm_90a")


def selected(
    *,
    size: DimLike = 12,
    most: int = 5,
    start: int = 0,
    step: int = 1,
    axis: int = 0,
    gather: int | None = 0,
    rows: DimLike = 12,
) -> Graph:
    """The first ``most`` rows (``gather`` None: their places) with a positive score, filled up to 7: the best boxes."""
    n = Net()
    score = n.input(size, name="score")
    index = n.op("Reshape", n.op("NonZero", n.op("Greater", score, n.const(np.float32(0)))), n.ints(-1))
    taken = index if gather is None else n.op("Gather", n.input(rows, 12), index, attrs=GatherAttrs(gather))
    first = n.op("Slice", taken, n.ints(start), n.ints(most), n.ints(axis), n.ints(step))
    if axis != (gather or 0):
        return n.done(first)
    rest = n.op("Sub", n.ints(7), n.op("Shape", first, attrs=ShapeAttrs(0, 1)))
    zeros = [0] * (len(n.dims(first)) - 1)
    pads = n.op("Concat", n.ints(0, *zeros), rest, *([n.ints(*zeros)] if zeros else []), attrs=ConcatAttrs(0))
    return n.done(n.op("Pad", first, pads))


def scores(size: int, positive: int) -> Array:
    rng = np.random.default_rng(positive)
    return np.where(rng.permutation(size) < positive, 1.0, -1.0).astype(np.float32) * rng.uniform(1, 2, size).astype(
        np.float32
    )


@pytest.mark.parametrize("positive", [0, 1, 4, 5, 6, 12])
@pytest.mark.parametrize("gather", [0, None])
def test_few_and_many_rows(gather: int | None, positive: int) -> None:
    """No size depends on data afterwards, however many rows the mask selects."""
    before = selected(gather=gather)
    after = before.copy()
    for step in (MaskedRows(), PadRows(ahead=True), MaskedRows(), PadRows(), CountedPlaces()):
        step(after, GPU)
    assert all(op.outputs[0].type.is_static for op in after.ops())
    assert "NonZero" not in after.kinds()
    feeds = {"x": np.random.default_rng(1).standard_normal((12, 12)).astype(np.float32), "score": scores(12, positive)}
    feeds = {name: feeds[name] for name in [before.op(i).outputs[0].name for i in before.inputs]}
    np.testing.assert_array_equal(*(next(iter(evaluate(g, feeds).values())) for g in (before, after)))


def test_the_rule() -> None:
    after, _ = check_pass(MaskedRows(), selected(), changes=3, rules=RULES)
    assert {kind: after.kinds().get(kind, 0) for kind in ("ScatterElements", "NonZero", "Pad")} == {
        "ScatterElements": 1,
        "NonZero": 1,  # counted_places removes it
        "Pad": 1,  # of 5 rows to 7
    }


def test_more_rows_than_there_are() -> None:
    after, _ = check_pass(MaskedRows(), selected(size=6, most=7), changes=3, rules=RULES)
    assert {op.outputs[0].type.dims for op in after.of_kind("Gather")} == {(6, 12)}


@pytest.mark.parametrize(
    "graph",
    [
        selected(start=1),
        selected(most=-1),
        selected(step=2),
        selected(axis=1),  # a Slice of other rows than the Gather takes
        selected(size=symbol("k")),
    ],
)
def test_other_slices_stay(graph: Graph) -> None:
    MaskedRows()(graph, GPU)
    assert "ScatterElements" not in graph.kinds()
    assert "NonZero" in graph.kinds()


def test_a_list_of_many_places_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_places, "MOST_PLACES", 11)
    check_refused(MaskedRows(), selected(), because="it lists the places of 12 elements; a scan of more than 11")


@pytest.mark.parametrize("rows", [7, symbol("k")])
def test_a_table_of_fewer_rows_than_the_mask_has_is_refused(rows: DimLike) -> None:
    """The mask may select rows of the table alone. The places behind them, which the list also has, may not be there."""
    because = "takes rows of a table that may have fewer than 12"
    graph = selected(rows=rows)
    report = MaskedRows()(graph, GPU)
    assert any(because in refused.reason for refused in report.refused)
    assert "NonZero" in graph.kinds()
    assert "ScatterElements" not in graph.kinds()
