"""resampling_filters: filters over inserted zeros are transposed convolutions, and dropped pixels are strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import PadAttrs
from optdnn.passes.resampling_filters import ResamplingFilters

B, C, H, W = 2, 8, 6, 10


def padded(n: Net, x: Value, *pads: int, value: float | None = None) -> Value:
    more = [] if value is None else [value]
    return n.op("Pad", x, n.ints(*pads), *more, attrs=PadAttrs())


def filtered(n: Net, x: Value, filters: Value, group: int, *bias: Value, strides: int = 1, **form: Any) -> Value:
    pads = form.pop("pads", (0, 0, 0, 0))
    return n.op("Conv", x, filters, *bias, attrs=ConvAttrs((strides, strides), pads, (1, 1), group))


def by_planes(
    *, up: int = 2, size: int = 4, pads: tuple[int, int] = (2, 1), value: float | None = None, bias: bool = False, strides: int = 1,
    used: bool = False, dtype: type = np.float64,
) -> Graph:  # fmt: skip
    """Planes as images of one channel, with zeros after each pixel, padded and filtered: StyleGAN2's ``upfirdn2d``."""
    n = Net(dtype)
    x = n.op("Relu", n.input(B, C, H, W))
    if up > 1:
        x = n.op("Reshape", x, n.ints(B * C, H, 1, W, 1, 1))
        x = padded(n, x, 0, 0, 0, 0, 0, 0, 0, 0, up - 1, 0, up - 1, 0)
    x = n.op("Reshape", x, n.ints(B * C, H * up, W * up, 1))
    p = padded(n, x, 0, pads[0], pads[0], 0, 0, pads[1], pads[1], 0, value=value)
    image = n.op("Reshape", p, n.ints(B * C, 1, H * up + sum(pads), W * up + sum(pads)))
    y = filtered(n, image, n.random(1, 1, size, size), 1, *([n.random(1)] if bias else []), strides=strides)
    height, width = n.dims(y)[2:]
    y = n.op("Reshape", y, n.ints(B, C, int(height), int(width)))  # type: ignore[call-overload]
    return n.done(y, n.op("Sum", p)) if used else n.done(y)


def by_channels(first: bool = False) -> Graph:
    """A filter of rows, then one of columns, for each channel: StyleGAN3. With ``first``, zeros before each pixel."""
    n = Net(np.float64)
    x = n.op("Reshape", n.input(B, C, H, W), n.ints(B, C, H, 1, W, 1))
    zeros = (0, 0, 0, 1, 0, 1)
    x = padded(n, x, *zeros, *[0] * 6) if first else padded(n, x, *[0] * 6, *zeros)
    x = n.op("Reshape", x, n.ints(B, C, 2 * H, 2 * W))
    rows = filtered(n, x, n.random(C, 1, 1, 6), C, pads=(3, 3, 2, 2))
    return n.done(filtered(n, rows, n.random(C, 1, 6, 1), C))


