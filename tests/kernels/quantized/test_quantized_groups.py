"""Grouped convolutions on 8-bit numbers as bands of Hopper's implicit GEMM: the groups that are multiplied together, and the
tactics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.quantized.test_quantized import built  # type: ignore[import-not-found]
from support.quantized_nets import ADDED, NETS, QNet
from support.simulated import feeds_of
from support.spills import check_spills

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import configs, hopper_launch
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import patch_kernel as conv_patch
from optdnn.kernels.conv.general import banded, groups_together
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.quantized.general import BandedQuantizedConv
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.passes.assign_layout import AssignLayout
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.target_name import TargetName


@pytest.mark.parametrize(
    ("groups", "channels", "inside", "together"),
    [(32, 4, 4, 16), (32, 8, 8, 8), (3, 80, 80, 3), (8, 24, 24, 8), (2, 64, 10, 2), (4, 64, 8, 2), (16, 64, 4, 4), (2, 64, 16, 1)],
)  # fmt: skip
def test_bands_read_whole_16_bytes(groups: int, channels: int, inside: int, together: int) -> None:
    assert groups_together(groups, channels, inside, 16) == together


@pytest.mark.parametrize(
    ("name", "tactic", "bands"),
    [
        ("32 groups of 4", "conv_bands_sm90_8bit", 2),
        ("32 groups of 8, strided", "conv_bands_sm90_8bit", 4),
        ("3 groups", "conv_bands_sm90_8bit", 1),
        ("8 groups of 24", "conv_bands_sm90_8bit", 1),
        ("8 groups of 4, 16 filters each", "conv_bands_sm90_8bit", 2),
        ("groups over one axis", "conv_bands_sm90_8bit", 2),
        ("depthwise, odd channels", "conv_bands_sm90_8bit", 1),
        ("groups of an image", "conv_bands_sm90_8bit", 1),
        ("depthwise", "depthwise_8bit", None),
        ("a residual block", "conv_sm90_8bit", None),
    ],
)
def test_tactics_of_grouped_convolutions(
    name: str, tactic: str, bands: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BandedQuantizedConv, "defer", lambda *given: None)
    n = QNet()
    _, program = built(n.done(*NETS[name](n)))
    assert tactic in [t["tactic"] for t in program.meta["tactics"]]
    found = [s.params["op"]["attrs"]["group"] for s in program.steps if s.params["op"]["kind"] == "QuantizedConv"]
    assert bands is None or max(found) == bands


def test_zeros_between_groups_keep_sums_and_rows_of_weights_their_places() -> None:
    """Packed rows are permuted in blocks of sixteen. Bands have whole blocks."""
    problem = Problem(1, 128, (Source(8, 8, 64, (3, 3), (1, 1), (1, 1, 1, 1)),), dtype="int8", bands=2)
    weight = np.random.default_rng(0).integers(-127, 128, (128, 4, 3, 3)).astype(np.int8)
    wide = banded(weight, 32, 16)
    packed = conv_params.pack_weights(problem, [wide])
    assert packed.shape == (128, 9 * 64)
    for channel in (0, 1, 17, 64, 127):
        row = channel // 16 * 16 + channel % 16 // 2 + channel % 2 * 8
        taps = packed[row].reshape(3, 3, 64)
        at = channel // 4 % 16 * 4
        np.testing.assert_array_equal(taps[:, :, at : at + 4], weight[channel].transpose(1, 2, 0))
        assert not np.delete(taps, range(at, at + 4), axis=2).any()


@pytest.mark.parametrize(("group", "why"), [(1, "it has 1 groups"), (4, "steps of at most 8, not 9")])
def test_refusals(group: int, why: str) -> None:
    n = QNet()
    _, program = built(n.done(n.fake(n.qconv(n.fake(n.input(2, 16, 30, 30), 0.03), 64, stride=9, group=group), 0.04)))
    (row,) = [t for t in program.meta["tactics"] if t["tactic"] == "conv_sm80_8bit"]  # which supports any strides
    (reason,) = [r["reason"] for r in row["refused"] if r["tactic"] == "conv_bands_sm90_8bit"]
    assert why in reason


def test_zeros_that_cost_more_than_they_save_are_left_to_the_kernel_without_them() -> None:
    n = QNet()
    x = n.fake(n.input(32, 912, 14, 14), 0.03)
    _, program = built(n.done(n.fake(n.qconv(x, 912, group=38), 0.04)))
    (row,) = [t for t in program.meta["tactics"] if t["kind"] == "QuantizedConv"]
    assert row["tactic"] == "conv_sm80_8bit"
    assert any(r["tactic"] == "conv_bands_sm90_8bit" and "predicted" in r["reason"] for r in row["refused"]), row
    assert max(s.params["op"]["attrs"].get("group", 0) for s in program.steps) == 19  # pairs begin at 16 bytes
    n = QNet()
    graph = n.done(n.fake(n.qconv(n.fake(n.input(32, 256, 7, 7), 0.03), 256, group=64), 0.04))
    (row,) = [t for t in built(graph, "cuda:sm_90a")[1].meta["tactics"] if t["kind"] == "QuantizedConv"]
    assert row["tactic"] == "conv_bands_sm90_8bit"
    assert "Hopper's own kernel takes no more than 16 groups together, either" in [r["reason"] for r in row["refused"]]


PROBLEM = Problem(4, 256, (Source(14, 14, 64, (3, 3), (1, 1), (1, 1, 1, 1)),), dtype="int8", bands=4)


def test_blocks_take_channels_of_one_band_alone() -> None:
    found = [*configs.candidates(PROBLEM, of_arch("sm_90a")), *conv_patch.candidates(PROBLEM, of_arch("sm_90a"))]
    assert {type(c) for c in found} == {conv.Config, conv_patch.PatchConfig}
    for config in found:
        tile = config.tile[0] if isinstance(config, conv.Config) else config.wgm * 64
        assert PROBLEM.band_channels % tile == 0


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("module", [conv, conv_patch])
@pytest.mark.nvrtc
def test_kernels_compile_without_spills(module: Any, dtype: str) -> None:
    problem = Problem(4, 256, PROBLEM.sources, dtype=dtype, bands=4)
    config = (configs.candidates if module is conv else conv_patch.candidates)(problem, of_arch("sm_90a"))[0]
    check_spills(module.recipe(problem, config))


def net(kernel: int, stride: int, *, residual: bool) -> Graph:
    n = QNet()
    x = n.fake(n.input(3, 256, 14, 15), 0.03)
    more = {"epilogue": ADDED, "more": [n.fake(n.input(3, 256, 14, 15, name="r"), 0.04)]} if residual else {}
    return n.done(n.fake(n.qconv(x, 256, kernel, stride=stride, group=32, **more), 0.05))


@pytest.mark.hopper
@pytest.mark.parametrize(("kernel", "stride", "residual"), [(3, 1, True), (3, 1, False), (3, 2, False), (1, 1, True)])
def test_every_kind_of_configuration_on_a_gpu_is_exact(kernel: int, stride: int, residual: bool) -> None:
    options, graph = BuildOptions(target="cuda:sm_90a"), net(kernel, stride, residual=residual)
    for one in (FoldQuantized(), AssignLayout()):
        one(graph, PassContext(target=options.target))
    plain = lower_cuda(graph, options, facts_for(TargetName.parse(options.target)), {})
    (row,) = [t for t in plain.meta["tactics"] if t["kind"] == "QuantizedConv"]
    (op,) = graph.of_kind("QuantizedConv")
    source = Source(14, 15, 64, (kernel, kernel), (stride, stride), (kernel // 2,) * 4)
    problem = Problem(3, 256, (source,), tuple(op.attrs.stages), "int8", residual_dtype="int8" * residual, bands=4)
    offers = hopper_launch.ranked(problem, of_arch("sm_90a"))
    for offer in [*offers[:3], *offers[3 :: max(1, len(offers) // 12)]]:
        choices = {row["signature"]: TacticChoice("conv_bands_sm90_8bit", offer.name)}
        program = lower_cuda(
            graph, options, facts_for(TargetName.parse(options.target)), {}, prepared=Prepared(choices)
        )
        assert [t["config"] for t in program.meta["tactics"] if t["kind"] == "QuantizedConv"] == [offer.name]
        context: Any = CudaRunner(program, LoadOptions()).context()
        assert [e.error for e in check_steps(context, feeds_of(graph)) if e.kind == "QuantizedConv"] == [0.0], (
            offer.name
        )
