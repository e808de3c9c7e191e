"""pasted_pictures: masks that a Loop resizes and pastes at boxes become products; refusals."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched, from_text

from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.bodies import OptimizeBodies
from optdnn.passes.pad_rows import PadRows
from optdnn.passes.pasted_pictures import PastedPictures

HEIGHT, WIDTH = 9, 12
BOXES = [[1, 2, 6, 7], [-3, -2, 4, 3], [7, 5, 16, 13], [4, 4, 4, 4], [-5, 0, 20, 8], [2, 3, 9, 3]]
"""Left, top, right, bottom: inside, beyond each edge, of one pixel, and larger than the canvas."""


def pasted(
    *, mode: str = "linear", coordinates: str = "half_pixel", goes_on: str = "yes", size: str = "w", boxes: Any = None,
    done: int = 0, step: str = "one", times: str = "n", masks: str = "float[6,1,5,4]", mask: str = "Gather(mask3, c0)",
    before: str = "n = Identity(count) masks = Identity(given) rows = Identity(table)", inputs: str = "",
) -> Graph:  # fmt: skip
    """torchvision's ``paste_masks_in_image``, exported. ``size``: the name of the resized picture's width."""
    table = boxes or BOXES
    numbers = ", ".join(str(x) for row in table for x in row)
    filled = ", ".join(["0"] * done * HEIGHT * WIDTH)
    text = f"""<ir_version: 9, opset_import: ["": 17]>
    g ({masks} given, float[1] shift, bool[1] maybe{inputs}) => (float[m,{HEIGHT},{WIDTH}] y)
    <int64[{len(table)},4] table = {{{numbers}}}, int64 count = {{6}}, int64 less = {{5}}, bool yes = {{1}},
     float[{done},{HEIGHT},{WIDTH}] none = {{{filled}}},
     float zeros = {{0}}, int64[1] flat = {{-1}}, int64[1] start = {{0}}, int64[1] six = {{6}}>
    {{ {before} whole = Floor(shift) moved = Cast<to = 7>(whole) boxes = Add(rows, moved)
      y = Loop({times}, yes, none) <body = b (int64 i, bool go, float[k,{HEIGHT},{WIDTH}] done)
       => (bool on, float[l,{HEIGHT},{WIDTH}] all)
       <int64 c0 = {{0}}, int64 c1 = {{1}}, int64 c2 = {{2}}, int64 c3 = {{3}}, int64[1] zero = {{0}}, int64[1] one = {{1}},
        int64[1] two = {{2}},
        int64[1] high = {{{HEIGHT}}}, int64[1] wide = {{{WIDTH}}}, int64[2] ones = {{1, 1}}, int64[4] shape = {{1, 1, 5, 4}}> {{
        mask3 = Gather(masks, i) mask = {mask} box = Gather(boxes, i)
        left = Gather(box, c0) top = Gather(box, c1) right = Gather(box, c2) bottom = Gather(box, c3)
        w0 = Sub(right, left) w1 = Add(w0, one) w2 = Concat<axis = 0>(w1, one) w3 = ReduceMax<keepdims = 0>(w2)
        w = Unsqueeze(w3, zero)
        h0 = Sub(bottom, top) h1 = Add(h0, one) h2 = Concat<axis = 0>(h1, one) h3 = ReduceMax<keepdims = 0>(h2)
        h = Unsqueeze(h3, zero)
        size = Concat<axis = 0>(ones, h, {size}) one_mask = Expand(mask, shape)
        resized = Resize<mode = "{mode}", coordinate_transformation_mode = "{coordinates}">(one_mask, , , size)
        plane = Gather(resized, c0) picture = Gather(plane, c0)
        l1 = Unsqueeze(left, zero) x0 = Max(l1, zero) t1 = Unsqueeze(top, zero) y0 = Max(t1, zero)
        r1 = Unsqueeze(right, zero) r2 = Add(r1, one) x1 = Min(r2, wide) b1 = Unsqueeze(bottom, zero)
        b2 = Add(b1, one) y1 = Min(b2, high)
        ya = Sub(y0, top) yb = Sub(y1, top) xa = Sub(x0, left) xb = Sub(x1, left)
        cut_y = Slice(picture, ya, yb, zero, {step}) cut = Slice(cut_y, xa, xb, one, one)
        cut_size = Shape(cut) columns0 = Gather(cut_size, c1) columns = Unsqueeze(columns0, zero)
        below0 = Sub(high, y1) above = Concat<axis = 0>(y0, columns) below = Concat<axis = 0>(below0, columns)
        above_zeros = ConstantOfShape(above) below_zeros = ConstantOfShape(below)
        tall = Concat<axis = 0>(above_zeros, cut, below_zeros) strip = Slice(tall, zero, high, zero, one)
        strip_size = Shape(strip) rows0 = Gather(strip_size, c0) all_rows = Unsqueeze(rows0, zero)
        after0 = Sub(wide, x1) before = Concat<axis = 0>(all_rows, x0) after = Concat<axis = 0>(all_rows, after0)
        before_zeros = ConstantOfShape(before) after_zeros = ConstantOfShape(after)
        broad = Concat<axis = 1>(before_zeros, strip, after_zeros) canvas = Slice(broad, zero, wide, one, one)
        row = Unsqueeze(canvas, zero) all = Concat<axis = 0>(done, row)
        may = Squeeze(maybe) sure = Identity(go) on = Identity({"sure" if goes_on == "yes" else "may"})
       }}> }}"""
    graph = from_text(text)
    OptimizeBodies()(graph, PassContext())
    return graph


@pytest.mark.parametrize("coordinates", ["half_pixel", "pytorch_half_pixel"])
def test_masks_are_pasted_by_products(coordinates: str) -> None:
    result, _ = check_pass(PastedPictures(), pasted(coordinates=coordinates), changes=1, rules={"pasted_picture": 1})
    assert (result.kinds().get("Loop"), result.kinds()["MatMul"]) == (None, 2)
    assert result.of_kind("MatMul")[-1].outputs[0].type.shape == (6, HEIGHT, WIDTH)


def test_pictures_without_an_axis_of_channels() -> None:
    check_pass(PastedPictures(), pasted(masks="float[6,5,4]", mask="Identity(mask3)"), changes=1)


def test_a_number_of_pictures_that_depends_on_data_is_padded() -> None:
    graph = pasted(
        masks="float[9,1,5,4]",
        before="""some = Greater(scores, zeros) places = NonZero(some) listed = Reshape(places, flat)
                  chosen = Slice(listed, start, six)
                  masks = Gather(given, chosen) rows = Gather(table, chosen) few = Shape<start = 0, end = 1>(masks)
                  n = Squeeze(few)""",
        inputs=", float[9] scores", boxes=[*BOXES, *BOXES[:3]],
    )  # fmt: skip
    result, _ = check_pass(PastedPictures(), graph, changes=1)
    after, _ = check_pass(PadRows(), result, changes=1, context=PassContext(target="cuda:sm_90a"))
    assert [op.outputs[0].type.shape for op in after.of_kind("MatMul")] == [(6, HEIGHT, 4), (6, HEIGHT, WIDTH)]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"mode": "nearest"}, "plain linear interpolation"),
        ({"coordinates": "align_corners"}, "plain linear interpolation"),
        ({"goes_on": "may"}, "may end it"),
        ({"times": "less"}, "not simple functions of rows"),
        ({"done": 1}, "does not begin empty"),
    ],
)
def test_refusals(options: dict[str, Any], because: str) -> None:
    check_refused(PastedPictures(), pasted(**options), because=because)


def test_other_steps_are_untouched() -> None:
    check_untouched(PastedPictures(), pasted(step="two"))
