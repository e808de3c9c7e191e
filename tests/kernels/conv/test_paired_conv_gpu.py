"""Gates of convolutions on a GPU: each kind of configuration does what its step means; nothing is left out or written outside."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.conv.test_paired_conv import NETS, gate  # type: ignore[import-not-found]
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Value
from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.paired import PairedConv
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}
CONFIGS = (
    Config(1, 1, 1, 40, 3), Config(2, 1, 1, 64, 2), Config(1, 1, 2, 48, 2), Config(1, 1, 1, 104, 3, alternate=True),
    Config(1, 1, 1, 24, 2, direct=True), Config(1, 1, 1, 32, 2, split=2), Config(2, 1, 1, 256, 2), Config(1, 2, 1, 32, 2),
    Config(1, 1, 1, 128, 2, share=(2, 1)), Config(1, 1, 1, 64, 2, stationary=True), Config(1, 1, 1, 64, 3, stream=True),
)  # fmt: skip

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


def large(n: Net) -> Value:
    """More tiles than multiprocessors, and a last tile that is cut."""
    x, m = n.input(2, 72, 9001), n.input(2, 40, 9001, name="m")
    return gate(n, n.op("Add", n.conv(x, 272, 3, pads=2, dilations=2, bias=True), n.conv(m, 272, 1, pads=0)))


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", [*NETS, "large"])
def test_each_configuration(name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairedConv, "defer", lambda self, b, op: None)
    offers = PairedConv.configs

    def only(self: PairedConv, b: Any, op: Any) -> list[Offer]:
        problem = self.problem(b, op)
        if (why := implicit_gemm.refuse(problem, config)) is not None or (config.stores_directly and not problem.dense):
            pytest.skip(why or "it stores rows without gaps")
        assert offers(self, b, op)
        return [Offer(config, 1e-6)]

    monkeypatch.setattr(PairedConv, "configs", only)
    n = Net()
    graph = n.done({**NETS, "large": large}[name](n))
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert "PairedConv" in {e.kind for e in found}
    assert not [e for e in found if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
