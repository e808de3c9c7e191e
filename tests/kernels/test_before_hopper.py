"""Kernels that need no feature of Hopper, on the architectures before it: they are chosen, compute the network, and fit a
block's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.quantized_nets import QNet, norm_network, shifted_depthwise
from support.sequence_cases import GROUP_NORM, group_norm, residual
from support.simulated import (
    check_exact,
    check_simulated,
    kinds,
    lowered,
    refusals,
    results_of,
    tactics,
)

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import depthwise, depthwise_8bit
from optdnn.kernels.conv import depthwise_tma_kernel as depthwise_tma
from optdnn.kernels.conv.depthwise_kernel import Problem
from optdnn.kernels.conv.problem import Source
from optdnn.lowering.cuda import lower_cuda
from optdnn.lowering.table import TACTICS
from optdnn.ops.norm import EpsilonAttrs, LayerNormAttrs
from optdnn.optimize import optimize
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Program

ARCHS = ("sm_80", "sm_86", "sm_89")


def reasons(program: Program) -> str:
    return "; ".join(refusals(program))


def launches_of(program: Program) -> list[Any]:
    return [parse(s, program).launch for s in program.steps]


def depthwise_net(squeeze: bool = False, **options: Any) -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 8, 12, 11), 16, 1, pads=0))
    y = n.op("Clip", n.conv(x, 16, group=16, bias=True, **options), 0.0, 1.5)
    if squeeze:
        y = n.op("Mul", y, n.op("Sigmoid", n.conv(n.op("GlobalAveragePool", y), 16, 1, pads=0, bias=True)))
    return n.done(n.conv(y, 8, 1, pads=0))


def rows_net(kind: str) -> Graph:
    n = Net()
    x = n.op(
        "LayerNormalization", n.matmul(n.input(2, 6, 32), 48), n.positive(48), n.random(48), attrs=LayerNormAttrs()
    )
    return n.done(n.op(kind, n.matmul(n.op("RMSNormalization", x, n.positive(48)), 40)))


NETS: dict[str, tuple[Callable[[], Graph], str]] = {
    "depthwise": (depthwise_net, "depthwise_tiles"),
    "depthwise 5x5, strided": (lambda: depthwise_net(kernel=5, pads=2, strides=2), "depthwise_tiles"),
    "squeeze and excitation": (lambda: depthwise_net(squeeze=True), "depthwise_tiles"),
    "norms and softmax": (lambda: rows_net("Softmax"), "rows_activated"),
    "log-softmax": (lambda: rows_net("LogSoftmax"), "rows_activated"),
    "a normalized sum": (residual, "add_norm"),
    **{name: GROUP_NORM[name] for name in ("groups", "instances", "odd groups")},
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", NETS)
def test_small_networks_run_on_them(name: str, arch: str) -> None:
    build, tactic = NETS[name]
    program = check_simulated(build(), "bf16" if arch == "sm_86" else "fp16", target=f"cuda:{arch}")
    assert tactic in set(tactics(program))
    assert not {"rows", "depthwise"} & set(tactics(program))
    assert {k.arch for k in program.kernels} == {arch}
    assert all("sm90" not in k.template for k in program.kernels)
    for launch in launches_of(program):
        assert launch.cluster == 1
        assert not launch.dependent, "programmatic dependent launch begins with Hopper"
        assert launch.shared <= gpu_facts.of_arch(arch).shared_per_block
    if name == "squeeze and excitation":
        assert "ConvSqueeze" in kinds(program)


def test_hoppers_launches_begin_early() -> None:
    assert all(launch.dependent for launch in launches_of(lowered(depthwise_net())))


def test_tma_feeds_no_configuration_before_hopper() -> None:
    problem = Problem(64, Source(56, 56, 144, (3, 3), (1, 1), (1, 1, 1, 1)))
    assert any(isinstance(c, depthwise_tma.Config) for _, c in depthwise.ranked(problem, of_arch("sm_90a")))
    for squeeze in (False, True):
        for arch in ARCHS:
            found = [o.config for o in depthwise._offers(replace(problem, squeeze=squeeze), of_arch(arch))]
            assert found
            assert not any(isinstance(c, depthwise_tma.Config) for c in found)


def test_images_that_do_not_fit_a_block_are_read_twice() -> None:
    n = Net()
    x = n.conv(n.input(1, 8, 40, 40), 64, 3)
    y = n.op("InstanceNormalization", x, n.positive(64), n.random(64), attrs=EpsilonAttrs(1e-3))
    small = n.done(n.conv(y, 8, 3))  # 26 KB for eight channels
    for arch in ARCHS:
        assert "group_norm" in set(tactics(lowered(small, target=f"cuda:{arch}")))
    n = Net()
    x = n.conv(n.input(1, 8, 88, 88), 16, 3)
    y = n.op("InstanceNormalization", x, n.positive(16), n.random(16), attrs=EpsilonAttrs(1e-3))
    large = n.done(n.conv(y, 8, 3))  # 124 KB: more than a block has, except on sm_80
    for arch in ARCHS:
        program = lowered(large, target=f"cuda:{arch}")
        assert "group_norm" in set(tactics(program))
        assert {"GroupMoments", "GroupApply"} <= set(kinds(program))
    check_simulated(large, target="cuda:sm_86")


@pytest.mark.parametrize("graph", [depthwise_net, group_norm, lambda: rows_net("Softmax")])
def test_architectures_that_nothing_is_compiled_for_are_refused(graph: Callable[[], Graph]) -> None:
    copy, options = graph().copy(), BuildOptions(target="cuda:sm_80", precision="fp16", no_cubins=True)
    optimize(copy, options, "cuda:sm_80")
    turing = replace(of_arch("sm_80"), capability=(7, 5))
    program = lower_cuda(copy, options, turing, {})
    assert not {"depthwise_tiles", "group_norm", "rows_once"} & set(tactics(program))
    assert f"it is compiled for {', '.join(gpu_facts.ARCHS)}, not sm_75" in reasons(program)


def quantized_program(graph: Graph, arch: str) -> Program:
    copy = graph.copy()
    FoldQuantized()(copy, PassContext(target="cuda:sm_90a"))
    program = lower_cuda(copy, BuildOptions(target=f"cuda:{arch}", no_cubins=True), of_arch(arch), {})
    validate(program)
    return program


@pytest.mark.parametrize("arch", ARCHS)
def test_norms_give_bytes(arch: str) -> None:
    graph = norm_network(np.dtype(np.int8))
    program = quantized_program(graph, arch)
    assert "rows_quantized" in set(tactics(program))
    for got, want in results_of(program, graph):
        assert (got != want).mean() < 0.01


def test_norms_give_fp8_from_sm_89_on() -> None:
    assert "rows_quantized" in tactics(quantized_program(norm_network(), "sm_89"))
    for arch in ("sm_80", "sm_86"):
        program = quantized_program(norm_network(), arch)
        assert "rows_quantized" not in set(tactics(program))
        assert f"instructions that round to fp8 begin with sm_89: {arch} has none" in reasons(program)


@pytest.fixture
def depthwise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the architecture's refusals of 8-bit products: the depthwise kernel depends only on its own requirements."""
    monkeypatch.setattr(depthwise_8bit, "refusal", lambda *given, **more: None)
    monkeypatch.setitem(TACTICS, "QuantizedConv", (depthwise_8bit.Int8Depthwise(),))


