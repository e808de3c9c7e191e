"""fp32 in parts on Hopper's tensor cores: where it is used, refusals, and each kind of configuration on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net, built
from support.on_gpu import checked_launches
from support.one_config import only_of
from support.simulated import check_simulated, feeds_of, lowered, refusals, tactics
from support.spills import check_spills
from support.sweep import every

from optdnn.ir.evaluate import evaluate, promote, promoted_feeds
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import implicit_gemm as gemm
from optdnn.kernels.conv import parts_kernel
from optdnn.kernels.conv import patch_kernel as patch
from optdnn.kernels.conv.hopper_launch import in_one_order, ranked, read
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.parts import PartsConv, PartsGemm
from optdnn.kernels.conv.parts_kernel import PartsConfig, divided, input_shifts, kernel_order, selective
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.ops.conv import ConvAttrs
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.cuda.compile.nvrtc import KERNELS
from optdnn.runtime.engine import Engine

HOPPER = gpu_facts.of_arch("sm_90a")
CONFIGS = (
    PartsConfig(2, 1, 96, 3), PartsConfig(1, 2, 96, 3), PartsConfig(1, 1, 96, 5), PartsConfig(2, 1, 144, 4), PartsConfig(2, 1, 64, 3, 2),
    PartsConfig(1, 1, 40, 2, 3), PartsConfig(1, 2, 32, 2), PartsConfig(1, 1, 8, 2), PartsConfig(1, 1, 24, 12, 2), PartsConfig(2, 1, 104, 4, 4),
    PartsConfig(1, 1, 56, 4, 8), PartsConfig(1, 2, 128, 3),
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


def scaled(n: Net) -> Any:
    """Input channels whose weights are of very different sizes, in both sources of a sum."""
    x, rng, sizes = n.input(2, 40, 12, 12), np.random.default_rng(0), 10.0 ** np.linspace(-12, 3, 40)
    weights = [rng.standard_normal((72, 40, k, k)) * s[:, None, None] for k, s in ((3, sizes), (1, sizes[::-1]))]
    y, added = (
        n.op("Conv", x, n.const(w.astype(np.float32)), attrs=ConvAttrs((1, 1), (k, k, k, k), (1, 1)))
        for k, w in enumerate(weights[::-1])
    )
    return n.op("Relu", n.op("Add", y, added))


NETS: dict[str, tuple[Callable[[Net], Any], Any]] = {
    "image": (image, PartsConv), "product": (product, PartsGemm), "deep": (deep, PartsGemm), "scaled": (scaled, PartsConv),
}  # fmt: skip


def made(name: str) -> Graph:
    return built(NETS[name][0])


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


@pytest.mark.parametrize(("channels", "kernel", "filters"), [(24, 1, 20), (32, 1, 4), (64, 1, 21)])
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
    (replace(CONFIGS[0], columns=160), "not a tile of this kernel"),
    (replace(CONFIGS[1], columns=136), "not a tile of this kernel"),
    (replace(CONFIGS[0], pixel_groups=3), "not a tile of this kernel"),
    (replace(CONFIGS[0], stages=1), "a ring has 2 to 16 stages"),
    (replace(CONFIGS[0], stages=9), "shared memory"),
    (replace(CONFIGS[7], split=17), "K steps cannot be split 17 ways"),
])  # fmt: skip
def test_tiles_that_do_not_fit_are_refused(config: PartsConfig, reason: str) -> None:
    problem = rows(4096, 768, 768)
    assert parts_kernel.refuse(problem, CONFIGS[0]) is None
    assert reason in (parts_kernel.refuse(problem, config) or "")


@pytest.mark.parametrize(("problem", "reason"), [
    (replace(rows(64, 64, 64), dtype="tfloat32", out="float32"), "it multiplies fp32 in parts, not tfloat32"),
    (replace(rows(64, 64, 64), pooled=True), "no pooling or stacks"),
])  # fmt: skip
def test_other_problems_are_refused(problem: Problem, reason: str) -> None:
    assert reason in (parts_kernel.refuse(problem, CONFIGS[7]) or "")


def test_other_kernels_refuse_fp32() -> None:
    assert gemm.refuse(rows(64, 64, 64), Config(1, 1, 1, 64, 2, direct=True)) == "fp32 in parts has a kernel of its own"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_names_are_read(config: PartsConfig) -> None:
    assert read(str(config)) == config
    assert PartsConfig.read("parts01x1n8s2") is None


@pytest.mark.parametrize("block", [16, 32])
def test_parts_and_factors_give_the_weights(block: int) -> None:
    """To 22 bits, whatever the size of a channel's weights; each block in the kernel's order."""
    rng = np.random.default_rng(0)
    weights = (
        rng.standard_normal((12, 3 * block)).astype(np.float32) * np.float32(10.0) ** np.arange(-36, 36, 6)[:, None]
    )
    weights[3] = 0
    halves, factors = divided(weights.astype(np.float32), block)
    order = np.array(kernel_order(block))
    assert sorted(order) == list(range(block))
    first, rest = halves.reshape(2, 12, 3, block)[..., order].reshape(2, 12, -1).astype(np.float64)
    assert np.all(
        np.abs((first + rest) * factors[:, None] - weights)
        <= np.abs(weights) * 2.0**-22 + np.abs(weights).max(axis=1)[:, None] * 2.0**-38
    )
    assert np.all(np.frexp(factors)[0] == 0.5)
    largest = np.abs(first).max(axis=1)[weights.any(axis=1)]
    assert np.all((largest >= 2**14) & (largest <= 2**15))


def test_input_channels_of_one_size_have_no_scales() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((20, 12, 3, 3)).astype(np.float32)
    assert input_shifts(weights) is None
    assert input_shifts(np.zeros((4, 4), np.float32)) is None
    weights[:, 3] *= 2.0**-40
    weights[:, 5] *= 2.0**-90
    weights[:, 7], weights[:, 8, 0] = 0, np.inf
    found = input_shifts(weights)
    assert found is not None
    (shifts,) = found
    assert -42 <= shifts[3] <= -38
    assert shifts[5] == shifts[7] == -60, "the second is not read at all"
    assert shifts[8] == shifts.max() == 0
    assert np.delete(shifts, [3, 5, 7]).min() >= -2


def test_channels_that_ignore_inputs_are_found() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((64, 4608)).astype(np.float32)
    assert not selective(weights)
    weights[:, 5] = weights[3] = 0
    assert not selective(weights), "an input that no channel reads has a scale, and a channel of zeros needs no bits"
    weights[7, 100:200] = 0
    assert not selective(weights)
    weights[7, 200:260] = 1e-7
    assert selective(weights)
    assert selective(np.eye(8, dtype=np.float32))
    assert not selective(np.zeros((4, 4), np.float32))


def test_only_weights_that_ignore_inputs_look_for_uneven_pixels() -> None:
    dense = np.random.default_rng(0).standard_normal((128, 96)).astype(np.float32)
    for weights, looks in ((dense, 0), (np.eye(128, 96, dtype=np.float32), 1)):
        n = Net()
        program = lowered(n.done(n.op("MatMul", n.input(512, 128), n.const(weights))), "fp32", target="cuda:sm_90a")
        (kernel,) = program.kernels
        assert f"#define UNEVEN {looks}\n" in kernel.generated["generated.cuh"]


def test_weights_that_are_not_finite_stay_so() -> None:
    halves, factors = divided(
        np.array([[1, np.inf] + [0] * 14, [np.nan, 2] + [0] * 14, [3, 4] + [0] * 14], np.float32), 16
    )
    whole = halves.reshape(2, 3, 16).astype(np.float32).sum(axis=0) * factors[:, None]
    assert np.isnan(whole[:2]).sum(axis=1).tolist() == [1, 1]
    assert np.sort(whole[2])[-2:].tolist() == [3, 4]


def test_large_tiles_of_tf32_are_for_products() -> None:
    problem = Problem(
        32, 256, (Source(28, 28, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),), dtype="tfloat32", out="float32"
    )
    assert "made convolutions slower" in (gemm.refuse(problem, LARGE[0]) or "")
    assert gemm.refuse(problem, replace(LARGE[0], bn=96)) is None


def test_patches_are_not_divided() -> None:
    problem = Problem(4, 64, (Source(28, 28, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),), dtype="float32")
    assert "a kernel of its own" in (
        patch.refuse(problem, patch.candidates(replace(problem, dtype="float16"), HOPPER)[0]) or ""
    )


def test_offers_are_such_that_run() -> None:
    for problem in (rows(4096, 768, 768), rows(100, 64, 32), rows(8, 2048, 4096)):
        offers = ranked(problem, HOPPER)
        assert offers
        assert all(parts_kernel.refuse(problem, o.config, shared=HOPPER.shared_per_block) is None for o in offers)
        assert any(o.row_invariant for o in offers)
    assert in_one_order(CONFIGS[7])
    assert not in_one_order(CONFIGS[4])


def test_three_products_are_predicted_to_take_longer_than_one() -> None:
    exact, rounded = (
        ranked(replace(rows(8192, 1024, 1024), dtype=d, out="float32"), HOPPER)[0].predicted
        for d in ("float32", "tfloat32")
    )
    assert 1.2 * rounded < exact < 4 * rounded


def test_functions_after_them_are_exact() -> None:
    made = parts_kernel.recipe(replace(rows(4096, 768, 768), epilogue=(("bias",), ("gelu",))), CONFIGS[0])
    assert "erff" in made.generated["generated.cuh"]
    assert "--use_fast_math" not in made.options


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("config", "stage"),
    every(3, [*((c, "gelu") for c in CONFIGS), *((CONFIGS[0], s) for s in ("relu", "gelu_tanh", "silu"))]),
    ids=str,
)
def test_they_compile_without_spills(config: PartsConfig, stage: str) -> None:
    problem = replace(rows(4096, 768, 2048), epilogue=(("bias",), ("add",), (stage,)), selective=True, equalized=True)
    check_spills(parts_kernel.recipe(problem, config), parts_kernel.FUNCTION)


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
    check_spills(gemm.recipe(problem, config), gemm.FUNCTION)


# ---------------------------------------------------------------- on a GPU

EXACT, ROUNDED = 2e-6, 1e-4


@pytest.mark.hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_each_configuration_on_a_gpu(name: str, config: PartsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, NETS[name][1], config)
    assert checked_launches(made(name), "fp32", EXACT)


@pytest.mark.hopper
def test_sums_of_one_sign_have_a_small_bias_on_a_gpu() -> None:
    """An error that always has one sign adds up from layer to layer. On an H200 it is -8e-8 here."""
    graph = made("deep")
    context: Any = Engine(lowered(graph, "fp32", target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    (got,) = context.run(feeds).values()
    (want,) = evaluate(promote(graph), promoted_feeds(feeds)).values()
    assert abs(float(np.mean(got / want - 1))) < 2e-7


@pytest.mark.hopper
@pytest.mark.parametrize("powers", [(0, 0), (-6, 6), (0, 9), (-20, 20), (-3, 37.5)])
def test_a_large_number_costs_its_neighbors_no_precision_on_a_gpu(powers: tuple[float, float]) -> None:
    """Each result is one of the numbers: the others of its row, of any size, have the weight zero."""
    n = Net()
    rng = np.random.default_rng(0)
    graph = n.done(n.op("MatMul", n.input(70, 96), n.const(np.eye(96, dtype=np.float32)[:, rng.permutation(96)])))
    context: Any = Engine(lowered(graph, "fp32", target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    (x,) = feeds.values()
    x[:] = np.sign(x) * 10.0 ** rng.uniform(*powers, x.shape)
    (got,) = context.run(feeds).values()
    (want,) = evaluate(promote(graph), promoted_feeds(feeds)).values()
    np.testing.assert_allclose(got, want, rtol=1e-6)


def represented(values: Any, even: int) -> Any:
    """What the kernel multiplies of the numbers of a K step, in float64: parts, and parts of what these lack, until no number is below
    2^-even of the largest."""
    left, sums = values.astype(np.float64), np.zeros(len(values))
    while left.any():
        exponents = np.frexp(left)[1]
        scaled = np.ldexp(left, 15 - exponents[left != 0].max())
        first = scaled.astype(np.float16)
        parts = first + (scaled - first).astype(np.float16).astype(np.float64)
        sums += np.ldexp(parts, exponents[left != 0].max() - 15)
        if exponents[left != 0].min() >= exponents[left != 0].max() - even:
            break
        left = np.ldexp(scaled - parts, exponents[left != 0].max() - 15)
    return sums


def test_each_row_alone_takes_enough_products() -> None:
    """Rows do not take the further products of their neighbors: 2^-20 would leave errors of 1.8e-6."""
    (even,) = re.findall(r"constexpr int EVEN = (\d+);", (KERNELS / "conv/conv_parts_sm90.cu").read_text())
    rng = np.random.default_rng(0)
    for powers in ((0, 9), (-20, 20), (-3, 37.5)):
        for _ in range(400):
            values = (rng.choice([-1, 1], 32) * 10.0 ** rng.uniform(*powers, 32)).astype(np.float32)
            np.testing.assert_allclose(represented(values, int(even)), values, rtol=6e-7)


@pytest.mark.hopper
def test_uneven_rows_do_not_change_their_neighbors_on_a_gpu() -> None:
    """Warps vote to add what the parts of some row lack. Only the rows that lost bits take it."""
    n = Net()
    weights = np.where(np.eye(96, dtype=bool), 0, n.rng.standard_normal((96, 96)) * (n.rng.random((96, 96)) < 0.5))
    graph = n.done(n.op("MatMul", n.input(64, 96), n.const(weights)))
    context: Any = Engine(lowered(graph, "fp32", target="cuda:sm_90a", row_invariant=True)).context()
    feeds = feeds_of(graph)
    (x,) = feeds.values()
    x[:] = np.sign(x) * n.rng.uniform(0.5, 2, x.shape)
    (alone,) = ({k: v.copy() for k, v in context.run(feeds).items()}).values()
    x[5::16] *= 10.0 ** n.rng.uniform(-20, 20, x[5::16].shape)
    (beside,) = context.run(feeds).values()
    others = np.arange(64) % 16 != 5
    np.testing.assert_array_equal(beside[others], alone[others])
    assert not np.array_equal(beside, alone)


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
