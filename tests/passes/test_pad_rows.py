"""pad_rows: heads after a selection, padded to the largest possible number of rows; refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text

from optdnn.ir.evaluate import evaluate, values
from optdnn.passes import pad_rows
from optdnn.passes.base import PassContext
from optdnn.passes.pack_weights import PackWeights
from optdnn.passes.pad_rows import PadRows

GPU = PassContext(target="cuda:sm_90a")
SELECT = """<ir_version: 9, opset_import: ["": 17]>
g (float[12,4] boxes, float[12] scores, float[1,3,8,8] image) => (OUTPUTS)
<float zero = {0}, int64[1] flat = {-1}, int64[1] start = {0}, int64[1] end = {6}, int64[1] ten = {10}, int64[1] one = {1},
 float[2,12] w = {W}, float[2] b = {1, 2}, int64[1] two = {2}, int64[3] pairs = {0, 2, 6}, int64 first = {-1},
 float[3,3,1,1] kernel = {1,2,3,4,5,6,7,8,9}>
{ mask = Greater(scores, zero) chosen = NonZero(mask) i = Reshape(chosen, flat) kept = Slice(i, start, end)
  rois = Gather(boxes, kept) n = Shape<start = 0, end = 1>(rois) index = ConstantOfShape<value = int64[1] {0}>(n)
  aligned = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(image, rois, index)
"""
WEIGHTS = ", ".join(str((k * 7 % 5 - 2) / 4) for k in range(24))


def select(outputs: str, rest: str) -> str:
    """At most six boxes of twelve, those with positive scores; aligned regions of an image; and ``rest``."""
    return SELECT.replace("OUTPUTS", outputs).replace("W}", WEIGHTS + "}") + rest + "}"


BOX = select(
    "float[m,2] y, float[m,4] rois, float[k] flatter",
    """flat12 = Flatten(aligned) logits = Gemm<transB = 1>(flat12, w, b) p = Softmax<axis = 1>(logits)
       moved = Sub(logits, p) y = Relu(moved) flatter = Reshape(y, flat)""",
)


def work(graph: object) -> list[str]:
    return [op.kind for op in graph.of_kind(*pad_rows.WORK) if op.outputs[0].type.is_static]  # type: ignore[attr-defined]


def test_a_box_head() -> None:
    after, _ = check_pass(PadRows(), BOX, changes=1, context=GPU)
    assert work(after) == ["RoiAlign", "Gemm"]
    assert after.op(after.of_kind("Gemm")[0].id).outputs[0].type.dims == (6, 2)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_box_head_with_packed_weights(rounded: bool) -> None:
    numbers = ", ".join(str(k * 7 % 11 - 5) for k in range(24))
    text = select(
        "float[m,2] y",
        f"""flat12 = Flatten(aligned) w8 = Constant<value = int8[12,2] {{{numbers}}}>() s = Constant<value = float {{0.25}}>()
            wide = DequantizeLinear(w8, s) y = MatMul(flat12, wide)""",
    )
    packed = from_text(text)
    PackWeights()(packed)
    (op,) = packed.of_kind("PackedMatMul")
    packed.set_op(replace(op, attrs=replace(op.attrs, rounded_rows=rounded)))
    after, _ = check_pass(PadRows(), packed, changes=1, context=GPU)
    assert work(after) == ["RoiAlign", "PackedMatMul"]
    assert [op.attrs.rounded_rows for op in after.of_kind("PackedMatMul")] == [rounded]


@pytest.mark.parametrize("count", [0, 1, 6, 12])
def test_any_number_of_rows(count: int) -> None:
    graph, rng = from_text(BOX), np.random.default_rng(0)
    after = graph.copy()
    PadRows()(after, GPU)
    scores = np.where(np.arange(12) < count, 1.0, -1.0)
    feeds = {"boxes": rng.uniform(0, 8, (12, 4)), "scores": scores, "image": rng.standard_normal((1, 3, 8, 8))}
    feeds = {k: v.astype(np.float32) for k, v in feeds.items()}
    expected, found = evaluate(graph, feeds), evaluate(after, feeds)
    assert len(expected["y"]) == min(count, 6)
    for name, a in expected.items():
        assert found[name].shape == a.shape
        np.testing.assert_allclose(found[name], a, rtol=1e-5, atol=1e-6)


def test_a_mask_head() -> None:
    """Convolutions, the shape of a result, and rows taken by index, some from the end."""
    text = select(
        "float[m,6] y, int64[4] shape, float[j,6] last",
        """conv = Conv(aligned, kernel) rows = Reshape(conv, pairs) shape = Shape(conv) six = Reshape(rows, sixes)
           label = Range(zero64, count, two64) y = Gather(six, label)
           count1 = Shape<start = 0, end = 1>(six) count = Squeeze(count1) backwards = Neg(count1) last = Gather(six, backwards)""",
    ).replace("float[2] b", "int64 zero64 = {0}, int64 two64 = {2}, int64[2] sixes = {-1, 6}, float[2] b")
    after, _ = check_pass(PadRows(), text, changes=1, context=GPU, depends_on_input=False)
    assert work(after) == ["RoiAlign", "Conv"]


def test_a_selection_without_bound_is_refused() -> None:
    """A loop that may run any number of times."""
    text = """<ir_version: 9, opset_import: ["": 17]>
    g (int64[k] times, float[4,4] w, float[4] x) => (float[n,4] y) <bool yes = {1}, int64 axis = {0}>
    { trips = ReduceMax<keepdims = 0>(times)
      rows = Loop(trips, yes) <body = b (int64 i, bool go) => (bool on, float[4] row) { on = Identity(go) row = Relu(x) }>
      y = MatMul(rows, w) }"""
    check_refused(PadRows(), text, because="no bound", context=GPU)


def test_rows_that_meet_are_refused() -> None:
    text = select("float[m,m] y", "f = Flatten(rois) t = Transpose(f) y = MatMul(f, t)").replace(
        "aligned = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(image, rois, index)", ""
    )
    check_untouched(PadRows(), text, GPU)  # n x n: no operator with rows


def test_padded_results_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pad_rows, "MOST_BYTES", 6 * 12 * 4 - 1)
    check_refused(PadRows(), BOX, because="would have 6 rows of 48 bytes", context=GPU)


def test_sizes_of_inputs_are_no_candidates() -> None:
    text = """<ir_version: 9, opset_import: ["": 17]>
    g (float[n,4] x, float[4,4] w) => (float[n,4] y) { y = MatMul(x, w) }"""
    check_untouched(PadRows(), text, GPU)


def test_operators_that_are_not_worth_it_stay() -> None:
    text = select("float[m,4] y", "y = Relu(rois)").replace(
        "aligned = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(image, rois, index)", ""
    )
    check_untouched(PadRows(), text, GPU)


@pytest.mark.parametrize("count", [0, 2])
def test_rows_after_repeat_the_first_ones(count: int) -> None:
    """Calibration sees the ranges of real rows; padding is zero only if there are no rows."""
    after, rng = from_text(BOX), np.random.default_rng(0)
    PadRows()(after, GPU)
    scores = np.where(np.arange(12) < count, 1.0, -1.0)
    feeds = {"boxes": rng.uniform(0, 8, (12, 4)), "scores": scores, "image": rng.standard_normal((1, 3, 8, 8))}
    (aligned,) = values(
        after, {k: v.astype(np.float32) for k, v in feeds.items()}, [after.of_kind("RoiAlign")[0].value]
    )
    assert len(aligned) == 6
    np.testing.assert_array_equal(aligned, aligned[np.arange(6) % max(count, 1)])
    assert len({row.tobytes() for row in aligned}) == max(count, 1)


NAMED = """<ir_version: 9, opset_import: ["": 17]>
g (float[12] scores, int64[12] labels, float[3,4] names) => (float[m,3] y)
<float zero = {0}, int64[1] flat = {-1}, float[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}>
{ mask = Greater(scores, zero) chosen = NonZero(mask) i = Reshape(chosen, flat) own = Gather(labels, i)
  rows = Gather(names, own) product = MatMul(rows, w) y = Relu(product) }"""


@pytest.mark.parametrize("count", [0, 1, 6])
def test_labels_of_other_rows_are_not_looked_up(count: int) -> None:
    """Rows that are not selected have labels without a name. The padding reads row 0 if no row is selected."""
    graph = from_text(NAMED)
    after = graph.copy()
    assert PadRows()(after, GPU).changes == 1
    rng, chosen = np.random.default_rng(0), np.arange(12)[::-1] < count
    feeds = {
        "scores": np.where(chosen, 1, -1).astype(np.float32), "labels": np.where(chosen, 2, 200),
        "names": rng.standard_normal((3, 4)).astype(np.float32),
    }  # fmt: skip
    np.testing.assert_allclose(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"], 1e-6)


ENDS = """<ir_version: 9, opset_import: ["": 17]>
g (float[12,4] x, float[12] mask) => (float[m,3] y, int64[1] number)
<int64[1] start = {0}, int32[1] start32 = {0}, int64[1] seven = {7}, float[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}>
{ chosen = NonZero(mask) n = Shape<start = 1>(chosen) END product = MatMul(rows, w) y = Relu(product)
  number = Shape<end = 1>(y) }"""


@pytest.mark.parametrize(
    "end",
    [
        "back = Neg(n) rows = Slice(x, start, back, start)",
        "beyond = Add(n, seven) rows = Slice(x, start, beyond, start)",
        "n32 = Cast<to = 6>(n) rows = Slice(x, start32, n32, start32)",
    ],
)
def test_ends_of_rows_that_are_not_their_number(end: str) -> None:
    """Ends that count from the back, or that lie behind the last row, are no numbers of rows."""
    graph = from_text(ENDS.replace("END", end))
    after, _ = check_pass(PadRows(), graph, changes=1, context=GPU, depends_on_input=False)
    rng = np.random.default_rng(0)
    for count in (0, 1, 5, 11, 12):
        mask = (rng.permutation(12) < count).astype(np.float32)
        feeds = {"x": rng.standard_normal((12, 4)).astype(np.float32), "mask": mask}
        for name, value in evaluate(graph, feeds).items():
            np.testing.assert_allclose(evaluate(after, feeds)[name], value, 1e-6)


FILL = re.sub(
    "n = Shape<.*\n.*RoiAlign.*\n",
    "",
    select(
        "float[ROWS,4] y",
        """count1 = Shape<start = 0, end = 1>(rois) more = Sub(all, count1) four = Mul(more, width)
       pads = Concat<axis = 0>(start, four) moved = Relu(rois) row = Reshape(moved, flat) filled = Pad(row, pads, filler)
       y = Reshape(filled, back)""",
    ),
).replace(
    "float[2] b", "int64[1] all = {ROWS}, int64[1] width = {4}, int64[2] back = {-1, 4}, float filler = {7}, float[2] b"
)


@pytest.mark.parametrize("rows", [6, 9])
def test_rows_that_a_pad_fills_up(rows: int) -> None:
    graph = from_text(FILL.replace("ROWS", str(rows)))
    after, _ = check_pass(PadRows(), graph, changes=1, context=GPU)
    assert "Where" in after.kinds()
    rng = np.random.default_rng(0)
    for count in (0, 1, 6, 12):
        scores = np.where(np.arange(12) < count, 1.0, -1.0)
        feeds = {"boxes": rng.uniform(0, 8, (12, 4)), "scores": scores, "image": rng.standard_normal((1, 3, 8, 8))}
        feeds = {k: v.astype(np.float32) for k, v in feeds.items()}
        np.testing.assert_array_equal(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"])


@pytest.mark.parametrize(
    ("old", "new"),
    [("(start, four)", "(four, start)"), ("Pad(row, pads, filler)", 'Pad<mode = "wrap">(row, pads)')],
)
def test_other_pads_do_not_fill_up(old: str, new: str) -> None:
    check_untouched(PadRows(), FILL.replace("ROWS", "6").replace(old, new), GPU)
