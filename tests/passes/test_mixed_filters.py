"""mixed_filters: depthwise convolutions of the parts of an image, side by side, are one convolution of the image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.passes.mixed_filters import MixedFilters

PASS = MixedFilters()


def parts(
    n: Net,
    x: Value,
    widths: tuple[int, ...] = (6, 9, 9),
    kernels: tuple[Any, ...] = (3, 5, 7),
    *,
    pads: tuple[Any, ...] = (),
    order: tuple[int, ...] = (),
    strides: int = 1,
    dilations: int = 1,
    axis: int = 1,
    biases: tuple[bool, ...] = (True, False, True),
    groups: int = 0,
) -> Value:
    split = n.op("Split", x, n.ints(*widths), attrs=SplitAttrs(1), outputs=len(widths))
    each = pads or tuple(dilations * (k // 2) for k in kernels)
    made = [
        n.conv(v, c, k, pads=p, strides=strides, dilations=dilations, group=groups or c, bias=b)
        for v, c, k, p, b in zip(split, widths, kernels, each, biases, strict=True)
    ]
    return n.op("Concat", *(made[k] for k in order or range(len(made))), attrs=ConcatAttrs(axis))


def image(size: tuple[int, ...] = (9, 11), widths: tuple[int, ...] = (6, 9, 9), **change: Any) -> Graph:
    n = Net(np.float64)
    return n.done(parts(n, n.input(2, sum(widths), *size), widths, **change))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"biases": (False,) * 3},
        {"strides": 2},
        {"kernels": ((3, 1), (1, 5), (7, 7)), "pads": ((1, 0, 1, 0), (0, 2, 0, 2), 3)},
        {"kernels": (3, 3, 5), "pads": ((0, 0, 2, 2), (2, 2, 0, 0), (1, 1, 3, 3))},
        {"size": (13,), "kernels": (3, 5, 7)},
        {"size": (5, 6, 7), "kernels": (1, 3, 3)},
    ],
)
def test_parts_of_an_image_are_filtered_at_once(change: dict[str, Any]) -> None:
    graph = image(**change)
    after, _ = check_pass(PASS, graph, changes=1, kinds={"Conv": 1})
    (conv,) = after.of_kind("Conv")
    assert conv.attrs.group == 24
    assert (conv.input(2) is not None) == any(change.get("biases", (True,)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"widths": (8, 4, 12)}, "kernels take parts of 8, 4, 12 channels as they are"),
        ({"widths": (6, 9, 8)}, "the image has 23 channels, not a multiple of 4 either"),
        ({"dilations": 2}, "do not fit together"),
    ],
)
def test_refusals_say_why(change: dict[str, Any], reason: str) -> None:
    check_refused(PASS, image(**change), because=reason)


def with_another_reader() -> Graph:
    n = Net(np.float64)
    x = n.input(2, 24, 9, 11)
    first, last = n.op("Split", x, n.ints(10, 14), attrs=SplitAttrs(1), outputs=2)
    one, two = n.conv(first, 10, group=10), n.conv(last, 14, group=14)
    return n.done(n.op("Concat", one, two, attrs=ConcatAttrs(1)), n.op("Relu", one))


def of_stages() -> Graph:
    n = Net(np.float64)
    first, last = n.op("Split", n.input(2, 24, 9, 11), n.ints(10, 14), attrs=SplitAttrs(1), outputs=2)
    return n.done(
        n.op("Concat", n.op("Relu", n.conv(first, 10, group=10)), n.conv(last, 14, group=14), attrs=ConcatAttrs(1))
    )


@pytest.mark.parametrize(
    "graph",
    [
        image(order=(1, 0, 2)), image(axis=2, widths=(8, 8, 8)), image(groups=3),
        with_another_reader(), of_stages(),
    ],
)  # fmt: skip
def test_other_parts_stay(graph: Graph) -> None:
    check_untouched(PASS, graph)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_one_launch_filters_all_parts(precision: str) -> None:
    n = Net()
    y = parts(n, n.conv(n.input(2, 16, 14, 14), 24, 1, pads=0))
    program = check_simulated(n.done(n.conv(y, 16, 1, pads=0)), precision, tolerance=1e-2)
    assert [t["tactic"] for t in program.meta["tactics"]].count("depthwise_tiles") == 1
    assert kinds(program).count("Conv") == 3
