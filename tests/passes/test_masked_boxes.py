"""masked_boxes, best_boxes, taken_last, nested_selections: suppressions among selected boxes; refusals."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.simulated import check_simulated

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.support import selected_rows
from optdnn.types import Array

GPU = PassContext(target="cuda:sm_90a")
BOXES = """<ir_version: 9, opset_import: ["": 17]>
g (float[40,4] boxes, float[40] scores, int64[40] labels) => (float[n,4] kept, float[n] best, float[n,1] far)
<float least = {0.5}, int64[1] flat = {-1}, int64[3] single = {1, 1, -1}, int64[1] first = {0}, int64[2] column = {-1, 1},
 int64[2] wide = {1, 4}, float size = {100}, int64[1] third = {2}, int64[1] one = {1}, int64[1] some = {7},
 int64 most = {20}, float iou = {0.3}, float second = {0.6}>
{ mask = Greater(scores, least) chosen = NonZero(mask) i = Transpose<perm = [1, 0]>(chosen)
  b = GatherND(boxes, i) s = GatherND(scores, i) c = GatherND(labels, i)
  c2 = Reshape(c, column) c4 = Expand(c2, wide) offset = Cast<to = 1>(c4) far4 = Mul(offset, size) apart = Add(b, far4)
  given = Unsqueeze(apart, first) scored = Reshape(s, single)
  stay = NonMaxSuppression(given, scored, most, iou) numbers = Gather<axis = 1>(stay, third)
  picked = Squeeze(numbers, one) best7 = Slice(picked, first, some, first)
  kept = Gather(b, best7) best = Gather(s, best7) near = Gather(offset, best7) far = Slice(near, first, one, one)
}"""
ALL = {"best_boxes": 1, "masked_boxes": 1, "taken_last": 1}
UNCUT = BOXES.replace("best7 = Slice(picked, first, some, first)", "best7 = Reshape(picked, flat)")
"""All kept boxes are read."""


def boxes_of(count: int, boxes: int = 40) -> dict[str, Array]:
    """Boxes of three classes; ``count`` boxes have high scores."""
    rng = np.random.default_rng(count)
    low = rng.uniform(0, 30, (boxes, 2))
    scores = np.where(rng.permutation(boxes) < count, 0.6, 0.1) + rng.uniform(0, 0.3, boxes)
    whole = np.concatenate([low, low + rng.uniform(5, 20, (boxes, 2))], 1)
    return {
        "boxes": whole.astype(np.float32), "scores": scores.astype(np.float32), "labels": rng.integers(0, 3, boxes)
    }  # fmt: skip


def same_boxes(graph: Graph, after: Graph, feeds: dict[str, Array]) -> int:
    """The results must be equal; returns the number of boxes."""
    expected, found = evaluate(graph, feeds), evaluate(after, feeds)
    for name, a in expected.items():
        np.testing.assert_array_equal(found[name], a)
    return len(expected["best"])


def unknown(graph: Graph) -> set[str]:
    """The kinds of operators whose size depends on data."""
    return {op.kind for op in graph.ops() if not op.outputs[0].type.is_static and op.kind != "Output"}


# ---------------------------------------------------------------- masked_boxes


@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_boxes_above_a_score(count: int) -> None:
    graph = from_text(BOXES)
    after = graph.copy()
    assert "masked_boxes" in {fired.rule for fired in MaskedRows()(after, GPU).fired}
    assert unknown(after) == {"NonMaxSuppression", "Gather"}
    assert (same_boxes(graph, after, boxes_of(count)) > 0) == (count > 0)


def test_boxes_above_a_score_are_structured_and_idempotent() -> None:
    after, _ = check_pass(MaskedRows(), BOXES, changes=3, rules=ALL, context=GPU)
    assert "Where" not in after.kinds(), "the suppression's own threshold is enough"


def test_the_higher_of_two_thresholds_counts() -> None:
    text = BOXES.replace("most, iou)", "most, iou, second)").replace("Greater(scores, least)", "Less(least, scores)")
    after = from_text(text)
    MaskedRows()(after, GPU)
    least = after.constant_value(after.of_kind("NonMaxSuppression")[0].inputs[4])
    assert least is not None
    assert least.tolist() == [np.float32(0.6)]


@pytest.mark.parametrize("count", [0, 1, 40])
def test_boxes_that_reach_a_score(count: int) -> None:
    """A suppression selects scores above its threshold, the mask also those that are equal to it."""
    text = BOXES.replace("Greater(scores, least)", "GreaterOrEqual(scores, least)")
    after, _ = check_pass(MaskedRows(), text, changes=3, rules=ALL, context=GPU)
    feeds = boxes_of(count)
    feeds["scores"][:3] = 0.5
    assert same_boxes(from_text(text), after, feeds) > 0


def test_boxes_whose_numbers_are_read_are_left() -> None:
    text = UNCUT.replace("float[n,1] far)", "float[n,1] far, int64[n] best7)")
    check_refused(MaskedRows(), text, because="reads the indices of the remaining boxes", context=GPU)


@pytest.mark.parametrize(("of", "left"), [("stay", False), ("numbers", True)])
def test_only_a_column_of_box_indices_is_left(of: str, left: bool) -> None:
    """The first column of the whole result holds numbers of images."""
    text = UNCUT.replace("float[n,1] far)", "float[n,1] far, int64[n] first7)")
    text = text.replace("picked =", f"left = Gather<axis = 1>({of}, first) first7 = Reshape(left, flat) picked =")
    if left:
        check_refused(MaskedRows(), text, because="reads the indices of the remaining boxes", context=GPU)
    else:
        assert "masked_boxes" in {fired.rule for fired in MaskedRows()(from_text(text), GPU).fired}


def test_kept_boxes_in_another_order() -> None:
    text = BOXES.replace("Slice(picked, first, some, first)", "Slice(picked, flat, before, first, flat)")
    graph = from_text(text.replace("float iou", "int64[1] before = {-99}, float iou"))
    after, _ = check_pass(MaskedRows(), graph, changes=2, rules={"masked_boxes": 1, "taken_last": 1}, context=GPU)
    for count in (1, 20, 40):
        assert same_boxes(graph, after, boxes_of(count)) > 0


LOOKED_UP = UNCUT.replace("float[n,1] far)", "float[n,1] far, float[n] named)").replace("g (", "g (float[80] names, ")
LOOKED_UP = (
    LOOKED_UP.replace("best = Gather", "named = Gather(name, best7) best = Gather")
    .replace("mask = Greater(scores, least)", "mask = Less(LABELS, eighty)")
    .replace("int64 most", "int64 eighty = {80}, int64 most")
)


@pytest.mark.parametrize(
    ("labels", "classes", "left"), [("labels", 1, True), ("found", 91, True), ("found", 80, False)]
)
def test_names_that_other_boxes_may_not_have(labels: str, classes: int, left: bool) -> None:
    """A mask selects the boxes with a label below 80, the number of names."""
    text = LOOKED_UP.replace("LABELS", labels).replace(
        "c2 =", f"own = GatherND({labels}, i) name = Gather(names, own) c2 ="
    )
    text = text.replace("int64[40] labels)", f"int64[40] labels, float[40,{classes}] logits)")
    text = (
        text.replace("mask =", "found = ArgMax<axis = 1, keepdims = 0>(logits) mask =") if labels == "found" else text
    )
    text = text.replace("most, iou)", "most, iou, second)")
    if left:
        check_refused(MaskedRows(), text, because="may read positions that do not exist for other rows", context=GPU)
    else:
        after = from_text(text)
        assert "masked_boxes" in {fired.rule for fired in MaskedRows()(after, GPU).fired}


def test_boxes_that_meet_are_left() -> None:
    text = UNCUT.replace("far4)", "sums)").replace("apart =", "sums = CumSum(far4, none) apart =")
    text = text.replace("float iou", "int64 none = {0}, float iou")
    check_refused(MaskedRows(), text, because="does not compute each row", context=GPU)


def test_all_boxes_together_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_rows, "MOST_ELEMENTS", 40 * 4 - 1)
    check_refused(MaskedRows(), UNCUT, because="too large", context=GPU)


def test_scores_that_may_be_minus_infinity_are_left() -> None:
    text = UNCUT.replace("Reshape(s, single)", "Reshape(s9, single)").replace("scored =", "s9 = Neg(s) scored =")
    check_refused(MaskedRows(), text, because="may be minus infinity", context=GPU)
    own = text.replace("most, iou)", "most, iou, second)")
    check_pass(
        MaskedRows(), own, changes=2, rules={"masked_boxes": 1, "taken_last": 1}, context=GPU, depends_on_input=False
    )


def test_a_computed_threshold_is_left() -> None:
    text = UNCUT.replace("most, iou)", "most, iou, lowest)").replace(
        "stay =", "lowest = ReduceMin<keepdims = 0>(boxes) stay ="
    )
    check_refused(MaskedRows(), text, because="its threshold is no constant", context=GPU)


def test_rows_of_other_tensors_are_left() -> None:
    text = UNCUT.replace(
        "near = Gather(offset, best7) far = Slice(near, first, one, one)", "far = Gather(first_column, best7)"
    )
    text = text.replace("mask =", "first_column = Slice(boxes, first, one, one) mask =")
    check_refused(MaskedRows(), text, because="rows of other tensors", context=GPU)


# ---------------------------------------------------------------- nested selections


LARGE = """<ir_version: 9, opset_import: ["": 17]>
g (float[40,4] boxes, float[40] scores) => (float[n,4] kept, float[n] best)
<float least = {0.5}, float small = {9}, int64[1] flat = {-1}, int64[3] single = {1, 1, -1}, int64[1] first = {0},
 int64[1] third = {2}, int64[1] one = {1}, int64 most = {20}, float iou = {0.3}, int64 left = {0}, int64 right = {2},
 int64[2] tall = {-1, 1}>
{ SELECT given = Unsqueeze(b, first) scored = Reshape(s, single)
  stay = NonMaxSuppression(given, scored, most, iou) numbers = Gather<axis = 1>(stay, third) best7 = Squeeze(numbers, one)
  kept = Gather(b, best7) best = Gather(s, best7) }"""
SIZE_FIRST = """x0 = Gather<axis = 1>(boxes, left) x1 = Gather<axis = 1>(boxes, right) width = Sub(x1, x0)
  wide = Greater(width, small) n1 = NonZero(wide) i1 = Reshape(n1, flat) b1 = Gather(boxes, i1) s1 = Gather(scores, i1)
  sure = GreaterOrEqual(s1, least) n2 = NonZero(sure) i2 = Reshape(n2, flat) b = Gather(b1, i2) s = Gather(s1, i2)"""
SCORE_FIRST = """sure = Greater(scores, least) n1 = NonZero(sure) i1 = Transpose<perm = [1, 0]>(n1) b1 = GatherND(boxes, i1)
  s1 = GatherND(scores, i1) x0 = Gather<axis = 1>(b1, left) x1 = Gather<axis = 1>(b1, right) width = Sub(x1, x0)
  wide = Greater(width, small) n2 = NonZero(wide) i2 = Transpose<perm = [1, 0]>(n2) b = GatherND(b1, i2)
  s = GatherND(s1, i2)"""
POSITIONS = SIZE_FIRST.replace("b1 = Gather(boxes, i1) ", "").replace(
    "b = Gather(b1, i2) s = Gather(s1, i2)", "i3 = Gather(i1, i2) b = Gather(boxes, i3) s = Gather(scores, i3)"
)
IN_ROW = POSITIONS.replace("i3 = Gather(i1, i2)", "row = Gather<axis = 1>(n1, i2) i3 = Reshape(row, flat)")
IN_COLUMN = POSITIONS.replace(
    "i3 = Gather(i1, i2)", "tall1 = Reshape(n1, tall) t3 = Gather(tall1, i2) i3 = Reshape(t3, flat)"
)
NESTED = {"size": SIZE_FIRST, "score": SCORE_FIRST, "positions": POSITIONS, "row": IN_ROW, "column": IN_COLUMN}


@pytest.mark.parametrize("order", NESTED)
@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_large_boxes_with_high_scores(order: str, count: int) -> None:
    text = LARGE.replace("SELECT", NESTED[order])
    rules = {"nested_selections": 1, "masked_boxes": 1}
    graph = from_text(text)
    after = graph.copy()
    fired = [f.rule for f in MaskedRows()(after, GPU).fired]
    assert {name: fired.count(name) for name in fired} == rules
    assert unknown(after) == {"NonMaxSuppression", "Gather"}
    feeds = boxes_of(count)
    del feeds["labels"]
    kept = same_boxes(graph, after, feeds)
    assert kept <= count
    assert kept > 0 or count < 7


@pytest.mark.parametrize("order", ["size", "score"])
def test_nested_selections_are_structured_and_idempotent(order: str) -> None:
    text = LARGE.replace("SELECT", NESTED[order])
    check_pass(
        MaskedRows(),
        text,
        changes=2,
        rules={"nested_selections": 1, "masked_boxes": 1},
        context=GPU,
        depends_on_input=False,
    )


@pytest.mark.parametrize("order", ["size", "score"])
def test_no_box_at_all(order: str) -> None:
    text = LARGE.replace("SELECT", NESTED[order]).replace("[40", "[0")
    graph = from_text(text)
    after = graph.copy()
    assert "nested_selections" in {f.rule for f in MaskedRows()(after, GPU).fired}
    assert same_boxes(graph, after, {"boxes": np.zeros((0, 4), np.float32), "scores": np.zeros(0, np.float32)}) == 0


def test_no_number_is_above_a_score() -> None:
    """Comparisons with NaN are false, in both masks."""
    graph = from_text(LARGE.replace("SELECT", SIZE_FIRST))
    after = graph.copy()
    MaskedRows()(after, GPU)
    feeds = boxes_of(40)
    del feeds["labels"]
    feeds["boxes"][:9, 0] = feeds["scores"][5:20] = np.nan
    assert same_boxes(graph, after, feeds) > 0


def test_a_selection_whose_rows_meet_is_left() -> None:
    text = SIZE_FIRST.replace("GreaterOrEqual(s1,", "GreaterOrEqual(sums,").replace(
        "sure =", "sums = CumSum(s1, left) sure ="
    )
    check_refused(
        MaskedRows(), LARGE.replace("SELECT", text), because="CumSum.* does not compute each row",
        rule="nested_selections", context=GPU,
    )  # fmt: skip


def test_positions_of_selected_rows_that_are_read_are_left() -> None:
    text = LARGE.replace("SELECT", SIZE_FIRST).replace("float[n] best)", "float[n] best, int64[n] i2)")
    check_refused(
        MaskedRows(), text, because="reads the positions of the rows", rule="nested_selections", context=GPU
    )  # fmt: skip


# ---------------------------------------------------------------- the best of each level


LEVELS = """<ir_version: 9, opset_import: ["": 17]>
g (float[30] raw0, float[12] raw1, float[30,4] boxes0, float[12,4] boxes1) => (float[n,4] kept, float[n] best, float[n] label)
<float least = {0.5}, int64[1] flat = {-1}, int64[3] single = {1, 1, -1}, int64[1] first = {0}, int64[1] third = {2},
 int64[1] one = {1}, int64[1] limit = {5}, int64 most = {100}, float iou = {0.4}, int64[1] ten = {6}, float scale = {2},
 float[30] label0 = {0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,1}, float[12] label1 = {1,1,1,1,1,1,1,1,1,1,1,2}>
{ s0 = Sigmoid(raw0) s1 = Sigmoid(raw1) LEVEL0 LEVEL1
  s = Concat<axis = 0>(top0, top1) b = Concat<axis = 0>(near0, near1) c = Concat<axis = 0>(class0, class1)
  far = ReduceMax<keepdims = 0>(b) shift = Mul(c, far) column = Unsqueeze(shift, one) apart = Add(b, column)
  given = Unsqueeze(apart, first) scored = Reshape(s, single)
  stay = NonMaxSuppression(given, scored, most, iou) numbers = Gather<axis = 1>(stay, third) all = Squeeze(numbers, one)
  best7 = Slice(all, first, ten, first) rows = Gather(b, best7) best = Gather(s, best7) label = Gather(c, best7)
  kept = Mul(rows, scale) }"""
LEVEL = """over# = Greater(s#, least) chosen# = NonZero(over#) i# = Reshape(chosen#, flat) of# = Gather(s#, i#)
  size# = Shape(of#) pair# = Concat<axis = 0>(limit, size#) k0# = ReduceMin<keepdims = 0>(pair#) k# = Reshape(k0#, flat)
  top#, j# = TopK<axis = 0>(of#, k#) number# = Gather(i#, j#) near# = Gather(boxes#, number#) class# = Gather(label#, number#)"""


