"""long_strides: convolutions over sequences with strides above eight read blocks of positions."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.passes.long_strides import LongStrides

PASS = LongStrides()


def encoder(
    stride: int = 12, taps: int = 24, pads: tuple[int, int] = (6, 6), length: object = 48, *, channels: int = 8, group: int = 1,
    dilation: int = 1, prologue: bool = False,
) -> Graph:  # fmt: skip
    """A convolution with a bias and an activation in its epilogue."""
    n = Net(np.float64)
    stages = {"prologue": (Stage("Relu", (~0,), Attrs()),)} if prologue else {}
    attrs = ConvAttrs((stride,), pads, (dilation,), group, epilogue=(Stage("Tanh", (-1,), Attrs()),), **stages)
    w = n.random(6, channels // group, taps)
    return n.done(n.op("Conv", n.input(2, channels, length), w, n.random(6), attrs=attrs))


@pytest.mark.parametrize(
    ("stride", "taps", "pads", "length", "blocks"),
    [
        (12, 24, (6, 6), 48, 3),
        (10, 20, (5, 5), 40, 3),
        (12, 24, (0, 0), 48, 2),
        (16, 17, (16, 0), 64, 2),
        (9, 20, (2, 9), 36, 3),
    ],
)
def test_positions_of_a_block_become_channels(
    stride: int, taps: int, pads: tuple[int, int], length: int, blocks: int
) -> None:
    graph, _ = check_pass(
        PASS, encoder(stride, taps, pads, length), changes=1, kinds={"Conv": 1, "Transpose": 2, "Reshape": 1}
    )
    (conv,) = graph.of_kind("Conv")
    assert graph.constant_value(conv.inputs[1]).shape == (6, 8 * stride, blocks)
    assert conv.attrs.strides == (1,)
    assert len(conv.attrs.epilogue) == 1


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (encoder(channels=4), "its 4 channels are no multiple of 8"),
        (encoder(length=symbol("n")), "the length of its sequence is not known"),
        (encoder(length=50), "its sequence of 50 is not made of whole blocks of 12"),
        (encoder(12, 14, (1, 1), 48), "its filters of 14 would become 36 long"),
    ],
)
def test_refused(graph: Graph, because: str) -> None:
    check_refused(PASS, graph, because=because)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 8, "taps": 16, "pads": (4, 4)},
        {"taps": 12, "pads": (0, 0)},
        {"group": 2},
        {"dilation": 2},
        {"prologue": True},
    ],
)
def test_other_convolutions_stay(options: dict[str, object]) -> None:
    check_untouched(PASS, encoder(**options))  # type: ignore[arg-type]


def test_blocks_of_a_convolution_are_a_view() -> None:
    n = Net()
    attrs = ConvAttrs((12,), (6, 6), (1,))
    x = n.op("Conv", n.input(2, 64, 96), n.random(64, 64, 3), attrs=ConvAttrs((1,), (1, 1), (1,)))
    y = n.op("Conv", n.op("Relu", x), n.random(32, 64, 24), n.random(32), attrs=attrs)
    program = check_simulated(n.done(n.op("Relu", y)), "fp16")
    launches = [str(s.params["tactic"]).split()[0] for s in program.steps]
    assert launches.count("conv_sm90") == 2
    assert "conv_sm80" not in launches
    assert kinds(program).count("Copy") <= 2, "the input and the output change their order"
