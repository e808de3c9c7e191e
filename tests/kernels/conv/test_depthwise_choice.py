"""Which depthwise convolutions the depthwise kernel takes."""

from __future__ import annotations

from typing import Any

import pytest
from support.net import Net
from support.simulated import check_simulated, refusals

from optdnn.ir.graph import Graph
from optdnn.runtime.program import Program


def chosen(program: Program, kind: str) -> list[str]:
    """The tactics of operators of this kind, also of those whose launches another one drops."""
    return [t["tactic"] for t in program.meta["tactics"] if t["kind"] == kind]


def depthwise(channels: int = 16, **options: Any) -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 8, 12, 11), channels, 1, pads=0))
    y = n.op("Clip", n.conv(x, channels, group=channels, bias=True, **options), 0.0, 1.5)
    return n.done(n.conv(y, 8, 1, pads=0))


@pytest.mark.parametrize("options", [{}, {"kernel": 5, "pads": 2, "strides": 2}, {"dilations": 2, "pads": 2}])
def test_depthwise(options: dict[str, Any]) -> None:
    program = check_simulated(depthwise(**options))
    assert "depthwise_tiles" in chosen(program, "Conv")


def test_other_depthwise_convolutions_run_elsewhere() -> None:
    program = check_simulated(depthwise(10))
    assert "depthwise" in chosen(program, "Conv")
    assert "not a multiple of 4" in "; ".join(refusals(program, kind="Conv"))


def test_a_depthwise_convolution_adds_its_residual() -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 8, 9, 9), 16))
    y = n.op("Relu", n.op("Add", n.conv(x, 16, group=16), x))
    program = check_simulated(n.done(n.conv(y, 8, 1, pads=0)))
    assert "depthwise_tiles" in chosen(program, "Conv")
    assert "Pointwise" not in [s.params["op"]["kind"] for s in program.steps[:-1]]
