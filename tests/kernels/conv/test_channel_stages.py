"""Stages that read numbers of each channel (PReLU, Snake, a factor and a shift) are part of the convolution's launch on Hopper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import checked_program
from support.simulated import check_simulated, feeds_of, kinds, lowered, tactics

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv import depthwise_bands_kernel as bands
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import depthwise_tma_kernel as tma
from optdnn.kernels.conv.depthwise import ranked as depthwise_ranked
from optdnn.kernels.conv.hopper_launch import family, ranked
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program


def activated(n: Net, kind: str, y: Value, channels: int, axes: int = 2) -> Value:
    one = (1,) * axes
    if kind == "PRelu":
        return n.op("PRelu", y, n.random(channels, *one))
    return n.op("Snake", y, n.positive(1, channels, *one), n.positive(1, channels, *one))


def net(
    kind: str = "Snake", kernel: int = 3, *, axes: int = 2, channels: int = 24, size: int = 9, residual: bool = False, relu: bool = False,
    joined: bool = False, bias: bool = True, twice: bool = False, group: int = 1, whole: bool = False,
) -> Graph:  # fmt: skip
    """A convolution and its activation.

    ``residual``: a tensor is added between them. ``joined``: the added tensor is a convolution. ``relu``: another activation
    follows. ``twice``: the activation follows twice. ``whole``: the activation has numbers of each position.
    """
    n = Net()
    x = n.op("Tanh", n.input(2, 16 if group == 1 else channels, *(size,) * axes))
    y = n.conv(x, channels, kernel, pads=kernel // 2, bias=bias, group=group)
    if residual:
        y = n.op("Add", y, n.input(2, channels, *(size,) * axes, name="r"))
    if joined:
        y = n.op("Add", y, n.conv(n.op("Sigmoid", x), channels, 1, pads=0))
    if whole:
        return n.done(n.op("PRelu", y, n.random(channels, *(size,) * axes)))
    for _ in range(2 if twice else 1):
        y = activated(n, kind, y, channels, axes)
    return n.done(n.op("Relu", y) if relu else y)


def depthwise_net(kind: str = "Snake", kernel: int = 3, *, axes: int = 2, residual: bool = False) -> Graph:
    """A depthwise convolution and its activation, between convolutions, so that its image is channels-last."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 16, *(20,) * axes), 24, 1, pads=0))
    y = n.conv(x, 24, kernel, pads=kernel // 2, group=24)
    y = activated(n, kind, n.op("Add", y, x) if residual else y, 24, axes)
    return n.done(n.conv(y, 16, 1, pads=0))


NETS = {
    "1x1": net(kernel=1),
    "3x3": net(),
    "slopes": net("PRelu"),
    "slopes of a line": net("PRelu", axes=1, size=40),
    "a line": net(axes=1, size=40, channels=40),
    "a residual": net(residual=True),
    "slopes after a residual": net("PRelu", residual=True, bias=False),
    "two convolutions": net(joined=True),
    "another activation": net(relu=True, bias=False),
    "channels in fours": net(channels=20),
    "large": net(channels=64, size=28, residual=True),
    "depthwise": depthwise_net(),
    "depthwise along a line, after a residual": depthwise_net(kernel=7, axes=1, residual=True),
    "slopes of a depthwise one": depthwise_net("PRelu"),
}


def stages(program: Program) -> int:
    """Kernels whose stages read numbers of their channels."""
    return sum("#define CHANNEL_STAGES 1" in k.generated.get("generated.cuh", "") for k in program.kernels)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", NETS)
def test_the_convolution_computes_the_activation(name: str, precision: str) -> None:
    program = check_simulated(NETS[name], precision, tolerance={"fp16": 1e-2, "bf16": 6e-2}.get(precision))
    assert stages(program) == (precision != "fp32")
    if precision != "fp32":
        made = [s.params["op"] for s in program.steps if s.params["op"]["kind"] in ("Conv", "ConvSum")]
        assert {"Snake", "PRelu"} & {stage["stage"][0] for op in made for stage in op["attrs"]["epilogue"]}


def test_slopes_of_positions_have_a_launch_of_their_own() -> None:
    program = check_simulated(net("PRelu", whole=True), tolerance=1e-2)
    assert stages(program) == 0
    assert "Pointwise" in kinds(program)


def test_a_gate_of_two_depthwise_convolutions_leaves_it_to_another_launch() -> None:
    n = Net()
    x = n.op("Tanh", n.input(2, 24, 9, 9))
    a, b = (n.conv(x, 24, 3, pads=1, group=24) for _ in range(2))
    program = check_simulated(n.done(activated(n, "Snake", n.op("Mul", a, b), 24)), tolerance=1e-2)
    assert stages(program) == 0
    assert "depthwise_paired" in tactics(program, "Conv")


def test_depthwise_convolutions_on_tensor_cores_read_a_bias_alone() -> None:
    problem = depthwise.Problem(8, Source(28, 28, 64, (7, 7), (1, 1), (3, 3, 3, 3)), (("bias",), ("relu",)))
    (config, *_) = bands.candidates(problem, of_arch("sm_90a"))
    snake = replace(problem, epilogue=(("bias",), ("snake",)))
    assert bands.refuse(snake, config) == "its stages have per-channel operands"
    assert not bands.candidates(snake, of_arch("sm_90a"))


def test_a_second_one_is_left_to_another_launch() -> None:
    program = check_simulated(net(twice=True), tolerance=1e-2)
    assert stages(program) == 1
    (rest,) = [
        s.params["op"]["attrs"]["epilogue"]
        for s in program.steps
        if s.params["op"]["kind"] == "Pointwise" and "Snake" in str(s.params["op"]["attrs"])
    ]
    assert [stage["stage"][0] for stage in rest].count("Snake") == 1


def scaled(
    steps: str = "Relu Mul Add", kernel: int = 3, *, axes: int = 2, channels: int = 24, residual: bool = False, ends: str = "",
) -> Graph:  # fmt: skip
    """A convolution, followed by ``steps``, of which Mul and Add read a constant of each channel.

    ``residual``: a tensor is added first. ``ends``: further steps.
    """
    n = Net()
    y = n.conv(n.op("Tanh", n.input(2, 16, *(9,) * axes)), channels, kernel, pads=kernel // 2, bias=True)
    if residual:
        y = n.op("Add", y, n.input(2, channels, *(9,) * axes, name="r"))
    for kind in [*steps.split(), *ends.split()]:
        y = n.op(kind, y, n.random(channels, *(1,) * axes)) if kind in ("Mul", "Add") else n.op(kind, y)
    return n.done(y)


SCALED = {
    "scaled 3x3": scaled(),
    "scaled 1x1": scaled(kernel=1, channels=20),
    "a scaled line": scaled(axes=1),
    "a factor": scaled("Relu Mul"),
    "a shift": scaled("Sigmoid Add"),
    "a residual first": scaled("Relu Mul Add", residual=True),
    "an activation after them": scaled(ends="Tanh"),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_convolution_scales_the_result_of_its_activation(name: str, precision: str) -> None:
    program = check_simulated(SCALED[name], precision, tolerance={"fp16": 1e-2, "bf16": 6e-2}.get(precision))
    assert stages(program) == (precision != "fp32")
    if precision != "fp32":
        (op,) = [s.params["op"] for s in program.steps if s.params["op"]["kind"] == "Conv"]
        assert {"Mul", "Add"} & {stage["stage"][0] for stage in op["attrs"]["epilogue"]}


@pytest.mark.parametrize("steps", ["Relu Mul Tanh Mul", "Relu Mul Tanh Add", "Relu Add Tanh Mul"])
def test_a_second_factor_or_shift_is_left_to_another_launch(steps: str) -> None:
    program = check_simulated(scaled(steps), tolerance=1e-2)
    assert stages(program) == 1
    (conv,) = [s.params["op"] for s in program.steps if s.params["op"]["kind"] == "Conv"]
    assert [stage["stage"][0] for stage in conv["attrs"]["epilogue"]][-3:] == steps.split()[:3]
    assert "Pointwise" in kinds(program)


def test_snake_is_within_a_fraction_of_a_rounding_to_half() -> None:
    """With an exact sine, only the reduction to a period has an error."""
    text = render.epilogue((("bias",), ("snake",)))
    assert "float4 c" in text
    u = np.linspace(-300, 300, 100001).astype(np.float32)
    k = np.rint(u * np.float32(0.31830989))
    reduced = (k * np.float64(8.7422777e-8) + (u + k * np.float64(np.float32(-3.14159274)))).astype(np.float32)
    assert np.abs(reduced).max() < 1.5709
    assert np.abs(np.sin(reduced.astype(np.float64)) ** 2 - np.sin(u.astype(np.float64)) ** 2).max() < 1e-6


@pytest.mark.nvrtc
@pytest.mark.parametrize("stage", ["snake", "prelu", "affine"])
def test_the_kernels_compile_without_spills(stage: str) -> None:
    gpu = of_arch("sm_90a")
    source = Source(1, 3200, 384, (1, 7), (1, 1), (0, 3, 0, 3))
    for problem in (
        Problem(1, 384, (source,), (("bias",), (stage,))),
        Problem(1, 768, (Source(1, 400, 768),), (("bias",), ("add",), (stage,))),
    ):
        for offer in ranked(problem, gpu)[:1]:
            (kernel,) = nvrtc.resources(family(offer.config).recipe(problem, offer.config)).values()
            assert kernel.spill_bytes == 0, str(offer.config)


@pytest.mark.nvrtc
@pytest.mark.parametrize("stage", ["snake", "prelu", "affine"])
def test_the_depthwise_kernels_compile_without_spills(stage: str) -> None:
    gpu = of_arch("sm_90a")
    for source in (Source(8192, 1, 64, (7, 1), (1, 1), (3, 0, 3, 0)), Source(56, 56, 64, (3, 3), (1, 1), (1, 1, 1, 1))):
        problem = depthwise.Problem(2, source, (("bias",), ("add",), (stage,)))
        configs = [config for _, config in depthwise_ranked(problem, gpu)]
        assert {type(config) for config in configs} == {depthwise.Config, tma.Config}
        for config in [configs[0], next(c for c in configs if type(c) is not type(configs[0]))]:
            family = tma if isinstance(config, tma.Config) else depthwise
            (kernel,) = nvrtc.resources(family.recipe(problem, config)).values()
            assert kernel.spill_bytes == 0, str(config)


@pytest.mark.hopper
@pytest.mark.parametrize("name", [*NETS, *SCALED])
def test_every_launch_agrees_with_its_meaning(name: str) -> None:
    graph = (NETS | SCALED)[name]
    program = lowered(graph, "fp16", target="cuda:sm_90a")
    assert stages(program) == 1
    checked_program(program, feeds_of(graph), 4e-3)