def levels() -> str:
    return LEVELS.replace("LEVEL0", LEVEL.replace("#", "0")).replace("LEVEL1", LEVEL.replace("#", "1"))


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 1), (30, 12), (5, 6), (3, 2)])
def test_the_best_of_each_level(first: int, second: int) -> None:
    graph = from_text(levels())
    after = graph.copy()
    fired = [f.rule for f in MaskedRows()(after, GPU).fired]
    assert {name: fired.count(name) for name in fired} == {"best_rows": 2, "masked_sums": 1, **ALL}
    assert unknown(after) == {"NonMaxSuppression", "Gather", "NonZero"}
    feeds: dict[str, Array] = {}
    for level, (count, rows) in enumerate([(first, 30), (second, 12)]):
        found = boxes_of(count, rows)
        feeds[f"raw{level}"] = 9 * (found["scores"] - np.float32(0.5))
        feeds[f"boxes{level}"] = found["boxes"]
    kept = same_boxes(graph, after, feeds)
    assert (kept > 0) == (first + second > 0)
    assert kept <= 6


def test_the_best_of_each_level_are_structured_and_idempotent() -> None:
    check_pass(MaskedRows(), levels(), changes=6, rules={"best_rows": 2, "masked_sums": 1, **ALL}, context=GPU)


