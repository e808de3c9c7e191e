"""shifted_stacks: stacks of shifted copies of one image are selections."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, passed

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.shifted_stacks import ShiftedStacks

PASS = ShiftedStacks()
W = 8


def plane(n: Net, x: Value, shift: int, *, right: bool, before: bool = False, filler: float | None = None) -> Value:
    """The image from ``shift`` on, or up to there, at the end of a plane of zeros. ``before``: padded before the new axis."""
    begin, end = (0, W - shift) if right else (shift, W)
    y = n.op("Slice", x, n.ints(begin), n.ints(end), n.ints(3)) if shift else x
    pads = [0, 0, 0, shift, 0, 0, 0, 0]
    value = [] if filler is None else [n.const(np.float32(filler))]
    if before:
        return n.op("Unsqueeze", n.op("Pad", y, n.ints(*pads), *value), n.ints(2))
    y = n.op("Unsqueeze", y, n.ints(2))
    return n.op("Pad", y, n.ints(*pads[:2], 0, *pads[2:6], 0, *pads[6:]), *value) if shift else y


def stack(
    shifts: Sequence[int] = range(5), *, right: bool = False, between: bool = False, before: bool = False
) -> Graph:
    n = Net()
    x = n.input(2, 3, 4, W)
    parts = [plane(n, x, s, right=right, before=before) for s in shifts]
    if between:
        parts.insert(3, n.input(2, 3, 1, 4, W, name="other"))
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2)))


@pytest.mark.parametrize("before", [False, True])
def test_cut_images(before: bool) -> None:
    """``volume[:, :, d, :, d:] = x[..., d:]``: nothing moves."""
    kinds = {"Unsqueeze": 1, "Where": 1}
    check_pass(PASS, stack(before=before), changes=1, rules={"shifted_stack": 1}, kinds=kinds)


@pytest.mark.parametrize("shifts", [range(5), (0, 1, 3, 2, 6), (1, 2, 3, 4)])
def test_shifted_images(shifts: Sequence[int]) -> None:
    """``volume[:, :, d, :, d:] = x[..., :-d]``."""
    kinds = {"Gather": 1, "Transpose": 1, "Where": 1}
    check_pass(PASS, stack(shifts, right=True), changes=1, kinds=kinds)


def test_other_parts_stay() -> None:
    graph = stack((1, 2, 3, 4, 5, 6, 7), right=True, between=True)
    check_pass(
        PASS,
        graph,
        changes=1,
        kinds={"Gather": 1, "Transpose": 1, "Where": 1, "Concat": 1, "Slice": 3, "Unsqueeze": 3, "Pad": 3},
    )


def test_infinite_elements_outside_of_the_image_stay_there() -> None:
    """A selection, not a product with a mask: zero times infinity is NaN."""
    n = Net()
    x = n.op("Div", n.input(1, 2, 3, W), n.const(np.float32(0)))
    graph = n.done(n.op("Concat", *(plane(n, x, s, right=True) for s in range(5)), attrs=ConcatAttrs(2)))
    feeds = random_feeds(graph)
    (want,) = evaluate(graph, feeds).values()
    assert PASS(graph, None).changes == 1
    (got,) = evaluate(graph, feeds).values()
    assert np.isinf(got).any()
    np.testing.assert_array_equal(got, want)


def test_windows_before_the_stack() -> None:
    """A Slice of a padded image takes a window that may begin in the padding."""
    n = Net()
    x = n.input(1, 2, 3, W)
    parts = []
    for d in range(5):
        wide = n.op("Pad", x, n.ints(0, 0, 0, 2, 0, 0, 0, 2))
        parts.append(n.op("Unsqueeze", n.op("Slice", wide, n.ints(d), n.ints(d + W), n.ints(3)), n.ints(1)))
    check_pass(
        PASS,
        n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1))),
        changes=1,
        kinds={"Gather": 1, "Transpose": 1, "Where": 1},
    )


def test_shifts_along_two_axes_are_refused() -> None:
    n = Net()
    x = n.input(1, 2, 6, W)
    parts = []
    for d in range(5):
        y = n.op("Slice", x, n.ints(0, 0), n.ints(6 - d, W - d), n.ints(2, 3))
        parts.append(n.op("Unsqueeze", n.op("Pad", y, n.ints(0, 0, d, d, 0, 0, 0, 0)), n.ints(1)))
    check_refused(PASS, n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1))), because="shifted along several axes")


def test_images_of_another_size_are_refused() -> None:
    n = Net()
    x = n.input(1, 2, 6, W)
    parts = []
    for d in range(5):
        y = n.op("Slice", x, n.ints(0, 0), n.ints(4, W - d), n.ints(2, 3))
        parts.append(n.op("Unsqueeze", n.op("Pad", y, n.ints(0, 0, 0, d, 0, 0, 0, 0)), n.ints(1)))
    check_refused(PASS, n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1))), because="another size than their source")


def _other(which: str) -> Graph:
    n = Net()
    x = n.input(2, 3, 4, W)
    if which == "few":
        parts = [plane(n, x, s, right=True) for s in range(4)]
    elif which == "sources":
        parts = [plane(n, n.input(2, 3, 4, W, name=f"x{s}"), s, right=True) for s in range(6)]
    elif which == "filler":
        parts = [plane(n, x, s, right=True, filler=1) for s in range(6)]
    elif which == "empty":  # all columns are zeros
        empty, pads = n.op("Unsqueeze", n.input(2, 3, 4, 0, name="e"), n.ints(2)), [0] * 9
        parts = [n.op("Pad", empty, n.ints(*pads[:4], s, *pads[5:], W - s)) for s in range(6)]
        parts.append(n.op("Unsqueeze", x, n.ints(2)))
    else:
        parts = [
            n.op("Pad", n.op("Slice", x, n.ints(0), n.ints(W - s), n.ints(3)), n.ints(0, 0, 0, s, 0, 0, 0, 0))
            for s in range(1, 6)
        ]
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2)))


@pytest.mark.parametrize("which", ["few", "sources", "filler", "empty", "channels"])
def test_no_stack_of_shifted_images(which: str) -> None:
    check_untouched(PASS, _other(which))


def test_a_volume_needs_few_launches() -> None:
    graph = stack(range(8), right=True)
    check_simulated(graph)
    made, _ = passed(graph, "fp16", io_dtype="fp16")
    assert made.kinds()["Pointwise"] == 1
    assert "Pad" not in made.kinds()
