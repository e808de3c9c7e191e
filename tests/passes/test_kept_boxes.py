"""best_selected, first_rows_count, first_rows_filled, and pad_rows after suppressions: the rows that a suppression keeps."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.pad_rows import PadRows
from optdnn.types import Array

GPU = PassContext(target="cuda:sm_90a")


def unknown(graph: Graph) -> set[str]:
    """The kinds of operators whose size depends on data."""
    return {op.kind for op in graph.ops() if not op.outputs[0].type.is_static and op.kind != "Output"}


def same_results(graph: Graph, after: Graph, feeds: dict[str, Array]) -> dict[str, Array]:
    expected, found = evaluate(graph, feeds), evaluate(after, feeds)
    for name, a in expected.items():
        np.testing.assert_allclose(found[name], a, rtol=1e-6, atol=1e-6)
        assert found[name].shape == a.shape
    return expected


def boxes_of(count: int, classes: int = 3) -> dict[str, Array]:
    """Boxes; ``count`` of them have a positive score in some class."""
    rng = np.random.default_rng(count)
    low = rng.uniform(0, 30, (1, 40, 2))
    sure = np.where(rng.permutation(40) < count, 1.0, -1.0)
    raw = sure * rng.uniform(0.5, 3, (1, classes, 40))
    boxes = np.concatenate([low, low + rng.uniform(5, 20, (1, 40, 2))], 2)
    return {"boxes": boxes.astype(np.float32), "raw": raw.astype(np.float32)}


# ---------------------------------------------------------------- the best of all classes


BEST = """<ir_version: 9, opset_import: ["": 17]>
g (float[1,40,4] boxes, float[1,3,40] raw) => (float[7,4] where, float[7] score, float[1] count, float[n] first)
<int64 each = {5}, float iou = {0.3}, float least = {0.5}, int64[1] most = {7}, int64 box = {2}, int64[1] zero = {0},
 int64[3] zeros = {0, 0, 0}, int64[1] begin = {0}, int64[1] end = {3}, int64[2] corner = {0, 0}>
{ scores = Sigmoid(raw) stay = NonMaxSuppression(boxes, scores, each, iou, least) s = GatherND(scores, stay)
  size = Shape(s) pair = Concat<axis = 0>(most, size) k = ReduceMin(pair) top, j = TopK<axis = 0>(s, k)
  chosen = Gather(stay, j) numbers = Gather<axis = 1>(chosen, box) all = Squeeze(boxes, zero) rows = Gather(all, numbers)
  n = Shape(top) rest = Sub(most, n) pads1 = Concat<axis = 0>(zero, rest) pads2 = Concat<axis = 0>(corner, rest, zero)
  where = Pad(rows, pads2) score = Pad(top, pads1) count = Cast<to = 1>(n) first = Neg(top) }"""
RULES = {"best_selected": 1, "first_rows_count": 1, "first_rows_filled": 2, "taken_last": 2}


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_the_best_of_the_boxes_of_all_classes(count: int) -> None:
    graph = from_text(BEST)
    after = graph.copy()
    MaskedRows()(after, GPU)
    assert unknown(after) == {"NonMaxSuppression", "Concat", "Slice"}, "kept boxes, padded ones, and the first ones"
    (top,) = after.of_kind("TopK")
    assert top.outputs[0].type.dims == (7,)
    found = same_results(graph, after, boxes_of(count))["count"]
    assert found.item() <= 7
    assert (found.item() > 0) == (count > 0)


def test_the_best_are_structured_and_idempotent() -> None:
    report = check_pass(MaskedRows(), BEST, changes=6, context=GPU, depends_on_input=False)[1]
    fired = [f.rule for f in report.fired]
    assert {name: fired.count(name) for name in RULES} == RULES


def test_the_best_of_several_suppressions() -> None:
    """A suppression for each class, as TensorFlow 1 writes them."""
    text = BEST.replace("stay = NonMaxSuppression(boxes, scores, each, iou, least) s = GatherND(scores, stay)",
        """s0, s1, s2 = Split<axis = 1>(scores) k0 = NonMaxSuppression(boxes, s0, each, iou, least)
        k1 = NonMaxSuppression(boxes, s1, each, iou, least) k2 = NonMaxSuppression(boxes, s2, each, iou, least)
        t0 = GatherND(s0, k0) t1 = GatherND(s1, k1) t2 = GatherND(s2, k2) stay = Concat<axis = 0>(k0, k1, k2)
        s = Concat<axis = 0>(t0, t1, t2)""")  # fmt: skip
    graph = from_text(text)
    after = graph.copy()
    MaskedRows()(after, GPU)
    assert unknown(after) == {"NonMaxSuppression", "Concat", "Slice"}
    for count in (0, 1, 4, 40):
        same_results(graph, after, boxes_of(count))


@pytest.mark.parametrize(
    ("old", "new", "because"),
    [
        ("first = Neg(top)", "first = Cast<to = 1>(j)", "its indices do not only gather rows"),
        ("Sigmoid(raw)", "Log(raw)", "a score may be minus infinity"),
        (
            "chosen = Gather(stay, j)",
            "moved = CumSum(stay, row) chosen = Gather(moved, j)",
            "does not compute each row",
        ),
    ],
)
def test_other_selections_of_the_best_are_left(old: str, new: str, because: str) -> None:
    text = BEST.replace(old, new).replace("int64[1] zero", "int64 row = {0}, int64[1] zero")
    check_refused(MaskedRows(), text, because=because, rule="best_selected", context=GPU)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k = ReduceMin(pair)", "k = ReduceMax(pair)"),
        ("TopK<axis = 0>", "TopK<axis = 0, largest = 0>"),
    ],
)
def test_others_are_no_candidates(old: str, new: str) -> None:
    graph = from_text(BEST.replace(old, new))
    assert "best_selected" not in {fired.rule for fired in MaskedRows()(graph, GPU).fired}


# ---------------------------------------------------------------- first rows


FIRST = """<ir_version: 9, opset_import: ["": 17]>
g (float[9,4] x, float[9] mask) => (float[12,4] filled, int64[1] count, int64[2] both)
<float zero = {0}, int64[1] start = {0}, int64[1] twelve = {12}, float seven = {7}, int64[2] corner = {0, 0}>
{ chosen = NonZero(mask) n = Shape<start = 1>(chosen) rows = Slice(x, start, n, start) count = Shape<end = 1>(rows)
  both = Shape(rows) rest = Sub(twelve, n) pads = Concat<axis = 0>(corner, rest, start) filled = Pad(rows, pads, seven) }"""


@pytest.mark.parametrize("count", [0, 4, 9])
def test_first_rows_that_are_filled_up(count: int) -> None:
    graph = from_text(FIRST)
    after, _ = check_pass(
        MaskedRows(),
        graph,
        changes=2,
        rules={"first_rows_count": 1, "first_rows_filled": 1},
        context=GPU,
        depends_on_input=False,
    )
    assert "Pad" in after.kinds(), "twelve of nine rows"
    rng = np.random.default_rng(count)
    mask = (rng.permutation(9) < count).astype(np.float32)
    found = same_results(graph, after, {"x": rng.standard_normal((9, 4)).astype(np.float32), "mask": mask})
    assert (found["filled"][count:] == 7).all()


def test_numbers_of_32_bits_are_left() -> None:
    text = (
        FIRST.replace("Slice(x, start, n, start)", "Slice(x, start32, n32, start32)")
        .replace("rows =", "n32 = Cast<to = 6>(n) rows =")
        .replace("float seven", "int32[1] start32 = {0}, float seven")
    )
    check_untouched(MaskedRows(), text, GPU)


def test_rows_that_are_not_the_first_stay() -> None:
    text = FIRST.replace("Slice(x, start, n, start)", "Slice(x, one, n, start)").replace(
        "twelve = {12}", "twelve = {12}, int64[1] one = {1}"
    )
    check_untouched(MaskedRows(), text.replace("float[12,4] filled", "float[m,4] filled"), GPU)


LOOKED_UP = """<ir_version: 9, opset_import: ["": 18]>
g (float[9,4] x, int64[9] ids, float[9] mask) => (OUT)
<int64[1] start = {0}, float two = {2}>
{ chosen = NonZero(mask) n = Shape<start = 1>(chosen) some = Slice(ids, start, n, start) rows = Gather(x, some) REST }"""


@pytest.mark.parametrize(
    ("out", "rest"),
    [
        ("float[4] y", "y = ReduceMax<keepdims = 0>(rows, start)"),
        ("float[m,4] y", "wide = Mul(rows, two) y = Exp(wide)"),
    ],
)
def test_numbers_that_only_the_first_rows_have(out: str, rest: str) -> None:
    """The numbers behind the first ones may be no rows."""
    text = LOOKED_UP.replace("OUT", out).replace("REST", rest)
    graph = from_text(text)
    assert MaskedRows()(graph, GPU).changes == 0
    found = "_, places = TopK<axis = 0>(mask, nine) some = Slice(places,"
    text = text.replace("some = Slice(ids,", found).replace("int64[1] start", "int64[1] nine = {9}, int64[1] start")
    assert MaskedRows()(from_text(text), GPU).changes > 0


# ---------------------------------------------------------------- two stages


STAGES = """<ir_version: 9, opset_import: ["": 17]>
g (float[1,40,4] boxes, float[1,1,40] raw, float[1,3,16,16] image) => (float[m,4] kept, float[m] best, float[m,2] made)
<int64 most = {20}, float iou = {0.5}, int64[1] column = {2}, int64[1] last = {1}, int64[1] start = {0}, int64[1] ten = {10},
 int64 one = {1}, float half = {0.5}, int64[1] flat = {-1}, int64[3] single = {1, 1, -1}, float[2,12] w = {W},
 float[2] b = {0.5, -0.5}>
{ scores = Sigmoid(raw) stay1 = NonMaxSuppression(boxes, scores, most, iou) i1 = Gather<axis = 1>(stay1, column)
  i2 = Squeeze(i1, last) i3 = Slice(i2, start, ten, start) all = Squeeze(boxes, start) rois = Gather(all, i3)
  n = Shape<end = 1>(rois) index = ConstantOfShape<value = int64[1] {0}>(n)
  aligned = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(image, rois, index)
  rows = Flatten(aligned) logits = Gemm<transB = 1>(rows, w, b) p = Softmax<axis = 1>(logits) second = Gather<axis = 1>(p, one)
  sure = Greater(second, half) chosen = NonZero(sure) j = Reshape(chosen, flat) some = Gather(rois, j) s = Gather(second, j)
  given = Unsqueeze(some, start) scored = Reshape(s, single) stay2 = NonMaxSuppression(given, scored, most, iou)
  k1 = Gather<axis = 1>(stay2, column) k2 = Squeeze(k1, last) k3 = Slice(k2, start, ten, start) kept = Gather(some, k3)
  best = Gather(s, k3) m = Shape<end = 1>(kept) index2 = ConstantOfShape<value = int64[1] {0}>(m)
  again = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(image, kept, index2)
  rows2 = Flatten(again) made = Gemm<transB = 1>(rows2, w, b) }"""
WEIGHTS = ", ".join(str((k * 7 % 5 - 2) / 4) for k in range(24))


@pytest.mark.parametrize("bias", [-9, 0, 9])
def test_detections_of_the_best_regions(bias: float) -> None:
    """Between the suppressions, and behind the second one, all rows have known sizes."""
    text = STAGES.replace("{W}", "{" + WEIGHTS + "}").replace("{0.5, -0.5}", f"{{{-bias}.0, {bias}.0}}")
    graph = from_text(text)
    after = graph.copy()
    reports = [one(after, GPU) for one in (MaskedRows(), PadRows(ahead=True), MaskedRows(), PadRows())]
    assert [report.changes > 0 for report in reports] == [True] * 4
    assert unknown(after) == {"NonMaxSuppression", "Concat", "Slice"}
    assert all(op.outputs[0].type.dims[0] == 10 for op in after.of_kind("RoiAlign"))
    for seed, count in enumerate((0, 1, 40)):
        image = np.random.default_rng(seed).standard_normal((1, 3, 16, 16)).astype(np.float32)
        kept = same_results(graph, after, {**boxes_of(count, 1), "image": image})["kept"]
        assert (bias < 0) == (len(kept) == 0) or bias == 0


def test_what_follows_from_other_rows_waits() -> None:
    graph = from_text(STAGES.replace("{W}", "{" + WEIGHTS + "}"))
    first = graph.copy()
    assert PadRows(ahead=True)(first, GPU).changes == 1
    assert [op.outputs[0].type.is_static for op in first.order() if op.kind == "RoiAlign"] == [True, False]


NUMBERED = """<ir_version: 9, opset_import: ["": 17]>
g (float[1,40,4] boxes, float[1,1,40] raw, float[12,3] x) => (float[m,2] y)
<int64 most = {6}, float iou = {0.5}, int64[1] column = {2}, int64 start = {3}, int64 one = {1}, int64 none = {0},
 float[3,2] w = {1, 2, 3, 4, 5, 6}, int64[2] shape = {-1, 1}, int64[1] first = {0}>
{ stay = NonMaxSuppression(boxes, raw, most, iou) size = Shape(stay) n = Gather(size, none) end = Add(n, start)
  numbers = Range(start, end, one) rows = Gather(x, numbers) i = Gather<axis = 1>(stay, one) f = Cast<to = 1>(i)
  column1 = Reshape(f, shape) moved = Add(rows, column1) y = MatMul(moved, w) }"""


def test_numbers_of_rows_are_constants() -> None:
    """A Range of the rows' numbers goes on; the rows of a suppression's result are padded by the first box."""
    graph = from_text(NUMBERED)
    after, _ = check_pass(PadRows(), graph, changes=1, context=GPU, depends_on_input=False)
    assert "Range" not in after.kinds()
    assert "Mod" not in after.kinds()
    for count in (0, 1, 40):
        same_results(graph, after, {**boxes_of(count, 1), "x": np.arange(36, dtype=np.float32).reshape(12, 3)})
