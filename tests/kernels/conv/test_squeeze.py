"""Squeeze-and-excitation: the launch of the depthwise convolution also computes the means of its result."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.conv_cases import excited
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv.depthwise_cost import FINISH, finish_seconds
from optdnn.kernels.conv.problem import Source
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
    from optdnn.runtime.cuda.gpu_facts import of_arch

    problem = depthwise.Problem(3, Source(28, 28, 40, (3, 3), (1, 1), (1, 1, 1, 1)), squeeze=True)
    made = depthwise.launch_squeeze(problem, 9, of_arch("sm_90a"))
    assert made.grid == (2, 3, 1)
    assert made.block == 512


@pytest.mark.parametrize("readers", [1, 2])
def test_sums_cost_no_launch_where_a_gate_adds_them_up(readers: int) -> None:
    """The cost model counts the second launch only if the gate does not replace it. ``readers``: of the means."""
    n = Net()
    y = n.conv(n.conv(n.input(1, 64, 40, 36), 64, 1, pads=0), 64, group=64)
    means = n.op("GlobalAveragePool", y)
    gate = n.op("Sigmoid", n.conv(n.op("Relu", n.conv(means, 16, 1, pads=0)), 64, 1, pads=0))
    results = [n.conv(n.op("Mul", y, gate), 16, 1, pads=0), *([n.op("Tanh", means)] * (readers - 1))]
    found = kinds(check_simulated(n.done(*results), tolerance=1e-2))
    assert ("SqueezeFinish" in found) == (readers > 1)
    problem = depthwise.Problem(1, Source(40, 36, 64, (3, 3), (1, 1), (1, 1, 1, 1)), squeeze=True)
    assert finish_seconds(problem, 1) == FINISH
    assert finish_seconds(problem, 2) == finish_seconds(replace(problem, summed=True), 1) == 0
