"""The general tensor-core kernel as a tactic: all 16-bit convolutions before Hopper, and groups on Hopper."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.net import Net, built
from support.simulated import TOLERANCE, check_simulated, lowered, refusals, results_of, tactics

from optdnn.ir.graph import Value
from optdnn.kernels.conv.general import BandedConv
from optdnn.kernels.conv.grouped import GroupedConv
from optdnn.kernels.conv.narrow import NarrowConv
from optdnn.ops.conv import ConvAttrs


def residual_block(n: Net) -> Value:
    x = n.op("Relu", n.conv(n.input(2, 16, 9, 7), 24, bias=True))
    return n.op("Relu", n.op("Add", n.conv(x, 24, 1, pads=0, bias=True), x))


NETS: dict[str, Callable[[Net], Value]] = {
    "a residual block": residual_block,
    "an image in blocks": lambda n: n.op("Relu", n.conv(n.input(2, 4, 70, 60), 16, 17, pads=3, strides=2, bias=True)),
    "few channels": lambda n: n.conv(n.input(2, 5, 9, 7), 10),
    "odd channels between": lambda n: n.conv(n.conv(n.input(2, 16, 9, 7), 20), 6),
    "groups": lambda n: n.op("Relu", n.conv(n.input(2, 32, 9, 7), 24, group=4, bias=True)),
    "one axis": lambda n: n.conv(n.input(2, 16, 20), 12, 5, pads=2),
    "dilated, strided": lambda n: n.conv(n.input(2, 16, 15, 13), 32, dilations=2, strides=2, pads=2),
    "gemm": lambda n: n.op("Relu", n.gemm(n.op("Relu", n.gemm(n.input(5, 32), 40)), 10)),
    "rows of three axes": lambda n: n.op("Gelu", n.matmul(n.input(3, 5, 32), 24)),
}


PLAIN = ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1))


@pytest.mark.parametrize("name", NETS)
def test_programs_for_sm_80_compute_the_network(name: str) -> None:
    program = check_simulated(built(NETS[name]), "fp16", target="cuda:sm_80")
    assert {"conv_sm80", "gemm_sm80"} & set(tactics(program))
    assert not {"conv_direct", "tiled_matmul", "conv_sm90", "gemm_sm90"} & set(tactics(program))


def test_hopper_runs_groups_on_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BandedConv, "defer", lambda *given: "groups are not multiplied together")
    monkeypatch.setattr(GroupedConv, "refuse", lambda *given: "it is left out")
    monkeypatch.setattr(NarrowConv, "refuse", lambda *given: "it is left out")
    n = Net()
    x = n.input(2, 32, 9, 7)
    program = lowered(n.done(n.conv(n.conv(x, 32, group=4), 16)), "fp16")
    assert tactics(program).count("conv_sm80") == 1
    assert tactics(program).count("conv_sm90") == 1


@pytest.mark.parametrize(
    ("build", "groups"),
    [
        (lambda n: n.conv(n.input(2, 12, 9, 7), 12, group=3), 1),  # 8 bytes per group: all of them together
        (lambda n: n.conv(n.input(2, 128, 9, 7), 128, group=32), 4),  # 4 channels each: eight groups fill a K step
        (
            lambda n: n.conv(n.input(2, 192, 9, 7), 192, group=8),
            8,
        ),  # 24 channels each: more groups together would need more zeros
        (lambda n: n.conv(n.input(2, 256, 9, 7), 256, group=4), 4),
    ],
)
def test_groups_are_multiplied_together_where_that_is_less_work(build: Callable[[Net], Value], groups: int) -> None:
    graph = built(build)
    program = lowered(graph, "fp16", target="cuda:sm_80")
    assert tactics(program).count("conv_sm80") == 1
    (found,) = [s.params["op"]["attrs"]["group"] for s in program.steps if s.params["op"]["kind"] == "Conv"]
    assert found == groups
    for got, want in results_of(program, graph):
        assert np.abs(got - want).max() <= TOLERANCE["fp16"] * np.abs(want).max()


@pytest.mark.parametrize("name", ["a residual block", "odd channels between", "groups", "gemm", "one axis"])
def test_tf32_before_hopper(name: str) -> None:
    graph = built(NETS[name])
    program = lowered(graph, "tf32", target="cuda:sm_86")
    products = [s for s in program.steps if s.params["op"]["kind"] in ("Conv", "MatMul", "Gemm")]
    assert all(s.params["op"]["attrs"]["tf32"] == [0, 1] for s in products)
    assert {"conv_sm80", "gemm_sm80"} & set(tactics(program))
    for got, want in results_of(program, graph):
        assert 1e-6 < np.abs(got - want).max() / np.abs(want).max() < TOLERANCE["tf32"]


def test_hopper_runs_strides_on_it_that_tma_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NarrowConv, "refuse", lambda *given: "it loads all pixels")
    n = Net()
    graph = n.done(n.conv(n.input(2, 16, 40, 30), 16, strides=9))
    program = lowered(graph, "fp16")
    assert tactics(program).count("conv_sm80") == 1


@pytest.mark.parametrize(
    ("build", "target", "reason"),
    [
        (lambda n: n.conv(n.input(2, 16, 9, 7), 16), "cuda:sm_90a", "Hopper's own kernel runs it"),
        (lambda n: n.conv(n.input(2, 12, 9, 7), 12, group=3), "cuda:sm_90a", "groups of 4 channels do not begin"),
        (
            lambda n: n.op("Conv", n.input(2, 16, 9, 7), n.input(8, 16, 1, 1, name="w"), attrs=PLAIN),
            "cuda:sm_80",
            "weights are not constant",
        ),
        (lambda n: n.gemm(n.op("Relu", n.input(4, 24)), 6), "cuda:sm_90a", "Hopper's own kernel runs it"),
        (
            lambda n: n.op("MatMul", n.input(4, 24), n.input(24, 8, name="w")),
            "cuda:sm_80",
            "second operand is not a constant",
        ),
    ],
)
def test_refusals(build: Callable[[Net], Value], target: str, reason: str) -> None:
    program = lowered(built(build), "fp16", target=target)
    refused = refusals(program)
    assert any(reason in r for r in refused), refused


@pytest.mark.nvrtc
def test_a_kernel_of_sm_80_compiles_as_part_of_a_program() -> None:
    program = lowered(built(NETS["a residual block"]), "fp16", target="cuda:sm_80", no_cubins=False)
    assert {k.arch for k in program.kernels} == {"sm_80"}
    assert all(k.cubin is not None for k in program.kernels)
