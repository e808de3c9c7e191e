"""16-bit products whose results are fp32: the tiles that run them, under NVRTC, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.one_config import only_of
from support.spills import check_spills
from support.sweep import every

from optdnn.ir.graph import Graph
from optdnn.kernels.conv import configs
from optdnn.kernels.conv import implicit_gemm as gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.kernels.gemm.normed import NormedGemm
from optdnn.ops.norm import LayerNormAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch

HEAD = Problem(512, 32000, (Source(1, 1, 1024),), (("bias",),), "float16", "float32")
SMALL = (
    Config(1, 1, 1, 64, 3, direct=True), Config(2, 1, 1, 128, 3, direct=True), Config(1, 1, 1, 32, 2, split=2),
    Config(1, 2, 1, 40, 2, split=2),
)  # fmt: skip
LARGE = (
    Config(2, 1, 1, 176, 4, direct=True), Config(2, 1, 1, 208, 3, direct=True), Config(1, 2, 1, 160, 4, direct=True),
    Config(1, 2, 2, 104, 3, direct=True), Config(1, 1, 2, 112, 2, split=2),
)  # fmt: skip
"""Tiles whose accumulators leave no registers for the addresses of results."""


def test_large_tiles_are_stored_after_the_last_product() -> None:
    for config in LARGE:
        assert gemm.late(HEAD, config)
        assert gemm.refuse(HEAD, config) is None
        if config.split == 1:
            assert "accumulators and addresses exceed" in str(
                gemm.refuse(replace(HEAD, out="float16"), replace(config, stages=2))
            )
    assert not any(gemm.late(HEAD, config) for config in SMALL)


def test_large_tiles_are_chosen_for_many_rows() -> None:
    best = configs.candidates(replace(HEAD, batch=2048), of_arch("sm_90a"))[0]
    assert gemm.late(HEAD, best)


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", every(2, [*SMALL, *LARGE]), ids=str)
def test_they_compile_without_spills(config: Config) -> None:
    problem = replace(HEAD, epilogue=(("bias",), ("gelu",)))
    check_spills(gemm.recipe(problem, config), gemm.FUNCTION)


# ---------------------------------------------------------------- on a GPU


def product(rows: int, depth: int, columns: int, *, norm: bool = False) -> Graph:
    n = Net()
    x = n.op("Relu", n.gemm(n.input(rows, 64), depth))
    if norm:
        x = n.op(
            "LayerNormalization",
            n.op("Add", x, n.gemm(x, depth)),
            n.random(depth),
            n.random(depth),
            attrs=LayerNormAttrs(),
        )
    return n.done(n.op("Relu", n.gemm(x, columns)))


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("config", [*SMALL, *LARGE], ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_each_configuration_on_a_gpu(
    norm: bool, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tactic = NormedGemm if norm else HopperGemm
    monkeypatch.setattr(tactic, "defer", lambda self, b, op: None)
    only_of(monkeypatch, tactic, config)
    assert checked_launches(product(333, 512, 1000, norm=norm), precision, 3e-2 if precision == "bf16" else 0.0)


@pytest.mark.hopper
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_on_a_gpu(rows: int) -> None:
    assert checked_launches(product(rows, 1024, 1000), "fp16")


@pytest.mark.hopper
@pytest.mark.parametrize("rows", [1, 40, 3000])
def test_norms_on_a_gpu(rows: int) -> None:
    n = Net()
    x = n.op("Relu", n.input(rows, 768))
    y = n.op("LayerNormalization", x, n.random(768), n.random(768), attrs=LayerNormAttrs())
    assert checked_launches(n.done(y), "fp16")
