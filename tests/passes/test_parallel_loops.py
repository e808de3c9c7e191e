"""parallel_loops: Loops whose iterations read rows of their own are computed at once, also the peaks of resized maps; refusals."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched, from_text

from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.bodies import OptimizeBodies
from optdnn.passes.pad_rows import PadRows
from optdnn.passes.parallel_loops import ParallelLoops
from optdnn.passes.support import iterations

GPU = PassContext(target="cuda:sm_90a")
OWN = "number = Mul(i, three)"


def loop(
    nodes: str, result: str = "3", *, times: str = "n", yes: str = "yes", on: str = "yes", done: str = "0,3",
    all_rows: str = "Concat<axis = 0>(done, row)", own: str = OWN, before: str = "xs = Identity(given)", rows: str = "5",
) -> Graph:  # fmt: skip
    """A Loop over the rows ``x`` of ``xs`` that computes ``y`` of shape ``result``; ``w`` is captured."""
    filled = ", ".join("0" for _ in range(3 * int(done.partition(",")[0])))
    graph = from_text(f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[{rows},3] given, float[2,3] w, bool maybe) => (float[m,{result}] y0)
    <int64 five = {{5}}, int64 four = {{4}}, bool yes = {{1}}, float[{done}] none = {{{filled}}}>
    {{ {before} shape = Shape<start = 0, end = 1>(xs) n = Squeeze(shape)
      y0 = Loop({times}, {yes}, none) <body = b (int64 i, bool go, float[k,{result}] done) => (bool end, float[l,{result}] all)
       <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64 three = {{3}}, bool sure = {{1}}, float high = {{0.5}},
        float[1,3] ones = {{1, 1, 1}}> {{
        x = Gather<axis = 0>(xs, i) {own} {nodes} row = Unsqueeze(y, zero) all = {all_rows}
        end = Identity({"sure" if on == "yes" else on})
       }}> }}""")
    OptimizeBodies()(graph, PassContext())
    return graph


@pytest.mark.parametrize(
    ("nodes", "result", "added"),
    [
        ("y = Sin(x)", "3", {"Sin": 1}),
        ("d = Sub(w, x) y = ReduceSumSquare<keepdims = 0, axes = [1]>(d)", "2", {"Sub": 1, "Unsqueeze": 1}),
        ("a = Unsqueeze(x, zero) y = Concat<axis = 0>(a, ones, w)", "4,3", {"Concat": 3, "Expand": 2}),
        ("s = ReduceSum<keepdims = 0>(x) low = Neg(s) y = Clip(x, low, s)", "3", {"Max": 1, "Min": 1}),
        ("s = Abs(x) y = Clip(x, , high)", "3", {"Clip": 1}),
        ("y = PRelu(w, x)", "2,3", {"PRelu": 1, "Expand": 1}),
        ("a = Unsqueeze(x, one) y = MatMul(w, a)", "2,1", {"MatMul": 1}),
    ],
)
def test_iterations_are_computed_together(nodes: str, result: str, added: dict[str, int]) -> None:
    graph = loop(nodes, result, done=f"0,{result}", own="")
    changed, _ = check_pass(ParallelLoops(), graph, changes=1, rules={"parallel_loop": 1}, context=GPU)
    found = changed.kinds()
    assert "Loop" not in found
    assert {k: found[k] for k in added} == added


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"times": "four"}, "not as many as the rows"),
        ({"yes": "maybe"}, "not as many as the rows"),
        ({"on": "maybe"}, "a condition that it computes may end it"),
        ({"nodes": "f = Cast<to = 1>(number) y = Add(x, f)"}, "reads its number"),
        ({"nodes": "y = LpNormalization(x)"}, "its LpNormalization cannot have one more axis"),
        ({"nodes": "k = NonZero(x) g = Cast<to = 1>(k) h = ReduceMax<keepdims = 0>(g) y = Add(x, h)"},
         "its NonZero has sizes that are not known"),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], because: str) -> None:
    check_refused(ParallelLoops(), loop(**{"nodes": "y = Sin(x)"} | options), because=because, context=GPU)


@pytest.mark.parametrize(
    "options",
    [
        {"done": "1,3"},
        {"all_rows": "Concat<axis = 0>(row, done)"},
        {"nodes": "s = ReduceSum<keepdims = 0>(done) y = Add(x, s)"},
        {"nodes": "y = Sin(x) twice = Unsqueeze(x, one)", "all_rows": "Concat<axis = 0>(done, row, row)"},
    ],
)
def test_loops_that_do_more_than_append_rows(options: dict[str, Any]) -> None:
    check_untouched(ParallelLoops(), loop(**{"nodes": "y = Sin(x)"} | options), context=GPU)


def test_results_of_all_iterations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "MOST_BYTES", 5 * 3 * 4 - 1)
    check_refused(ParallelLoops(), loop("y = Sin(x)"), because="would take too much memory", context=GPU)


def test_other_targets_keep_the_loop() -> None:
    check_untouched(ParallelLoops(), loop("y = Sin(x)"))


# ---------------------------------------------------------------- peaks of resized maps


