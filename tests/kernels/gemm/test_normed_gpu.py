"""Products of normalized rows on a GPU: each kind of configuration agrees with its meaning and writes all results, and nothing
else."""

from __future__ import annotations

import pytest
from kernels.gemm.test_normed import NETS, _norm  # type: ignore[import-not-found]
from kernels.gemm.test_normed_residual import NETS as RESIDUALS  # type: ignore[import-not-found]
from support.net import Net, built
from support.on_gpu import checked_program
from support.one_config import only
from support.simulated import TOLERANCE, feeds_of, lowered

from optdnn.ir.graph import Value
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.gemm.normed import NormedGemm, NormedPair
from optdnn.kernels.gemm.normed_residual import NormedResidualGemm

CONFIGS = (
    Config(1, 1, 1, 40, 3), Config(2, 1, 1, 64, 2, out_buffers=2), Config(1, 1, 2, 48, 2), Config(1, 1, 1, 104, 3, alternate=True),
    Config(1, 1, 1, 24, 2, direct=True), Config(1, 1, 1, 32, 2, split=2), Config(1, 2, 1, 40, 2, split=2), Config(2, 1, 1, 248, 2),
    Config(1, 2, 1, 32, 2), Config(1, 1, 1, 128, 2, share=(2, 1)), Config(1, 1, 1, 64, 2, share=(1, 2)),
    Config(1, 1, 2, 136, 2, alternate=True), Config(2, 1, 1, 40, 2, direct=True),
)  # fmt: skip

pytestmark = pytest.mark.hopper


def large_residual(n: Net) -> Value:
    """Large products that compute moments and add normalized rows."""
    rows = n.op("MatMul", n.input(3001, 64), n.random(64, 1024))
    for _ in range(2):
        normed = _norm(n, rows, 1024)
        rows = n.op(
            "Add",
            n.op("MatMul", n.op("Relu", n.op("MatMul", normed, n.random(1024, 128))), n.random(128, 1024)),
            normed,
        )
    return rows


def large(n: Net) -> Value:
    """More tiles than multiprocessors, several per block, and an incomplete last tile."""
    x = n.input(3001, 64)
    y = n.op("Add", n.op("MatMul", x, n.random(64, 1024)), n.op("MatMul", x, n.random(64, 1024)))
    return n.op("MatMul", _norm(n, y, 1024), n.random(1024, 1000))


ALL = {**NETS, **RESIDUALS, "large": large, "large_residual": large_residual}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_each_configuration(name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tactic in (NormedGemm, NormedPair, NormedResidualGemm):
        monkeypatch.setattr(tactic, "defer", lambda self, b, op: None)
    only(monkeypatch, config)
    graph = built(ALL[name])
    program = lowered(graph, precision, target="cuda:sm_90a")
    assert name not in (*RESIDUALS, "large_residual") or "gemm_normed_residual_sm90" in str(program.meta["tactics"])
    found = checked_program(program, feeds_of(graph), TOLERANCE[precision])
    assert {"RowMoments", "NormedProduct", "NormedResidual"} & {e.kind for e in found}
