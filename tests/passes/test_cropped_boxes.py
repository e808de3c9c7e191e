"""cropped_boxes: TensorFlow's crop_and_resize, which tf2onnx writes as a loop over boxes, becomes one RoiAlign."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import parser
from support.check import check_pass, check_refused
from support.simulated import check_simulated

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.parallel_loops import ParallelLoops

GPU = PassContext(target="cuda:sm_90a")


def crops(**changed: Any) -> Graph:
    """Crops of six boxes with random corners, some outside of the image. ``changed``: other text for parts of the model."""
    part = {
        "trips": 6, "mode": '"linear"', "size": "4,3", "end": "Add(i, one)", "corners": "Concat<axis = 0>(low, first, high, last)",
        "perm": "0, 3, 1, 2", "number": "which", "height": 5,
    } | changed  # fmt: skip
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[2,{height},7,3] x, float[6,4] boxes, float[6] z) => (float[6,p,q,3] y)
    <int64 trips = {{{trips}}}, bool going = {{1}}, int64[1] one = {{1}}, int32[1] one32 = {{1}}, int64[1] zero = {{0}},
     int64[1] two = {{2}}, int64[1] four = {{4}}, float[2] low = {{0, 0}}, float[2] high = {{1, 1}}, int64[2] size = {{{size}}},
     float middle = {{0}}, float[0] none = {{}}> {{
        positive = Greater(z, middle)
        which = Cast<to = 6>(positive)
        rows = Loop(trips, going) <body = body (int64 i, bool c) => (bool go, float[p,q,3] row) {{
            go = Identity(c)
            at = Reshape(i, one)
            end = {end}
            box = Slice(boxes, at, end, zero)
            corner = Reshape(box, four)
            first = Slice(corner, zero, two)
            last = Slice(corner, two, four)
            region = {corners}
            number = Slice({number}, at, end)
            next = Add(number, one32)
            image = Slice(x, number, next, zero)
            planes = Transpose<perm = [{perm}]>(image)
            whole = Shape<start = 0, end = 2>(planes)
            sizes = Concat<axis = 0>(whole, size)
            crop = Resize<coordinate_transformation_mode = "tf_crop_and_resize", mode = {mode}, extrapolation_value = 2.5>(
                planes, region, none, sizes)
            turned = Transpose<perm = [0, 2, 3, 1]>(crop)
            row = Squeeze(turned, zero)
        }}>
        y = Identity(rows)
    }}"""
    return import_model(parser.parse_model(text.format(**part)))


@pytest.mark.parametrize("size", ["4,3", "1,2", "2,1"])
def test_crops_of_boxes_are_one_roi_align(size: str) -> None:
    graph, _ = check_pass(ParallelLoops(), crops(size=size), changes=1, rules={"cropped_boxes": 1}, context=GPU)
    (align,) = graph.of_kind("RoiAlign")
    assert f"{align.attrs.output_height},{align.attrs.output_width}" == size
    assert not graph.of_kind("Loop")


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"mode": '"nearest"'}, "only 'linear' without antialiasing"),
        ({"trips": 5}, "not as many as the boxes"),
        ({"height": '"h"'}, "the size of its images is not known"),
    ],
)
def test_refusals(changed: dict[str, Any], because: str) -> None:
    check_refused(ParallelLoops(), crops(**changed), because=because, context=GPU)


@pytest.mark.parametrize(
    "changed",
    [
        {"end": "Add(i, two)"},
        {"corners": "Concat<axis = 0>(low, last, high, first)"},
        {"corners": "Concat<axis = 0>(high, first, high, last)"},
        {"corners": "Concat<axis = 0>(first, low, last, high)"},
    ],
)
def test_other_loops_have_no_roi_align(changed: dict[str, Any]) -> None:
    graph = crops(**changed)
    ParallelLoops()(graph, GPU)
    assert not graph.of_kind("RoiAlign")


def test_a_gpu_computes_it_without_the_host() -> None:
    program = check_simulated(crops())
    assert not [step for step in program.steps if step.executor == "host"]