def keypoints(
    *, mode: str = "cubic", options: str = "", image: str = "Unsqueeze(map, one)", large: str = "Gather<axis = 1>(resized, c0)",
    lead: str = "two_one", row: str = "rest = Sub(place, column) y0 = Div(rest, w)", places: str = "0, 7",
    take: str = "Gather<axis = 2>(lines, column)", arg: str = "axis = 1, keepdims = 0",
    before: str = "maps = Identity(given) boxes = Identity(table)", more: str = "",
) -> Graph:  # fmt: skip
    """torchvision's ``heatmaps_to_keypoints``, exported, for two maps per box. ``lead``: sizes of the axes that are not resized."""
    graph = from_text(f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[4,2,5,6] given, float[4,2] noise{more}) => (float[m,2,2] xy, float[n,2] scores)
    <float[4,2] sizes = {{9, 7, 20, 31, 5, 6, 12, 3}}, bool yes = {{1}}, float[0,2,2] none = {{}}, float[0,2] nothing = {{}},
     int64[1] flat = {{-1}}, int64[1] start = {{0}}, int64[1] three = {{3}}, float zeros = {{0}}>
    {{ small = Tanh(noise) more = Add(sizes, small) table = Ceil(more) {before}
      counted = Shape<start = 0, end = 1>(maps) count = Squeeze(counted)
      xy, scores = Loop(count, yes, none, nothing) <body = b
       (int64 i, bool go, float[a,2,2] done_xy, float[b,2] done) => (bool on, float[c,2,2] all_xy, float[d,2] all)
       <int64 c0 = {{0}}, int64 c2 = {{2}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[2] two_one = {{2, 1}},
        int64[2] one_two = {{1, 2}}, int64[2] flat = {{2, -1}}, int64[1] line = {{-1}}, int64[2] own = {{{places}}},
        bool sure = {{1}}> {{
        map = Gather<axis = 0>(maps, i) box = Gather<axis = 0>(boxes, i) image = {image} whole = Cast<to = 7>(box)
        size = Concat<axis = 0>({lead}, whole)
        resized = Resize<mode = "{mode}", coordinate_transformation_mode = "half_pixel"{options}>(image, , , size)
        large = {large} extents = Shape(large) w = Gather(extents, c2)
        rows = Reshape(large, flat) place = ArgMax<{arg}>(rows)
        column = Mod(place, w) {row} y1 = Cast<to = 1>(y0) line_of = Cast<to = 7>(y1)
        lines = Gather<axis = 1>(large, line_of) cells = {take} all_cells = Reshape(cells, line)
        score = Gather(all_cells, own) x1 = Cast<to = 1>(column)
        x2 = Unsqueeze(x1, zero) y2 = Unsqueeze(y1, zero) point = Concat<axis = 0>(x2, y2)
        row = Unsqueeze(point, zero) all_xy = Concat<axis = 0>(done_xy, row)
        score_row = Unsqueeze(score, zero) all = Concat<axis = 0>(done, score_row)
        on = Identity(sure)
       }}> }}""")
    OptimizeBodies()(graph, PassContext())
    return graph


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "linear"},
        {"row": "y0 = Div(place, w)"},
        {"large": "Squeeze(resized, one)"},
        {"image": "Unsqueeze(map, zero)", "lead": "one_two", "large": "Gather<axis = 0>(resized, c0)"},
        {"options": ', cubic_coeff_a = -0.5'},
    ],
)  # fmt: skip
def test_peaks_of_resized_maps(options: dict[str, Any]) -> None:
    changed, _ = check_pass(ParallelLoops(), keypoints(**options), changes=1, rules={"parallel_loop": 1}, context=GPU)
    found = changed.kinds()
    assert (found["ResizedPeaks"], found.get("Loop"), found.get("Resize")) == (1, None, None)
    (op,) = changed.of_kind("ResizedPeaks")
    assert op.attrs.mode == options.get("mode", "cubic")


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "nearest"},
        {"options": ", exclude_outside = 1"},
        {"arg": "axis = 1, keepdims = 0, select_last_index = 1"},
        {"lead": "one_two"},  # it resizes the axis of channels as well
        {"places": "0, 6"},  # scores of another row
        {"take": "Gather<axis = 2>(lines, line_of)"},  # another column
    ],
)
def test_other_uses_of_resized_maps(options: dict[str, Any]) -> None:
    check_refused(ParallelLoops(), keypoints(**options), because="sizes that are not known", context=GPU)


def test_a_number_of_boxes_that_depends_on_data_is_padded() -> None:
    graph = keypoints(
        before="""some = Greater(scored, zeros) places = NonZero(some) listed = Reshape(places, flat)
                  chosen = Slice(listed, start, three) maps = Gather(given, chosen) boxes = Gather(table, chosen)""",
        more=", float[4] scored",
    )  # fmt: skip
    result, _ = check_pass(ParallelLoops(), graph, changes=1, context=GPU)
    after, _ = check_pass(PadRows(), result, changes=1, context=GPU)
    assert [o.type.shape for op in after.of_kind("ResizedPeaks") for o in op.outputs] == [(3, 2), (3, 2)]
