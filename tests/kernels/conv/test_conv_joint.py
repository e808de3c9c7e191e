"""Convolutions that write a part of a joint buffer by stores from registers, which blocks that share K use."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from support.net import Net
from support.on_gpu import checked_program
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv.parameters import AHEAD
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.tactic import Offer
from optdnn.ops.index import ConcatAttrs
from optdnn.runtime.cuda.launches.plan import CudaStep, parse
from optdnn.runtime.program import Program

PITCHES = AHEAD[-1] + 16 + 4 * 4
"""Offset of the pitches in the parameter block: after the fields of the prefetch and four numbers."""


def skip_net(kernel: int = 3) -> Graph:
    """A residual convolution of a small image. Its result is a part of a concatenation with another convolution's result."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 8, 8, 8), 512, 1, pads=0))
    beside = n.op("Relu", n.conv(x, 128, 1, pads=0))
    sums = n.op("Add", n.conv(x, 128, kernel, pads=kernel // 2), beside)
    joined = n.op("Concat", n.op("Relu", n.conv(x, 64, 3)), sums, attrs=ConcatAttrs(1))
    return n.done(n.conv(joined, 64, 3), n.conv(sums, 8, 1, pads=0))


def pitched(program: Program) -> list[CudaStep]:
    """The convolutions that write a part of a wider tensor."""
    found = [parse(s, program) for s in program.steps if s.params["op"]["kind"] == "Conv"]
    return [s for s in found if s.meaning.writes[0] is not None and s.meaning.writes[0].strides[-1] == 192]


def only(wanted: Callable[[Any], bool], choice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes builds use configuration number ``choice`` of the wanted ones; if there are none, the first of all."""
    every = hopper_launch.ranked

    def ranked(problem: Problem, gpu: Any) -> tuple[Offer, ...]:
        found = every(problem, gpu)
        some = [o for o in found if problem.pitches[0] and wanted(o.config)]
        return (some[choice % len(some)],) if some else found

    monkeypatch.setattr(hopper_launch, "ranked", ranked)


def test_blocks_that_share_k_write_into_joint_buffers() -> None:
    steps = pitched(lowered(skip_net()))
    assert len(steps) == 2
    pitches = [struct.unpack_from("<2i", s.launch.parameters, PITCHES) for s in steps]  # type: ignore[union-attr]
    assert sorted(pitches) == [(192, 64), (192, 128)]
    assert any("k" in s.tactic for s in steps)


@pytest.mark.hopper
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("choice", range(4))
@pytest.mark.parametrize("split", [False, True])
def test_on_a_gpu_they_agree_with_their_meaning(
    split: bool, choice: int, kernel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(lambda c: c.stores_directly and (c.split > 1) == split, choice, monkeypatch)
    graph = skip_net(kernel)
    program = lowered(graph, target="cuda:sm_90a")
    assert pitched(program)
    checked_program(program, feeds_of(graph), 4e-3)
