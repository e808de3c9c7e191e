"""Filters of one channel (the gates of ECA-Net): no tensor core, and no change of layout around them."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.conv import FEW_TAPS, of_one_channel
from optdnn.runtime.program import Program


def gated(taps: int = 5) -> Graph:
    """An image times a gate for each channel: a filter along the means of the channels, and a Sigmoid."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 16, 8, 8), 64, 1, pads=0))
    rows = n.op("Reshape", n.op("GlobalAveragePool", x), n.ints(2, 1, 64))
    gate = n.op("Sigmoid", n.conv(rows, 1, [taps], pads=[taps // 2, taps // 2]))
    y = n.op("Mul", x, n.op("Reshape", gate, n.ints(2, 64, 1, 1)))
    return n.done(n.conv(y, 16, 3))


def reasons(program: Program) -> dict[str, str]:
    """The reasons for which other tactics refuse the filter."""
    found = next(t for t in program.meta["tactics"] if t["tactic"] == "depthwise")  # type: ignore[union-attr,index]
    return {r["tactic"]: r["reason"] for r in found["refused"]}  # type: ignore[index,union-attr,call-overload]


def test_a_filter_of_one_channel_takes_one_launch() -> None:
    program = check_simulated(gated(), "fp16")
    assert "Copy" not in kinds(program)[2:-2]  # except for the network's input and output
    why = reasons(program)
    assert all("most of a tile empty" in why[name] for name in ("conv_stem", "conv_sm90"))


def test_a_filter_of_many_taps_stays_on_tensor_cores() -> None:
    program = check_simulated(gated(FEW_TAPS + 2), "fp16")
    assert not any(t["tactic"] == "depthwise" for t in program.meta["tactics"])  # type: ignore[union-attr,index,call-overload]


@pytest.mark.parametrize("shape", [(1, 2, 5), (2, 1, 5), (1, 1, symbol("K", 1)), (1, 1, FEW_TAPS + 1)])
def test_other_filters(shape: tuple[int, ...]) -> None:
    assert not of_one_channel(shape)
    assert of_one_channel((1, 1, 7, 7))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_picture_of_one_channel(precision: str) -> None:
    n = Net(np.float32)
    check_simulated(n.done(n.op("Relu", n.conv(n.input(2, 1, 20, 17), 1, 5, pads=2, strides=2))), precision)


@pytest.mark.hopper
def test_every_launch_does_what_its_step_means() -> None:
    checked_launches(gated(), "fp16")
