"""Convolutions of few channels, without groups, on the kernel of narrow groups: when the tactic takes them, and each configuration on a
GPU. The kernel itself: test_tile_walk.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import launch_errors
from support.simulated import check_simulated, lowered
from support.sweep import turns

from optdnn.ir.graph import Graph
from optdnn.kernels.conv import grouped_kernel
from optdnn.kernels.conv.narrow import NarrowConv
from optdnn.kernels.launch import Launch
from optdnn.lowering.choose import TacticChoice
from optdnn.runtime.cuda.device import facts_for
from optdnn.target_name import TargetName


def net(
    channels: int, results: int, *, size: int = 20, kernel: int = 3, strides: int = 1, act: str = "Relu", residual: bool = False,
    dtype: Any = np.float32, group: int = 1,
) -> Graph:  # fmt: skip
    """A convolution with bias and activation, and optionally a residual, between others."""
    n = Net(dtype)
    x = n.op("Relu", n.conv(n.input(2, 8, size, size + 1), channels, 1, pads=0))
    y = n.conv(x, results, kernel, pads=kernel // 2, strides=strides, bias=True, group=group)
    y = n.op("Mul", y, n.op("Sigmoid", y)) if act == "SiLU" else n.op(act, y)
    y = n.op("Add", y, x) if residual else y
    return n.done(n.op("Relu", n.conv(y, 64, 1, pads=0)), y)


CASES: dict[str, Graph] = {
    "16 to 16": net(16, 16),
    "24 to 24, SiLU and residual": net(24, 24, act="SiLU", residual=True),
    "16 to 32, stride 2": net(16, 32, strides=2),
    "18 to 18, residual": net(18, 18, residual=True),
    "8 to 16, 5x5": net(8, 16, kernel=5),
    "13 to 16": net(13, 16),
}


def rows_of(program: Any) -> dict[str, Any]:
    """The row of the report of the convolution that is meant."""
    (row,) = [t for t in program.meta["tactics"] if "Conv_2" in t["nodes"] or "Conv_3" in t["nodes"]][:1]
    return dict(row)


@pytest.mark.parametrize(("name", "precision"), turns(CASES, "fp16", "bf16"))
def test_the_launch_means_the_convolution(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NarrowConv, "defer", lambda *given: None)
    assert rows_of(check_simulated(CASES[name], precision))["tactic"] == NarrowConv.name


@pytest.mark.parametrize("channels", [5, 18])
def test_channels_beyond_the_last_are_zeros(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels begin at multiples of 16 bytes. What lies between them may be NaN, so the tensor map must end at the last channel."""
    made: list[Launch] = []
    launch = grouped_kernel.launch
    monkeypatch.setattr(grouped_kernel, "launch", lambda *given: made.append(launch(*given)) or made[-1])
    monkeypatch.setattr(NarrowConv, "defer", lambda *given: None)
    lowered(net(channels, 16), "fp16")
    (shape,) = [m.shape for m in made[0].maps if m.operand == "input"]
    assert (shape[0], made[0].maps[0].box[0] % 8) == (channels, 0)


def test_the_cost_model_decides() -> None:
    """16 channels in and out take it; with 64 out, wgmma's tiles are full."""
    assert rows_of(lowered(net(16, 16, size=160), "fp16"))["tactic"] == NarrowConv.name
    row = rows_of(lowered(net(32, 64, size=56, strides=2), "fp16"))
    assert row["tactic"] == "conv_sm90"
    assert any(r["tactic"] == NarrowConv.name and "predicted to be as fast" in r["reason"] for r in row["refused"])


@pytest.mark.parametrize(
    ("graph", "precision", "reason"),
    [
        (net(16, 16, group=2), "fp16", "it has 2 groups"),
        (net(128, 16), "fp16", "5 to 48 channels in, and to 64 out: not 128 and 16"),
        (net(16, 4), "fp16", "not 16 and 4"),
        (net(16, 16, kernel=1), "fp16", "a filter of one tap"),
        (net(16, 16), "fp32", "16-bit floats"),
        (net(16, 16, kernel=15), "fp16", "no tile of the kernel fits it"),
    ],
)
def test_refused(graph: Graph, precision: str, reason: str) -> None:
    row = rows_of(lowered(graph, precision))
    assert row["tactic"] != NarrowConv.name
    assert any(r["tactic"] == NarrowConv.name and reason in r["reason"] for r in row["refused"])


def test_two_convolutions_that_are_added_stay_one_launch() -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 8, 40, 40), 16, 1, pads=0))
    y = n.op("Relu", n.conv(x, 16, 3, strides=2))
    y = n.op("Relu", n.op("Add", n.conv(y, 16, 3), n.conv(x, 16, 1, pads=0, strides=2)))
    program = lowered(n.done(n.conv(y, 64, 1, pads=0)), "fp16")
    reasons = [
        r["reason"] for t in program.meta["tactics"] for r in t.get("refused", []) if r["tactic"] == NarrowConv.name
    ]
    assert any("the convolution that it adds in the same launch" in reason for reason in reasons)


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_every_configuration_on_a_gpu_agrees_with_its_meaning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, facts = CASES[name], facts_for(TargetName.parse("cuda:sm_90a"))
    problems: list[Any] = []
    offers = NarrowConv.offers
    monkeypatch.setattr(NarrowConv, "defer", lambda *given: None)
    monkeypatch.setattr(NarrowConv, "offers", lambda self, p, gpu: (problems.append(p), offers(self, p, gpu))[1])
    key = rows_of(lowered(graph, "fp16", "cuda:sm_90a"))["signature"]
    meant = next(p for p in problems if p.epilogue[1:])
    for offer in offers(NarrowConv(), meant, facts):
        program = lowered(graph, "fp16", "cuda:sm_90a", choices={key: TacticChoice(NarrowConv.name, offer.name)})
        assert max(launch_errors(program, graph, "Conv")) < 2e-3, offer.name