def test_the_best_of_each_level_run_on_the_gpu() -> None:
    """Only the suppression, and the selection of kept boxes, run on the CPU."""
    program = check_simulated(from_text(levels()), "fp32")
    found = [operator["kind"] for operator in program.meta["host"]["operators"]]
    assert sorted(found) == ["Gather"] * 4 + ["NonMaxSuppression"]


# ---------------------------------------------------------------- best boxes


def test_as_many_boxes_as_are_read() -> None:
    after = from_text(BOXES)
    MaskedRows()(after, GPU)
    (op,) = after.of_kind("NonMaxSuppression")
    most = after.constant_value(op.inputs[2])
    assert most is not None
    assert most.tolist() == [7]
    assert op.outputs[0].type.dims[0] != 20


def test_two_numbers_of_boxes() -> None:
    """The larger one limits the suppression; the other one stays a Slice."""
    text = BOXES.replace(
        "kept = Gather(b, best7)", "best3 = Slice(picked, first, third, first) kept = Gather(b, best3)"
    )
    text = text.replace("float[n,4] kept", "float[m,4] kept")
    after, _ = check_pass(MaskedRows(), text, changes=3, rules=ALL, context=GPU)
    assert "Slice" in unknown(after)


def test_all_kept_boxes_are_found() -> None:
    check_pass(MaskedRows(), UNCUT, changes=2, rules={"masked_boxes": 1, "taken_last": 1}, context=GPU)
    last = BOXES.replace("Slice(picked, first, some, first)", "Slice(picked, one, some, first)")
    _, report = check_pass(MaskedRows(), last, changes=2, context=GPU)
    assert "best_boxes" not in {fired.rule for fired in report.fired}


