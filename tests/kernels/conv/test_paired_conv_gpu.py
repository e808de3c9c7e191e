"""Gates of convolutions on a GPU: each kind of configuration does what its step means; nothing is left out or written outside."""

from __future__ import annotations

import pytest
from kernels.conv.test_paired_conv import NETS, gate  # type: ignore[import-not-found]
from support.net import Net
from support.on_gpu import checked_launches
from support.one_config import CONFIGS, STORED, only_of

from optdnn.ir.graph import Value
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.paired import PairedConv, PairedParts

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "tf32": 4e-3, "fp32": 4e-6}

pytestmark = pytest.mark.hopper


def large(n: Net) -> Value:
    """More tiles than multiprocessors, and a last tile that is cut."""
    x, m = n.input(2, 72, 9001), n.input(2, 40, 9001, name="m")
    return gate(n, n.op("Add", n.conv(x, 272, 3, pads=2, dilations=2, bias=True), n.conv(m, 272, 1, pads=0)))


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("config", [*CONFIGS, *STORED], ids=str)
@pytest.mark.parametrize("name", [*NETS, "large"])
def test_each_configuration(name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, PairedParts if precision == "fp32" else PairedConv, config)
    n = Net()
    graph = n.done({**NETS, "large": large}[name](n))
    found = checked_launches(graph, precision, TOLERANCE[precision])
    assert "PairedConv" in {e.kind for e in found}
