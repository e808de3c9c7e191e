"""A scale and a shift per channel after a residual, as in pre-activation networks: part of the convolution's launch on Hopper."""

from __future__ import annotations

from typing import Any

import pytest
from support.net import Net
from support.on_gpu import checked_program
from support.simulated import check_simulated, feeds_of, lowered

from optdnn.config import BuildOptions
from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import implicit_gemm, patch_kernel
from optdnn.kernels.conv.hopper_launch import ranked
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.optimize import optimize
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program


def preact(
    kernel: int = 1, *, shift: bool = True, joined: bool = False, relu: bool = True, group: int = 1, channels: int = 24, bias: bool = True,
    size: int = 9,
) -> Graph:  # fmt: skip
    """The end of a stage: a sum with a batch norm as its only reader, and two convolutions of the norm's result.

    ``joined``: the other addend is a convolution, which the launch sums as well.
    """
    n = Net()
    x = n.op("Tanh", n.input(2, 16, size, size))
    shortcut = n.conv(x, channels, 1, pads=0)
    shortcut = shortcut if joined else n.op("Tanh", shortcut)
    inner = n.op("Sigmoid", n.conv(x, channels, 1, pads=0))
    y = n.op("Add", n.conv(inner, channels, kernel, pads=kernel // 2, bias=bias, group=group), shortcut)
    y = n.op("Mul", y, n.random(1, channels, 1, 1))
    y = n.op("Add", y, n.random(1, channels, 1, 1)) if shift else y
    y = n.op("Relu", y) if relu else y
    return n.done(n.conv(y, 16, 1, pads=0), n.conv(y, 8, 3, strides=2))


NETS = {
    "1x1": preact(),
    "3x3": preact(3),
    "a factor alone": preact(shift=False),
    "no activation, no bias": preact(relu=False, bias=False),
    "two convolutions": preact(joined=True),
    "channels in fours": preact(channels=20),
    "large": preact(3, channels=64, size=28),
}


def preact_line() -> Graph:
    """The same with one spatial axis."""
    n = Net()
    x = n.op("Tanh", n.input(2, 16, 40))
    y = n.op("Mul", n.op("Add", n.conv(n.op("Sigmoid", x), 16, 1, pads=0, bias=True), x), n.random(16, 1))
    y = n.op("Add", y, n.random(1, 16, 1))
    return n.done(n.conv(y, 8, 1, pads=0), n.conv(y, 8, 3, strides=2))


NETS["a line"] = preact_line()


def scaled(program: Program) -> int:
    """Kernels that multiply by a factor of each channel."""
    return sum("#define SCALED 1" in k.generated.get("generated.cuh", "") for k in program.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", NETS)
def test_the_convolution_scales_its_residual(name: str, precision: str) -> None:
    program = check_simulated(NETS[name], precision, tolerance={"fp16": 1e-2, "bf16": 6e-2}.get(precision))
    assert scaled(program) == 1


@pytest.mark.parametrize(
    "graph",
    [preact(group=24), preact(joined=True, group=24)],
    ids=["depthwise", "both"],
)
def test_other_sums_leave_it_to_a_launch_of_its_own(graph: Graph) -> None:
    assert scaled(check_simulated(graph, tolerance=1e-2)) == 0


def test_other_kernels_are_not_asked_for_it() -> None:
    graph = preact()
    optimize(graph, BuildOptions(target="cuda:sm_90a", precision="fp16"), "cuda:sm_90a")
    (op,) = [op for op in graph.of_kind("Conv") if [s.kind for s in op.attrs.epilogue][:2] == ["Add", "Mul"]]
    own, other = (plan_epilogue(graph, op, channel_axis=1, allow_scale=allowed) for allowed in (True, False))
    assert [len(e.rest) for e in (own, other)] == [0, 3]
    assert own.rendered == [("add",), render.SCALE_SHIFT, ("relu",)]
    assert other.scale is None


SOURCE = Source(14, 14, 64, (3, 3), (1, 1), (1, 1, 1, 1))
PROBLEM = Problem(2, 64, (SOURCE,), (("bias",), ("add",), render.SCALE_SHIFT, ("relu",)), "float16", "float16")


@pytest.mark.nvrtc
@pytest.mark.parametrize("family", [implicit_gemm, patch_kernel])
def test_the_kernels_compile_without_spills(family: Any) -> None:
    gpu = of_arch("sm_90a")
    for offer in [
        o for o in ranked(PROBLEM, gpu) if isinstance(o.config, implicit_gemm.Config) == (family is implicit_gemm)
    ][:2]:
        (kernel,) = nvrtc.resources(family.recipe(PROBLEM, offer.config)).values()
        assert kernel.spill_bytes == 0, str(offer.config)


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
def test_every_launch_agrees_with_its_meaning(name: str) -> None:
    program = lowered(NETS[name], "fp16", target="cuda:sm_90a")
    assert scaled(program) == 1
    checked_program(program, feeds_of(NETS[name]), 4e-3)
