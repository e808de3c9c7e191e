"""unshuffled_convolutions: a convolution of blocks of pixels, moved to channels, is one of the image with a stride."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import BlockAttrs, ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.table import OPDEFS
from optdnn.passes.base import PassContext
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.unshuffled_convolutions import UnshuffledConvolutions

UNSHUFFLED = UnshuffledConvolutions()
HALF = PassContext(target="cuda:sm_90a", precision="fp16", plan=PrecisionPlan())
SINGLE = replace(HALF, precision="fp32")
TURNED = TransposeAttrs((0, 1, 3, 5, 2, 4))
C = 4


def views(n: Net, x: Value, cut: Sequence[int], perm: Sequence[int], joined: Sequence[int]) -> Value:
    turned = n.op("Transpose", n.op("Reshape", x, n.ints(*cut)), attrs=TransposeAttrs(tuple(perm)))
    return n.op("Reshape", turned, n.ints(*joined))


def pixel_unshuffle(n: Net, x: Value) -> Value:
    return views(n, x, (2, C, 4, 2, 3, 2), (0, 1, 3, 5, 2, 4), (2, 4 * C, 4, 3))


def sliced(
    n: Net, x: Value, offsets: Sequence[tuple[int, int]], axes: tuple[int, int] = (2, 3), step: int = 2
) -> Value:
    parts = [
        n.op("Slice", x, n.ints(*at), n.ints(1 << 62, 1 << 62), n.ints(*axes), n.ints(step, step)) for at in offsets
    ]
    return n.op("Concat", *parts, attrs=ConcatAttrs(1))


def chained(n: Net, x: Value) -> Value:
    """The slices of YOLOv5's Focus: one axis each."""
    parts = []
    for row, column in ((0, 0), (1, 0), (0, 1), (1, 1)):
        rows = n.op("Slice", x, n.ints(row), n.ints(1 << 62), n.ints(2), n.ints(2))
        parts.append(n.op("Slice", rows, n.ints(column), n.ints(1 << 62), n.ints(-1), n.ints(2)))
    return n.op("Concat", *parts, attrs=ConcatAttrs(1))


ALL = ((0, 0), (1, 0), (0, 1), (1, 1))
FORMS: dict[str, Any] = {
    "unshuffle": pixel_unshuffle,
    "blocks of 4 x 3": lambda n, x: views(n, x, (2, C, 2, 4, 2, 3), (0, 1, 3, 5, 2, 4), (2, 12 * C, 2, 2)),
    "columns first": lambda n, x: views(n, x, (2, C, 4, 2, 3, 2), (0, 5, 1, 3, 2, 4), (2, 4 * C, 4, 3)),
    "one axis": lambda n, x: views(n, x, (2, C, 8, 3, 2), (0, 4, 1, 2, 3), (2, 2 * C, 8, 3)),
    "DCR": lambda n, x: n.op("SpaceToDepth", x, attrs=BlockAttrs(2)),
    "CRD": lambda n, x: n.op("SpaceToDepth", x, attrs=BlockAttrs(2, "CRD")),
    "slices": lambda n, x: sliced(n, x, ALL),
    "chained slices": chained,
}


