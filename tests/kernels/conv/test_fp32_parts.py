"""fp32 in parts on Hopper's tensor cores: where it is used, refusals, and each kind of configuration on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.one_config import only_of
from support.simulated import check_simulated, feeds_of, lowered, refusals, tactics

from optdnn.ir.evaluate import evaluate, promote, promoted_feeds
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import configs
from optdnn.kernels.conv import implicit_gemm as gemm
from optdnn.kernels.conv import patch_kernel as patch
from optdnn.kernels.conv.hopper_launch import in_one_order, ranked
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.parts import PartsConv, PartsGemm
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.engine import Engine

HOPPER = gpu_facts.of_arch("sm_90a")
CONFIGS = (
    Config(2, 1, 1, 96, 3, direct=True), Config(1, 2, 1, 96, 3, direct=True), Config(1, 1, 1, 96, 5, direct=True),
    Config(1, 1, 2, 48, 3, direct=True), Config(2, 1, 1, 64, 2, split=2), Config(1, 1, 1, 40, 2, split=3), Config(1, 2, 1, 32, 2, direct=True),
    Config(1, 1, 1, 8, 2, direct=True), Config(1, 1, 1, 24, 12, split=2),
)  # fmt: skip


def image(n: Net) -> Any:
    """A block of a residual network: strides, a downsampling convolution as a second source, and a dilated filter."""
    x = n.input(3, 40, 19, 17)
    y = n.op("Relu", n.conv(x, 72, 3, strides=2))
    y = n.conv(y, 136, 3, pads=2, dilations=2)
    y = n.op("Relu", n.op("Add", y, n.conv(x, 136, 1, pads=0, strides=2)))
    return n.op("Relu", n.op("Add", n.conv(y, 136, 1, pads=0), y))


def product(n: Net) -> Any:
    """Rows with a residual and an activation. The sizes are no multiples of a tile."""
    x = n.input(211, 264)
    y = n.op("Gelu", n.op("Add", n.op("MatMul", x, n.random(264, 520)), n.random(520)))
    return n.op("Add", n.op("MatMul", y, n.random(520, 264)), x)


def deep(n: Net) -> Any:
    """A long sum whose terms have one sign: adding them up loses nothing."""
    return n.op("MatMul", n.op("Abs", n.input(64, 8192)), n.op("Abs", n.random(8192, 64)))


NETS: dict[str, tuple[Callable[[Net], Any], Any]] = {
    "image": (image, PartsConv), "product": (product, PartsGemm), "deep": (deep, PartsGemm),
}  # fmt: skip


def made(name: str) -> Graph:
    n = Net()
    return n.done(NETS[name][0](n))


# ---------------------------------------------------------------- where it is taken


@pytest.mark.parametrize("name", NETS)
def test_fp32_on_hopper_is_multiplied_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NETS[name][1], "defer", lambda self, b, op: None)
    assert NETS[name][1].name in tactics(check_simulated(made(name), "fp32", target="cuda:sm_90a"))


@pytest.mark.parametrize(("target", "precision", "reason"), [
    ("cuda:sm_80", "fp32", "it needs Hopper's wgmma and TMA"),
    ("cuda:sm_90a", "tf32", "it multiplies fp32 in parts, not tfloat32"),
    ("cuda:sm_90a", "fp16", "it multiplies fp32 in parts, not float16"),
])  # fmt: skip
def test_elsewhere_it_refuses(target: str, precision: str, reason: str) -> None:
    program = lowered(made("product"), precision, target=target)
    refused = refusals(program, "gemm_parts_sm90")
    assert refused
    assert all(reason in r for r in refused)


@pytest.mark.parametrize(("channels", "kernel", "filters"), [(16, 1, 16), (17, 3, 16), (64, 1, 21)])
def test_scalar_units_go_first(channels: int, kernel: int, filters: int) -> None:
    """Other kernels are predicted to be faster if tiles are small, or if an operand or the result would be copied."""
    n = Net()
    x = n.conv(n.input(1, 16, 112, 112), channels, 1, pads=0)
    program = lowered(
        n.done(n.conv(x, filters, kernel, pads=kernel // 2)), "fp32", target="cuda:sm_90a", no_cubins=True
    )
    assert [t["tactic"] for t in program.meta["tactics"]][-1] == "conv_fp32"
    assert any("it is predicted to take" in r for r in refusals(program, "conv_parts_sm90"))


def test_a_copy_may_be_worth_it() -> None:
    n = Net()
    x = n.conv(n.input(4, 64, 56, 56), 256, 1, pads=0)
    program = lowered(n.done(n.conv(x, 250, 3)), "fp32", target="cuda:sm_90a")
    assert [t["tactic"] for t in program.meta["tactics"]][-1] == "conv_parts_sm90"


def rows(count: int, channels: int, depth: int) -> Problem:
    return Problem(count, channels, (Source(1, 1, depth, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),), dtype="float32")


@pytest.mark.parametrize(("config", "reason"), [
    (replace(CONFIGS[7], blocks=2), "each alone on its multiprocessor"),
    (replace(CONFIGS[0], direct=False), "fp32 results are stored from registers"),
    (replace(CONFIGS[0], share=(1, 2)), "each alone on its multiprocessor"),
    (replace(CONFIGS[0], bn=104), "three sets of 52 accumulators exceed the registers"),
    (replace(CONFIGS[0], stages=5), "shared memory"),
])  # fmt: skip
def test_tiles_that_do_not_suit_parts_are_refused(config: Config, reason: str) -> None:
    problem = rows(4096, 768, 768)
    assert gemm.refuse(problem, CONFIGS[0]) is None
    assert reason in (gemm.refuse(problem, config) or "")


def test_large_tiles_of_tf32_are_for_products() -> None:
    problem = Problem(
        32, 256, (Source(28, 28, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),), dtype="tfloat32", out="float32"
    )
    assert "made convolutions slower" in (gemm.refuse(problem, LARGE[0]) or "")
    assert gemm.refuse(problem, replace(LARGE[0], bn=96)) is None


def test_patches_are_not_divided() -> None:
    problem = Problem(4, 64, (Source(28, 28, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),), dtype="float32")
    assert "in parts" in (patch.refuse(problem, patch.candidates(replace(problem, dtype="float16"), HOPPER)[0]) or "")


def test_offers_are_such_that_run() -> None:
    for problem in (rows(4096, 768, 768), rows(100, 64, 32), rows(8, 2048, 4096)):
        offers = ranked(problem, HOPPER)
        assert offers
        assert all(gemm.refuse(problem, o.config, shared=HOPPER.shared_per_block) is None for o in offers)
        assert any(o.row_invariant for o in offers)
    assert in_one_order(CONFIGS[7], parts=True)
    assert not in_one_order(CONFIGS[4], parts=True)


def test_three_products_are_predicted_to_take_longer_than_one() -> None:
    exact, rounded = (
        configs.estimated(replace(rows(8192, 1024, 1024), dtype=d, out="float32"), HOPPER, 1)[0][0]
        for d in ("float32", "tfloat32")
    )
    assert 2 * rounded < exact < 6 * rounded


def test_functions_after_them_are_exact() -> None:
    made = gemm.recipe(replace(rows(4096, 768, 768), epilogue=(("bias",), ("gelu",))), CONFIGS[0])
    assert "erff" in made.generated["generated.cuh"]
    assert "--use_fast_math" not in made.options


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("config", "stage"),
    [*((c, "gelu") for c in CONFIGS), *((CONFIGS[0], s) for s in ("relu", "gelu_tanh", "silu"))],
    ids=str,
)
def test_they_compile_without_spills(config: Config, stage: str) -> None:
    problem = replace(rows(4096, 768, 2048), epilogue=(("bias",), ("add",), (stage,)))
    found = nvrtc.resources(gemm.recipe(problem, config))[gemm.FUNCTION]
    assert found.spill_bytes == found.stack_bytes == 0


LARGE = (
    Config(2, 1, 1, 192, 4, direct=True), Config(2, 1, 1, 224, 3, direct=True), Config(1, 2, 1, 160, 4, direct=True),
    Config(2, 1, 2, 96, 3, direct=True), Config(1, 1, 1, 160, 3, blocks=2, direct=True), Config(1, 1, 2, 112, 2, split=2),
)  # fmt: skip
"""Tiles of tf32 whose accumulators leave no registers for the addresses of results."""


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", LARGE, ids=str)
def test_large_tiles_of_tf32_compile_without_spills(config: Config) -> None:
    problem = replace(rows(4096, 768, 2048), dtype="tfloat32", out="float32", epilogue=(("bias",), ("add",), ("relu",)))
    assert gemm.late(problem, config)
    assert gemm.refuse(problem, config) is None
    found = nvrtc.resources(gemm.recipe(problem, config))[gemm.FUNCTION]
    assert found.spill_bytes == found.stack_bytes == 0


# ---------------------------------------------------------------- on a GPU

EXACT, ROUNDED = 2e-6, 1e-4


@pytest.mark.hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_each_configuration_on_a_gpu(name: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, NETS[name][1], config)
    assert checked_launches(made(name), "fp32", EXACT)


@pytest.mark.hopper
def test_sums_of_one_sign_have_a_small_bias_on_a_gpu() -> None:
    """An error that always has one sign adds up from layer to layer. On an H200 it is -2.8e-7 here; truncated first parts gave
    -5.5e-7, and -9.1e-7 with partial sums of 128."""
    graph = made("deep")
    context: Any = Engine(lowered(graph, "fp32", target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    (got,) = context.run(feeds).values()
    (want,) = evaluate(promote(graph), promoted_feeds(feeds)).values()
    assert abs(float(np.mean(got / want - 1))) < 4e-7


@pytest.mark.hopper
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none_on_a_gpu(value: float) -> None:
    graph = made("product")
    context: Any = Engine(lowered(graph, "fp32", target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    (x,) = feeds.values()
    x[3, 7] = value
    (got,) = context.run(feeds).values()
    assert not np.isfinite(got[3]).any()
    assert np.isfinite(got[:3]).all()
    assert np.isfinite(got[4:]).all()


@pytest.mark.hopper
@pytest.mark.parametrize("config", LARGE, ids=str)
def test_large_tiles_of_tf32_on_a_gpu(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, HopperGemm, config)
    assert checked_launches(made("product"), "tf32", ROUNDED)
