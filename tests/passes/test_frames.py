"""frames_are_blocks: convolutions of one channel with a long stride become convolutions of blocks of samples."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import DimLike, symbol
from optdnn.ir.graph import Graph
from optdnn.ops.conv import ConvAttrs
from optdnn.passes.rules.frames import LEAST_BLOCK
from optdnn.passes.transform_products import TransformProducts

PASS = TransformProducts()


def bank(
    *sizes: DimLike,
    length: int = 96,
    step: int = 32,
    pads: tuple[int, int] = (0, 0),
    bias: bool = False,
    axis: int = -1,
) -> Graph:
    """Filters along an axis of a signal, (2, 1, 300) by default."""
    n = Net()
    x = n.input(*(sizes or (2, 1, 300)))
    rank = len(n.dims(x)) - 2
    along = [i == axis % rank for i in range(rank)]
    kernel, steps = ([number if here else 1 for here in along] for number in (length, step))
    around = [number if here else 0 for number in pads for here in along]
    w = n.random(6, 1, *kernel, scale=0.1)
    attrs = ConvAttrs(tuple(steps), tuple(around), (1,) * rank)
    return n.done(n.op("Conv", x, w, *([n.random(6)] if bias else []), attrs=attrs))


@pytest.mark.parametrize(
    ("options", "channels"),
    [
        ({}, 32),
        ({"bias": True}, 32),
        ({"length": 100, "step": 40}, 40),  # 20 samples divide both: too few
        ({"length": 40, "step": 64}, 64),  # steps are longer than frames, and the last one is filled up
        ({"length": 128, "step": 64}, 64),
        ({"length": 96, "step": 64}, 32),
        ({"pads": (48, 48)}, 32),
        ({"pads": (0, 5)}, 32),
        ({"pads": (5, 0), "length": 97, "step": 33}, 33),
    ],
    ids=str,
)
def test_frames_are_convolved_as_blocks(options: dict[str, Any], channels: int) -> None:
    graph, _ = check_pass(PASS, bank(**options), changes=1, rules={"frames_are_blocks": 1})
    (conv,) = graph.of_kind("Conv")
    assert graph.type(conv.inputs[0]).dims[1] == channels  # type: ignore[arg-type]


@pytest.mark.parametrize(("sizes", "axis"), [((2, 1, 1, 300), -1), ((2, 1, 300, 1), 0)])
def test_signals_that_are_written_as_images(sizes: tuple[int, ...], axis: int) -> None:
    check_pass(PASS, bank(*sizes, axis=axis, pads=(7, 7)), changes=1, rules={"frames_are_blocks": 1})


def test_short_steps() -> None:
    check_untouched(PASS, bank(step=LEAST_BLOCK - 1))


def dilated() -> Graph:
    n = Net()
    return n.done(n.conv(n.input(2, 1, 300), 4, 3, strides=32, dilations=2, pads=0))


def computed() -> Graph:
    n = Net()
    return n.done(n.op("Conv", n.input(2, 1, 300), n.input(4, 1, 64), attrs=ConvAttrs((32,), (0, 0), (1,))))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: bank(2, 1, 8, 300), "its operand is an image"),
        (dilated, "leaves out samples"),
        (computed, "not constant"),
        (lambda: bank(2, 1, symbol("samples")), "number of samples"),
        (lambda: bank(0, 1, 300), "no elements"),
    ],
)
def test_what_stays(graph: Any, because: str) -> None:
    check_refused(PASS, graph(), because=because)