def network(form: Any, kernel: int = 3, *, n: Net | None = None, **conv: Any) -> Graph:
    n = n or Net(np.float64)
    y = n.conv(form(n, n.input(2, C, 8, 6)), 6, kernel, pads=conv.pop("pads", kernel // 2), bias=True, **conv)
    return n.done(n.op("Relu", y))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms(form: Any, kernel: int) -> None:
    graph, _ = check_pass(UNSHUFFLED, network(form, kernel), changes=1, kinds={"Conv": 1, "Relu": 1}, context=HALF)
    (conv,) = graph.of_kind("Conv")
    assert graph.type(conv.inputs[0]).static_shape == (2, C, 8, 6)  # type: ignore[arg-type]


def test_geometry() -> None:
    graph, _ = check_pass(
        UNSHUFFLED, network(pixel_unshuffle, 3, pads=(1, 0, 2, 1), strides=2), changes=1, context=HALF
    )
    (conv,) = graph.of_kind("Conv")
    assert conv.attrs.strides == (4, 4)
    assert conv.attrs.pads == (2, 0, 4, 2)
    assert graph.type(conv.inputs[1]).static_shape == (6, C, 6, 6)  # type: ignore[arg-type]
    graph, _ = check_pass(
        UNSHUFFLED, network(pixel_unshuffle, 3, pads=0, auto_pad="SAME_UPPER"), changes=1, context=HALF
    )
    assert graph.of_kind("Conv")[0].attrs.pads == (2, 2, 2, 2)


def test_any_batch_size_and_two_convolutions() -> None:
    n = Net(np.float64)
    x = n.input(symbol("b"), C, 8, 6)
    y = n.op("SpaceToDepth", x, attrs=BlockAttrs(2))
    graph = n.done(n.op("Add", n.conv(y, 3, 1, pads=0), n.conv(y, 3)))
    check_pass(UNSHUFFLED, graph, changes=2, kinds={"Conv": 2, "Add": 1}, context=HALF)


@pytest.mark.parametrize("axes", [1, 3])
def test_sequences_and_volumes(axes: int) -> None:
    n = Net(np.float64)
    if axes == 1:
        y = views(n, n.input(2, C, 12), (2, C, 4, 3), (0, 1, 3, 2), (2, 3 * C, 4))
    else:
        y = views(n, n.input(2, C, 3, 4, 6), (2, C, 3, 2, 2, 3, 2), (0, 1, 4, 6, 2, 3, 5), (2, 4 * C, 3, 2, 3))
    graph, _ = check_pass(UNSHUFFLED, n.done(n.conv(y, 5)), changes=1, kinds={"Conv": 1}, context=HALF)
    assert graph.of_kind("Conv")[0].attrs.strides == ((3,) if axes == 1 else (1, 2, 2))


def test_refusals() -> None:
    def refused(graph: Graph, because: str, context: PassContext = HALF) -> None:
        check_refused(UNSHUFFLED, graph, because=because, context=context)

    refused(network(pixel_unshuffle, group=2), "has groups")
    refused(network(pixel_unshuffle, pads=2, dilations=2), "has dilations")
    refused(network(pixel_unshuffle, strides=5), r"stride would be 10 \(at most 8\)")
    refused(network(pixel_unshuffle), "of 4 channels would have 36 taps in fp32", SINGLE)
    check_pass(UNSHUFFLED, network(pixel_unshuffle, 1), changes=1, context=SINGLE)
    n = Net(np.float64)
    y = pixel_unshuffle(n, n.input(2, C, 8, 6))
    refused(n.done(n.conv(y, 5), n.op("Neg", y)), "others than convolutions read")


OTHERS: dict[str, Any] = {
    "batch": lambda n, x: views(n, x, (2, C, 4, 2, 3, 2), (1, 0, 3, 5, 2, 4), (C, 8, 4, 3)),
    "rows by columns": lambda n, x: views(n, x, (2, C, 4, 2, 3, 2), (0, 1, 3, 5, 4, 2), (2, 4 * C, 3, 4)),
    "blocks inside": lambda n, x: views(n, x, (2, C, 2, 4, 2, 3), (0, 1, 2, 4, 3, 5), (2, 4 * C, 4, 3)),
    "other shape": lambda n, x: views(n, x, (2, C, 4, 2, 3, 2), (0, 1, 3, 5, 2, 4), (2, 4 * C, 2, 6)),
    "channels cut": lambda n, x: views(n, x, (2, 2, 2, 8, 6), (0, 2, 1, 3, 4), (2, C, 8, 6)),
    "sides joined": lambda n, x: views(n, x, (2, C, 6, 8, 1), (0, 1, 4, 2, 3), (2, C, 6, 8)),
    "whole image": lambda n, x: views(n, x, (2, C, 8, 6), (0, 1, 3, 2), (2, C, 6, 8)),
    "a pixel is missing": lambda n, x: sliced(n, x, ALL[:3]),
    "a pixel comes twice": lambda n, x: sliced(n, x, (*ALL[:3], (0, 0))),
    "slices of channels": lambda n, x: sliced(n, x, ALL, axes=(1, 3)),
    "no whole blocks": lambda n, x: sliced(n, x, ALL, step=4),
    "a row is missing": lambda n, x: sliced(n, x, ((2, 0), (3, 0), (2, 1), (3, 1))),
    "two images": lambda n, x: n.op("Concat", sliced(n, x, ALL[:2]), sliced(n, n.op("Neg", x), ALL[2:]), attrs=ConcatAttrs(1)),
    "halves of rows": lambda n, x: n.op("Concat", x, x, attrs=ConcatAttrs(2)),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS.values(), ids=OTHERS)
def test_other_moves_stay(form: Any) -> None:
    check_untouched(UNSHUFFLED, network(form), context=HALF)


def test_images_without_pixels_stay() -> None:
    n = Net(np.float64)
    check_untouched(UNSHUFFLED, n.done(n.conv(sliced(n, n.input(2, C, 0, 6), ALL), 5)), context=HALF)
    n = Net(np.float64)
    exact = OPDEFS["Reshape"].attrs(allowzero=1)
    y = n.op("Reshape", n.input(2, C, 0, 6), n.ints(2, C, 4, 0, 3, 2), attrs=exact)
    y = n.op("Reshape", n.op("Transpose", y, attrs=TURNED), n.ints(2, 0, 4, 3), attrs=exact)
    y = n.op("Conv", y, np.zeros((5, 0, 1, 1)), attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1)))
    check_untouched(UNSHUFFLED, n.done(y), context=HALF)


def test_images_of_unknown_rank_stay() -> None:
    n = Net(np.float64)
    x = n.op("Reshape", n.input(2, C, 8, 6), n.input(symbol("rank"), name="shape", dtype=np.int64))
    check_untouched(UNSHUFFLED, n.done(n.conv(pixel_unshuffle(n, x), 5)), context=HALF)


def test_computed_weights_stay() -> None:
    n = Net(np.float64)
    y = pixel_unshuffle(n, n.input(2, C, 8, 6))
    weights = n.op("Relu", n.input(5, 4 * C, 1, 1, name="w"))
    conv = n.op("Conv", y, weights, attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1)))
    check_untouched(UNSHUFFLED, n.done(conv), context=HALF)


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_network_on_the_gpu(kernel: int) -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 8, 16, 24), 32))
    y = views(n, x, (1, 32, 8, 2, 12, 2), (0, 1, 3, 5, 2, 4), (1, 128, 8, 12))
    graph = n.done(n.op("Relu", n.conv(y, 64, kernel, pads=kernel // 2, bias=True)))
    assert "Copy" not in kinds(check_simulated(graph))[1:-1]
