"""masked_rows: rows gathered by a mask and scattered back; refusals."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text

from optdnn.ir.evaluate import evaluate
from optdnn.passes import masked_rows
from optdnn.passes.base import PassContext
from optdnn.passes.masked_rows import MaskedRows

GPU = PassContext(target="cuda:sm_90a")
HEAD = """<ir_version: 9, opset_import: ["": 17]>
g (float[9,4] x, float[1,3,8,8] image, float[9] size) => (float[9,3,2,2] y)
<float zero = {0}, int64[4] all = {9, 3, 2, 2}, int64[1] flat = {-1}, int64[4] four = {-1, 1, 1, 1},
 int64[4] whole = {1, 3, 2, 2}, int64[1] column = {0}, int64[4] coordinates = {0, 1, 2, 3}>
"""
ROWS = """mask = Greater(size, zero) chosen = NonZero(mask) i = Reshape(chosen, flat)
  rows = Gather(x, i) first = Gather<axis = 1>(x, column) none = Sub(first, first) images = Gather(none, i)
  image_of = Squeeze(images, one) index = Cast<to = 7>(image_of)
  rois = Gather<axis = 1>(rows, coordinates)
  made = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(image, rois, index)
"""
SCATTER = """old = ConstantOfShape(all) wide = Reshape(i, four) at = Expand(wide, whole)
  y = ScatterElements<axis = 0>(old, at, made)"""


def head(rows: str = ROWS, scatter: str = SCATTER) -> str:
    """One level of a pyramid: regions that a mask selects are aligned, and scattered into all regions."""
    return HEAD.replace("int64[1] column", "int64[1] one = {1}, int64[1] column") + "{" + rows + scatter + "}"


def test_a_level_of_a_pyramid() -> None:
    after, _ = check_pass(MaskedRows(), head(), changes=1, context=GPU)
    assert "NonZero" not in after.kinds()
    assert "ScatterElements" not in after.kinds()
    assert all(op.outputs[0].type.is_static for op in after.ops())


def test_scatter_nd_onto_computed_rows() -> None:
    scatter = """old = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(image, x, zeros)
      two = Unsqueeze(i, one) y = ScatterND(old, two, made)"""
    text = head(scatter=scatter).replace("int64[1] column", "int64[9] zeros = {0,0,0,0,0,0,0,0,0}, int64[1] column")
    check_pass(MaskedRows(), text, changes=1, context=GPU)


@pytest.mark.parametrize("fill", [-1.0, 1.0])
def test_no_row_and_all_rows(fill: float) -> None:
    graph = from_text(head())
    after = graph.copy()
    MaskedRows()(after, GPU)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.uniform(0, 8, (9, 4)), "image": rng.standard_normal((1, 3, 8, 8)), "size": np.full(9, fill)}
    feeds = {k: v.astype(np.float32) for k, v in feeds.items()}
    expected, found = evaluate(graph, feeds)["y"], evaluate(after, feeds)["y"]
    np.testing.assert_array_equal(found, expected)
    assert bool(expected.any()) == (fill > 0)


def test_rows_outside_of_the_mask_do_not_leak() -> None:
    """Rows outside of the mask hold NaN, and images that do not exist."""
    graph = from_text(head())
    MaskedRows()(graph, GPU)
    feeds = {"x": np.ones((9, 4)), "image": np.ones((1, 3, 8, 8)), "size": np.arange(9) - 4.0}
    feeds["x"][:4] = np.nan
    y = evaluate(graph, {k: v.astype(np.float32) for k, v in feeds.items()})["y"]
    assert np.isfinite(y).all()
    assert not y[:4].any()


def test_rows_that_meet_are_refused() -> None:
    """A cumulative sum along the rows: each depends on all earlier rows."""
    rows = ROWS.replace("made = RoiAlign", "apart = RoiAlign") + " made = CumSum(apart, zero64) "
    text = head(rows=rows).replace("int64[1] column", "int64 zero64 = {0}, int64[1] column")
    check_refused(MaskedRows(), text, because="CumSum.* does not compute each row", context=GPU)


def test_rows_from_elsewhere_are_refused() -> None:
    rows = ROWS.replace("rows = Gather(x, i)", "other = Neg(i) rows = Gather(x, other)")
    check_refused(MaskedRows(), head(rows=rows), because="does not compute each row from a row that", context=GPU)


def test_all_rows_together_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_rows, "MOST_ELEMENTS", 9 * 3 * 2 * 2 - 1)
    check_refused(MaskedRows(), head(), because="too large", context=GPU)


def test_places_that_are_not_those_of_the_mask_are_no_candidates() -> None:
    moved = SCATTER.replace("wide = Reshape(i, four)", "moved = Add(i, column) wide = Reshape(moved, four)")
    assert moved != SCATTER
    check_untouched(MaskedRows(), head(scatter=moved), GPU)


def test_sums_by_the_numbers_of_the_chosen_rows_are_refused() -> None:
    text = head(scatter=SCATTER.replace("axis = 0>(old", 'axis = 0, reduction = "add">(old'))
    check_refused(MaskedRows(), text, because="NonZero.* does not compute each row", rule="masked_sums", context=GPU)


def running(axis: int) -> str:
    """Running sums of the rows that a mask selects, along an axis."""
    return f"""<ir_version: 9, opset_import: ["": 17]>
g (float[6,4] x, float[6] size, float[6,4] old) => (float[6,4] y)
<float zero = {{0}}, int64 axis = {{{axis}}}, int64[1] flat = {{-1}}, int64[2] column = {{-1, 1}}>
{{ mask = Greater(size, zero) chosen = NonZero(mask) i = Reshape(chosen, flat) rows = Gather(x, i)
  sums = CumSum(rows, axis) two = Reshape(i, column) y = ScatterND(old, two, sums) }}"""


def test_running_sums_of_rows() -> None:
    after, _ = check_pass(MaskedRows(), running(-1), changes=1, context=GPU)
    assert after.kinds()["Where"] == 2
    assert "NonZero" not in after.kinds()


def test_running_sums_over_rows_are_refused() -> None:
    check_refused(MaskedRows(), running(0), because="CumSum.* does not compute each row", context=GPU)
