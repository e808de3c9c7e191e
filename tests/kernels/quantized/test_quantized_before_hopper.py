"""8-bit convolutions and products before Hopper, and those that Hopper's own kernels do not support."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.check import from_text
from support.net import Net
from support.quantized_nets import NETS, QNet
from support.simulated import kinds, lowered, results_of, tactics

from optdnn.config import GPU_PRECISIONS, TARGETS, BuildOptions
from optdnn.ir.graph import Graph, Value
from optdnn.lowering.cuda import lower_cuda
from optdnn.ops.conv import ConvAttrs
from optdnn.passes.assign_layout import AssignLayout
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.passes.support.precision import multiplies
from optdnn.passes.support.precision_choices import choices
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def built(graph: Graph, target: str) -> Program:
    """The program of the network with its quantized products folded, without other passes."""
    copy = graph.copy()
    for one in (FoldQuantized(), AssignLayout()):
        one(copy, PassContext(target=target))
    program = lower_cuda(copy, BuildOptions(target=target, no_cubins=True), facts_for(TargetName.parse(target)), {})
    validate(program)
    return program


def exact(graph: Graph, program: Program) -> None:
    for got, want in results_of(program, graph):
        np.testing.assert_array_equal(got, want)


def fp8_network(n: QNet, x: Value) -> Value:
    """A convolution of fp8 with a result in fp8, dequantized."""
    w = n.const(n.rng.standard_normal((32, 16, 3, 3)).astype(FP8), FP8)
    y = n.op("Conv", x, n.dq(w, 0.1), attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1)))
    return n.fake(y, 0.02, None, FP8)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_chains_stay_in_8_bits(arch: str) -> None:
    n = QNet()
    graph = n.done(*NETS["a residual block"](n))
    program = built(graph, f"cuda:{arch}")
    assert tactics(program).count("conv_sm80_8bit") == 2
    assert [s.params["op"]["kind"] for s in program.steps].count("QuantizedConv") == 2
    exact(graph, program)


def test_a_stem_reads_four_blocks_of_pixels_together() -> None:
    n = QNet()
    graph = n.done(*NETS["a stem"](n))
    program = built(graph, "cuda:sm_80")
    assert [s.params["op"]["kind"] for s in program.steps][:2] == ["QuantizedBlocks", "QuantizedConv"]
    (weights,) = [b for b in program.buffers if b.blob is not None and b.name.endswith(".weights")]
    assert weights.shape == (16, 4, 64), "seven taps are four blocks, which make one K step"
    exact(graph, program)


INTEGERS = """<ir_version: 9, opset_import: ["": 18]> g (float[1,1,20,17] x) => (float[1,2,a,b] y)
    <float scale = {0.02}, int8 zero = {-3}, int8[2,1,3,3] w = {9,-8,7,-6,5,-4,3,-2,1,60,50,40,-30,-20,-10,11,12,13}> {
        q = QuantizeLinear(x, scale, zero)
        p = ConvInteger<pads = [1, 1, 1, 1], strides = [2, 2]>(q, w, zero)
        y = Cast<to = 1>(p)
    }"""


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_padding_that_is_not_the_zero_point_is_no_stem(target: str) -> None:
    """The zero point of ConvInteger is a constant that is subtracted, so its integers are padded with 0. Blocks would get -3."""
    graph = from_text(INTEGERS)
    program = lowered(graph, "fp32", target)
    assert "QuantizedBlocks" not in kinds(program)
    assert "QuantizedConv" in kinds(program)
    exact(graph, program)


@pytest.mark.parametrize(("channels", "group", "bands"), [(64, 16, 2), (64, 2, 2), (12, 3, 1), (96, 4, 2)])
def test_groups_are_multiplied_together_where_that_is_less_work(channels: int, group: int, bands: int) -> None:
    n = QNet()
    graph = n.done(n.fake(n.qconv(n.fake(n.input(2, channels, 9, 7), 0.03, 4), 2 * channels, group=group), 0.05))
    program = built(graph, "cuda:sm_80")
    assert tactics(program).count("conv_sm80_8bit") == 1
    found = [s.params["op"]["attrs"]["group"] for s in program.steps if s.params["op"]["kind"] == "QuantizedConv"]
    assert found == [bands]
    exact(graph, program)


def test_hopper_runs_strides_on_it_that_tma_has_not() -> None:
    n = QNet()
    graph = n.done(n.fake(n.qconv(n.fake(n.input(2, 16, 40, 30), 0.03), 32, stride=9), 0.05))
    program = built(graph, "cuda:sm_90a")
    assert tactics(program).count("conv_sm80_8bit") == 1
    exact(graph, program)


def test_hopper_runs_the_others_itself() -> None:
    n = QNet()
    y = n.fake(n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 32), 0.05)
    program = built(n.done(n.qmatmul(y, 24)), "cuda:sm_90a")
    for tactic in ("conv_sm90_8bit", "gemm_sm90_8bit"):
        (refused,) = [t["refused"] for t in program.meta["tactics"] if t["tactic"] == tactic]
        assert "Hopper's own kernel runs it" in [r["reason"] for r in refused]


def test_fp8_is_folded_where_tensor_cores_multiply_it() -> None:
    n = QNet()
    graph = n.done(fp8_network(n, n.fake(n.input(2, 16, 9, 7), 0.02, None, FP8)))
    kinds: dict[str, Any] = {}
    for arch in ("sm_86", "sm_89"):
        copy, target = graph.copy(), f"cuda:{arch}"
        report = FoldQuantized()(copy, PassContext(target=target))
        kinds[arch] = copy.kinds()
        program = built(graph, target)
        assert ("conv_sm80_8bit" in tactics(program)) == (arch == "sm_89")
        for got, want in results_of(program, graph):
            error = got.astype(np.float64) - want
            assert np.linalg.norm(error) < 0.02 * np.linalg.norm(want.astype(np.float64))
        reasons = [r.reason for r in report.refused]
        assert any("there are no kernels of fp8 for cuda:sm_86" in r for r in reasons) == (arch == "sm_86")
    assert "QuantizedConv" in kinds["sm_89"]
    assert "QuantizedConv" not in kinds["sm_86"]


def test_products_of_each_architecture() -> None:
    for target in TARGETS:
        arch = TargetName.parse(target).arch
        if ":" in target:
            assert {p for p in ("tf32", "int8", "fp8") if multiplies(target, p)} == GPU_PRECISIONS[arch]
    assert multiplies("simulate", "fp8")
    assert not multiplies("cpu", "int8")
    assert not multiplies("cuda:sm_70", "int8")
    n = Net()
    graph = n.done(n.conv(n.input(2, 16, 8, 8), 32))
    (choice,) = (c for c in choices(graph, "cuda:sm_86") if c.kind == "Conv")
    assert {"tf32", "int8"} <= set(choice.precisions)
    assert choice.refused["fp8"] == "there are no kernels of fp8 for sm_86"


@pytest.mark.parametrize(
    ("arch", "name"), [("sm_80", "a residual block"), ("sm_86", "zero points"), ("sm_89", "a stem")]
)
@pytest.mark.nvrtc
def test_programs_compile(arch: str, name: str) -> None:
    n = QNet()
    copy, target = n.done(*NETS[name](n)), f"cuda:{arch}"
    for one in (FoldQuantized(), AssignLayout()):
        one(copy, PassContext(target=target))
    program = lower_cuda(copy, BuildOptions(target=target), facts_for(TargetName.parse(target)), {})
    assert {k.arch for k in program.kernels} == {arch}
    assert any(k.template == "conv_sm80.cu" for k in program.kernels)