@pytest.mark.usefixtures("depthwise_alone")
@pytest.mark.parametrize("arch", [*ARCHS, "sm_90a"])
def test_8_bit_depthwise_convolutions_take_the_architectures_configurations(arch: str) -> None:
    n = QNet()
    x = n.fake(n.input(64, 144, 56, 56), 0.03)
    program = quantized_program(n.done(n.fake(n.qconv(x, 144, group=144), 0.05)), arch)
    assert "depthwise_8bit" in set(tactics(program))
    templates = {k.template for k in program.kernels}
    assert ("depthwise_sm90.cu" in templates) == (arch == "sm_90a")
    assert ("depthwise.cu" in templates) == (arch != "sm_90a")


@pytest.mark.usefixtures("depthwise_alone")
@pytest.mark.parametrize("arch", ARCHS)
def test_8_bit_depthwise_convolutions_compute_the_network(arch: str) -> None:
    n = QNet()
    graph = n.done(shifted_depthwise(n, n.fake(n.input(2, 32, 9, 7), 0.03)))
    program = quantized_program(graph, arch)
    assert [t["tactic"] for t in program.meta["tactics"]].count("depthwise_8bit") == 2
    check_exact(program, graph)


def test_grids_that_go_round_are_as_large_as_the_gpu() -> None:
    """Blocks of a first convolution go from tile to tile. There are as many as the architecture's GPU can run at once."""
    n = Net()
    graph = n.done(n.op("Relu", n.conv(n.input(16, 3, 224, 224), 64, 7, pads=3, strides=2, bias=True)))
    blocks = {}
    for arch in (*ARCHS, "sm_90a"):
        program = lowered(graph, target=f"cuda:{arch}")
        (launch,) = [ln for ln in launches_of(program) if program.kernels[ln.kernel].template == "conv_stem.cu"]
        blocks[arch] = launch.grid[0]
        assert launch.grid[0] % gpu_facts.of_arch(arch).multiprocessors == 0
    assert blocks["sm_86"] < blocks["sm_80"] < blocks["sm_90a"]
