"""Squeeze-and-excitation: the depthwise convolution makes the means of its result on its way."""

from __future__ import annotations

import pytest
from support.conv_cases import excited
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.runtime.program import Program


@pytest.mark.parametrize(("size", "batch"), [((7, 7), 2), ((40, 36), 1), ((28, 28), 16)])
def test_the_pool_is_part_of_the_convolution(size: tuple[int, int], batch: int) -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(batch, 8, *size), 32, 1, pads=0))
    program: Program = check_simulated(n.done(n.conv(excited(n, x, 32), 16, 1, pads=0)), tolerance=1e-2)
    found = kinds(program)
    assert "ConvSqueeze" in found
    assert "GlobalAveragePool" not in found
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "ConvSqueeze"]
    assert any("GlobalAveragePool" in name for name in step.src)


def test_a_pool_of_another_convolution_stays_a_pool() -> None:
    n = Net()
    y = n.op("Relu", n.conv(n.input(2, 16, 9, 9), 32, bias=True))
    program = check_simulated(n.done(n.conv(n.op("GlobalAveragePool", y), 16, 1, pads=0)))
    assert "ConvSqueeze" not in kinds(program)


def test_the_second_launch_covers_every_channel() -> None:
    from optdnn.kernels.conv.problem import Source

    problem = depthwise.Problem(3, Source(28, 28, 40, (3, 3), (1, 1), (1, 1, 1, 1)), squeeze=True)
    made = depthwise.describe_squeeze(problem, 9)
    assert made.grid == (2, 3, 1)
    assert made.block == 512
