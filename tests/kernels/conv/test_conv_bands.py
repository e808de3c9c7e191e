"""Grouped convolutions as bands of Hopper's implicit GEMM: results, the number of groups multiplied together, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.grouped_nets import grouped
from support.net import Net
from support.on_gpu import launch_errors
from support.simulated import check_simulated, lowered
from support.spills import check_spills

from optdnn.errors import InternalError
from optdnn.kernels.conv import configs, hopper_launch
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import patch_kernel as conv_patch
from optdnn.kernels.conv.general import BandedConv, banded, groups_together
from optdnn.kernels.conv.grouped import GroupedConv
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.lowering.choose import TacticChoice
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch


def tactic_of(program: Any) -> Any:
    """The tactic row of the second convolution."""
    return [t for t in program.meta["tactics"] if t["kind"] == "Conv"][1]


@pytest.mark.parametrize(
    ("groups", "channels", "together"),
    [(32, 4, 16), (32, 8, 8), (32, 32, 2), (2, 64, 1), (2, 128, 1), (2, 48, 2), (13, 8, 13), (6, 32, 2), (4, 2, 4)],
)
def test_the_fewest_groups_that_fill_tiles_are_a_band(groups: int, channels: int, together: int) -> None:
    assert groups_together(groups, channels) == together


def test_weights_of_bands_have_zeros_between_their_groups() -> None:
    weight = np.arange(8 * 3, dtype=np.float32).reshape(8, 3, 1, 1) + 1
    made = banded(weight, 4, 2)
    assert made.shape == (8, 6, 1, 1)
    assert made.dtype == weight.dtype
    for group in range(4):
        rows, at = slice(2 * group, 2 * group + 2), 3 * (group % 2)
        np.testing.assert_array_equal(made[rows, at : at + 3], weight[rows])
        assert not np.delete(made[rows], range(at, at + 3), axis=1).any()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize(
    ("graph", "bands"),
    [
        (lambda: grouped(128, 128, 32), 2),
        (lambda: grouped(128, 128, 32, strides=2), 2),
        (lambda: grouped(256, 128, 8, dilations=2), 2),
        (lambda: grouped(64, 192, 4, kernel=1), 1),
        (lambda: grouped(128, 128, 2, kernel=1, residual=True), 2),
        (lambda: grouped(104, 104, 13, residual=True), 1),
        (lambda: grouped(64, 128, 64), 2),
        (lambda: grouped(128, 128, 4, axes=1), 2),
    ],
)
def test_bands_compute_groups(graph: Any, bands: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BandedConv, "defer", lambda *given: None)
    monkeypatch.setattr(GroupedConv, "refuse", lambda *given: "bands are asked for")
    program = check_simulated(graph(), precision)
    row = tactic_of(program)
    assert row["tactic"] == "conv_bands_sm90"
    groups = {s.params["op"]["attrs"]["group"] for s in program.steps if s.params["op"]["kind"] == "Conv"}
    assert groups == {1, bands}


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (lambda: grouped(64, 64, 1), "one group"),
        (lambda: grouped(64, 64, 64), None),
        (lambda: grouped(20, 128, 2), "16 bytes"),
    ],
)
def test_refusals(graph: Any, why: str | None) -> None:
    row = tactic_of(check_simulated(graph(), "fp16"))
    assert row["tactic"] != "conv_bands_sm90"
    if why is not None:
        assert any(r["tactic"] == "conv_bands_sm90" and why in r["reason"] for r in row["refused"]), row["refused"]


def test_zeros_that_cost_more_than_they_save_are_left_to_the_kernel_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GroupedConv, "refuse", lambda *given: "others are asked")
    graph = grouped(672, 672, 42, size=(7, 7), batch=16)
    row = tactic_of(lowered(graph, "fp16"))
    assert row["tactic"] == "conv_sm80"
    assert any(r["tactic"] == "conv_bands_sm90" and "predicted" in r["reason"] for r in row["refused"])


def test_groups_too_wide_for_the_narrow_kernel_may_have_means() -> None:
    """The narrow kernel is asked for the means before it refuses."""
    n = Net()
    y = n.op("Relu", n.conv(n.op("Relu", n.conv(n.input(1, 8, 14, 14), 768, 1, pads=0)), 768, group=4, bias=True))
    gated = n.op("Mul", y, n.op("Sigmoid", n.op("GlobalAveragePool", y)))
    row = tactic_of(lowered(n.done(n.conv(gated, 16, 1, pads=0)), "fp16"))
    reasons = {r["tactic"]: r["reason"] for r in row["refused"]}
    assert reasons[GroupedConv.name] == "no tile of the kernel fits it"


def test_a_narrow_kernel_adds_nothing() -> None:
    row = tactic_of(lowered(grouped(64, 64, 8, residual=True), "fp16"))
    reasons = {r["tactic"]: r["reason"] for r in row["refused"]}
    assert reasons[GroupedConv.name] == "its epilogue adds a residual"


PROBLEM = Problem(4, 256, (Source(14, 14, 64, (3, 3), (1, 1), (1, 1, 1, 1)),), bands=4)


def test_blocks_take_channels_of_one_band_alone() -> None:
    found = [*configs.candidates(PROBLEM, of_arch("sm_90a")), *conv_patch.candidates(PROBLEM, of_arch("sm_90a"))]
    assert found
    for config in found:
        tile = config.tile[0] if isinstance(config, conv.Config) else config.wgm * 64
        assert PROBLEM.band_channels % tile == 0
    assert "band of 64" in str(conv.refuse(PROBLEM, conv.Config(2, 1, 1, 64, 4)))
    assert "same pixels" in str(conv.refuse(replace(PROBLEM, channels=512), conv.Config(1, 1, 1, 64, 4, share=(2, 1))))
    assert "band of 64" in str(conv_patch.refuse(PROBLEM, conv_patch.PatchConfig(2, 1, 7, 14, 2)))


def test_bands_are_equal_parts_of_one_source() -> None:
    with pytest.raises(InternalError, match="equal parts"):
        replace(PROBLEM, channels=248, bands=3)
    with pytest.raises(InternalError, match="equal parts"):
        replace(PROBLEM, sources=PROBLEM.sources * 2)


@pytest.mark.parametrize("kind", ["implicit GEMM", "patches"])
@pytest.mark.nvrtc
def test_kernels_compile_without_spills(kind: str) -> None:
    module: Any = conv if kind == "implicit GEMM" else conv_patch
    config = (configs.candidates if module is conv else conv_patch.candidates)(PROBLEM, of_arch("sm_90a"))[0]
    check_spills(module.recipe(PROBLEM, config))


@pytest.mark.nvrtc
def test_a_filter_of_many_taps_compiles() -> None:
    """The position embedding of wav2vec 2.0: 128 taps in a row. ptxas takes minutes if all of them are unrolled."""
    problem = Problem(16, 768, (Source(1, 49, 64, (1, 128), (1, 1), (0, 64, 0, 63)),), (("bias",),), bands=12)
    config = conv_patch.PatchConfig.read("patch1x2t1x50s2r13o2b1")
    assert config is not None
    (kernel,) = nvrtc.resources(conv_patch.recipe(problem, config)).values()
    assert kernel.spill_bytes == 0


@pytest.mark.hopper
@pytest.mark.parametrize(("strides", "kernel"), [(1, 3), (2, 3), (1, 1)])
def test_every_kind_of_configuration_on_a_gpu_agrees_with_its_meaning(strides: int, kernel: int) -> None:
    graph = grouped(256, 256, 32, kernel, (14, 15), strides=strides, residual=True, batch=3)
    plain = lowered(graph, "fp16", "cuda:sm_90a")
    (key,) = [t["signature"] for t in plain.meta["tactics"] if t["kind"] == "Conv"][1:2]
    height, width = -(-14 // strides), -(-15 // strides)
    source = Source(14, 15, 64, (kernel, kernel), (strides, strides), (kernel // 2,) * 4)
    problem = Problem(3, 256, (source,), (("bias",), ("add",), ("relu",)), bands=4)
    assert problem.out_size == (height, width)
    offers = hopper_launch.ranked(problem, of_arch("sm_90a"))
    for offer in [*offers[:3], *offers[3 :: max(1, len(offers) // 12)]]:
        program = lowered(graph, "fp16", "cuda:sm_90a", choices={key: TacticChoice("conv_bands_sm90", offer.name)})
        assert tactic_of(program)["config"] == offer.name
        assert max(launch_errors(program, graph, "Conv")) < 2e-3, offer.name
