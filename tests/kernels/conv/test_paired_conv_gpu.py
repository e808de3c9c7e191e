"""Gates of convolutions on a GPU: each kind of configuration agrees with its meaning and writes all results, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.conv.test_paired_conv import NETS, gate  # type: ignore[import-not-found]
from support.needs import why_no_hopper
from support.net import Net
from support.one_config import CONFIGS, STORED, only_of
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Value
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.paired import PairedConv, PairedParts
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "tf32": 4e-3, "fp32": 4e-6}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


def large(n: Net) -> Value:
    """More tiles than multiprocessors, and an incomplete last tile."""
    x, m = n.input(2, 72, 9001), n.input(2, 40, 9001, name="m")
    return gate(n, n.op("Add", n.conv(x, 272, 3, pads=2, dilations=2, bias=True), n.conv(m, 272, 1, pads=0)))


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("config", [*CONFIGS, *STORED], ids=str)
@pytest.mark.parametrize("name", [*NETS, "large"])
def test_each_configuration(name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, PairedParts if precision == "fp32" else PairedConv, config)
    n = Net()
    graph = n.done({**NETS, "large": large}[name](n))
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert "PairedConv" in {e.kind for e in found}
    assert not [e for e in found if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