def dropped(start: int = 0, group: int = C, used: bool = False) -> Graph:
    """Every second row and column of filtered planes."""
    n = Net(np.float64)
    conv = filtered(n, n.input(B, C, H, W), n.random(C, C // group, 3, 3), group, pads=(1, 1, 1, 1))
    y = n.op("Reshape", conv, n.ints(B * C, H, W, 1))
    for axis in (1, 2):
        y = n.op("Slice", y, n.ints(start), n.ints(2**31), n.ints(axis), n.ints(2))
    return n.done(y, n.op("Neg", conv)) if used else n.done(y)


def shapes(graph: Graph, kind: str) -> list[tuple[int, ...]]:
    return [graph.type(op.value).static_shape for op in graph.of_kind(kind)]


@pytest.mark.parametrize(("size", "pads"), [(4, (2, 1)), (3, (1, 1)), (6, (2, 5)), (2, (1, 0))])
@pytest.mark.parametrize("up", [2, 3])
def test_inserted_zeros_are_not_read(up: int, size: int, pads: tuple[int, int]) -> None:
    graph, _ = check_pass(ResamplingFilters(), by_planes(up=up, size=size, pads=pads), changes=1)
    (op,) = graph.of_kind("ConvTranspose")
    assert (op.attrs.group, op.attrs.strides) == (C, (up, up))
    assert not list(graph.of_kind("Conv", "Pad"))


def test_one_filter_for_all_planes_is_a_depthwise_convolution() -> None:
    graph, _ = check_pass(ResamplingFilters(), by_planes(up=1), changes=1)
    (op,) = graph.of_kind("Conv")
    assert (op.attrs.group, op.attrs.pads) == (C, (2, 2, 1, 1))
    assert not list(graph.of_kind("Pad"))


def test_filters_of_rows_and_columns() -> None:
    graph, _ = check_pass(ResamplingFilters(), by_channels(), changes=2)
    assert shapes(graph, "ConvTranspose") == [(B, C, H, 2 * W), (B, C, 2 * H, 2 * W)]
    assert not list(graph.of_kind("Conv", "Pad"))


def test_dropped_pixels_are_strides() -> None:
    graph, _ = check_pass(ResamplingFilters(), dropped(), changes=2)
    assert shapes(graph, "Conv") == [(B, C, H // 2, W // 2)]
    assert not list(graph.of_kind("Slice"))


@pytest.mark.parametrize(
    ("form", "because"),
    [
        ({"bias": True}, "has a bias or dilations"),
        ({"strides": 2}, "drops pixels of images with inserted zeros"),
        ({"used": True}, "also read by others"),
        ({"size": 2, "pads": (2, 1)}, "padding is wider than its filter"),
        ({"size": 3, "pads": (1, 3)}, "padding is wider than its filter"),
    ],
)
def test_refusals(form: dict[str, Any], because: str) -> None:
    check_refused(ResamplingFilters(), by_planes(**form), because=because, rule="resampling_filter")


def test_pixels_that_others_read_are_computed() -> None:
    check_refused(ResamplingFilters(), dropped(used=True), because="also read by others", rule="sliced_filter")


@pytest.mark.parametrize(
    "graph",
    [by_planes(value=1.0), by_planes(size=1, pads=(0, 0)), by_channels(first=True), dropped(start=1), dropped(group=1)],
)
def test_networks_without_a_candidate(graph: Graph) -> None:
    check_untouched(ResamplingFilters(), graph)


def test_a_network_on_the_gpu() -> None:
    program = check_simulated(by_planes(dtype=np.float32))
    assert [kind for kind in kinds(program) if kind != "Pointwise"] == ["ConvTranspose"]


def blurred(
    *, mode: str = "edge", kernel: int = 2, pads: tuple[int, ...] = (1, 1, 0, 0), pool_pads: int = 0, readers: int = 1,
    include_pad: bool = True, ceil_mode: bool = False, dtype: type = np.float64,
) -> Graph:  # fmt: skip
    """A blur: means of pixels and their neighbors above and to the left. ``pads``: repeated edges at top, left, bottom, right."""
    n = Net(dtype)
    x = n.op("Relu", n.input(B, C, H, W))
    x = n.op("Pad", x, n.ints(0, 0, *pads[:2], 0, 0, *pads[2:]), attrs=PadAttrs(mode))
    y = n.average_pool(x, kernel, pads=pool_pads, strides=1, include_pad=include_pad, ceil_mode=ceil_mode)
    return n.done(n.op("Neg", y), *(n.op("Exp", x) for _ in range(readers - 1)))


@pytest.mark.parametrize("options", [{}, {"kernel": 3, "pads": (1, 1, 1, 1)}, {"pool_pads": 1}])
def test_an_average_of_repeated_edges_is_a_depthwise_convolution(options: dict[str, Any]) -> None:
    kinds_after = {"Relu": 1, "Pad": 1, "Conv": 1, "Neg": 1}
    graph, _ = check_pass(
        ResamplingFilters(), blurred(**options), changes=1, rules={"blurred_edges": 1}, kinds=kinds_after
    )
    (conv,) = graph.of_kind("Conv")
    size = options.get("kernel", 2)
    assert conv.attrs.group == C
    assert graph.constant_value(conv.inputs[1]).shape == (C, 1, size, size)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"readers": 2}, "also read by others"),
        ({"pool_pads": 1, "include_pad": False}, "depends on the position"),
        ({"ceil_mode": True}, "depends on the position"),
        ({"kernel": 8, "pads": (4, 4, 4, 4)}, "windows have 64 pixels"),
    ],
)
def test_averages_that_stay(options: dict[str, Any], because: str) -> None:
    check_refused(ResamplingFilters(), blurred(**options), because=because)


def test_averages_of_other_edges_stay() -> None:
    check_untouched(ResamplingFilters(), blurred(mode="reflect"))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_blur_of_repeated_edges_is_one_launch(precision: str) -> None:
    n = Net()
    x = n.op("Pad", n.conv(n.input(1, 8, 16, 16), 64), n.ints(0, 0, 1, 1, 0, 0, 0, 0), attrs=PadAttrs("edge"))
    y = n.conv(n.average_pool(x, 2, strides=1), 16)
    program = check_simulated(n.done(y), precision)
    found = kinds(program)
    assert found.count("EdgePadded") == 1
    assert not {"Pad", "AveragePool"} & set(found)
