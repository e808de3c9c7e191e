"""Gated linear units on a GPU: each kind of configuration does what its step means; nothing is left out or written outside."""

from __future__ import annotations

import pytest
from kernels.gemm.test_paired import NETS  # type: ignore[import-not-found]
from support.net import Net
from support.on_gpu import checked_launches
from support.one_config import CONFIGS, STORED, only_of

from optdnn.ir.graph import Value
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.gemm.paired import PairedGemm, PairedPartsGemm

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "tf32": 4e-3, "fp32": 4e-6}

pytestmark = pytest.mark.hopper


def large(n: Net) -> Value:
    """More tiles than multiprocessors, and a last tile that is cut."""
    x = n.input(3001, 200)
    return n.op("Mul", n.op("Swish", n.op("MatMul", x, n.random(200, 1000))), n.op("MatMul", x, n.random(200, 1000)))


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("config", [*CONFIGS, *STORED], ids=str)
@pytest.mark.parametrize("name", [*NETS, "large"])
def test_each_configuration(name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, PairedPartsGemm if precision == "fp32" else PairedGemm, config)
    n = Net()
    graph = n.done({**NETS, "large": large}[name](n))
    found = checked_launches(graph, precision, TOLERANCE[precision])
    assert "PairedProduct" in {e.kind for e in found}
