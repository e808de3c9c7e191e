"""The layout change in front of a strided convolution of few channels, run on the processor: in whole blocks, and at odd sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.host import WHY_NOT
from support.net import Net
from support.simulated import feeds_of, lowered
from test_generated import compare_steps


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
@pytest.mark.parametrize(("size", "block"), [((22, 18), 2), ((21, 18), 2), ((22, 17), 2), ((24, 20), 4), ((24, 22), 4)])
def test_space_to_depth(size: tuple[int, int], block: int, tmp_path: Path) -> None:
    n = Net()
    graph = n.done(n.conv(n.input(3, 3, *size), 16, 5, strides=block, pads=2))
    program = lowered(graph)
    kinds = {s.params["op"]["kind"]: s for s in program.steps}
    step = kinds["SpaceToDepthImage"]
    whole = "Pack<f32, " in program.kernels[step.params["launch"]["kernel"]].generated["generated.cuh"]
    assert whole == (size[1] % block == 0), "whole rows of a block are read at once"
    assert compare_steps(program, feeds_of(graph), 1e-6, tmp_path)