# ---------------------------------------------------------------- taken last


SCALED = """<ir_version: 9, opset_import: ["": 17]>
g (float[1,40,4] boxes, float[1,1,40] scores, float[40,4] x) => (float[n,4] y)
<int64 most = {20}, float iou = {0.3}, int64 third = {2}, float two = {2}, int64[2] halves = {2, 2}>
{ stay = NonMaxSuppression(boxes, scores, most, iou) i = Gather<axis = 1>(stay, third) rows = Gather(x, i)
  left, right = Split<axis = 1>(rows, halves) far = Mul(left, two) near = Exp(right) y = Concat<axis = 1>(far, near) }"""


def test_kept_boxes_are_scaled_before() -> None:
    after, _ = check_pass(MaskedRows(), SCALED, changes=1, rules={"taken_last": 1}, context=GPU)
    assert unknown(after) == {"NonMaxSuppression", "Gather"}
    assert after.kinds()["Gather"] == 2


def test_views_of_kept_boxes_of_none() -> None:
    text = SCALED.replace("[1,40,4]", "[1,0,4]").replace("[1,1,40]", "[1,1,0]").replace("[40,4] x", "[0,4] x")
    text = text.replace(
        "near = Exp(right)", "flat6 = Reshape(right, wide) more = Exp(flat6) near = Reshape(more, tall)"
    )
    text = text.replace("int64 third", "int64[3] wide = {-1, 2, 1}, int64[2] tall = {-1, 2}, int64 third")
    after = from_text(text)
    assert "taken_last" in {f.rule for f in MaskedRows()(after, GPU).fired}


def test_rows_of_two_selections_are_left() -> None:
    """``right`` has as many rows, but other ones."""
    text = SCALED.replace(
        "near = Exp(right)", "other = Gather<axis = 1>(stay, first) again = Gather(x, other) near = Exp(again)"
    )
    text = text.replace("int64 third", "int64 first = {0}, int64 third")
    check_untouched(MaskedRows(), text, GPU)


def test_operators_that_cost_more_are_left() -> None:
    text = SCALED.replace("y = Concat<axis = 1>(far, near)", "both = Concat<axis = 1>(far, near) y = Softmax(both)")
    check_untouched(MaskedRows(), text, GPU)


def test_large_tensors_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from optdnn.passes.rules import taken_last

    monkeypatch.setattr(taken_last, "MOST_ELEMENTS", 40 * 4 - 1)
    check_untouched(MaskedRows(), SCALED, GPU)
