"""Activations after convolutions and products are computed in their epilogues."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.activation_cases import ACTIVATIONS, constant_images, convolutions, products
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds, lowered
from support.sweep import all_pairs

from optdnn.ir.graph import Graph
from optdnn.ops.unary import LeakyReluAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of

NETS = [products, convolutions]


@pytest.mark.slow
@all_pairs({"kind": ACTIVATIONS, "made": NETS, "precision": ["fp16", "fp32"]})
def test_no_launch_of_their_own(kind: str, made: Callable[[str], Graph], precision: str) -> None:
    program = check_simulated(made(kind), precision)
    found = [s.params["op"] for s in program.steps if s.params["op"]["kind"] == "Pointwise"]
    computed = {kind, "LeakyRelu"} if kind == "PRelu" else {kind}
    assert not [op for op in found if computed & {s["stage"][0] for s in op["attrs"]["epilogue"]}]


@pytest.mark.nvrtc
@pytest.mark.parametrize("kind", ["Mish", "Sin", "Cos", "Celu"])
def test_they_compile_without_spills(kind: str) -> None:
    program = lowered(convolutions(kind), "fp16", target="cuda:sm_90a")
    for kernel in program.kernels:
        assert all(r.spill_bytes == 0 for r in nvrtc.resources(recipe_of(kernel)).values())


def test_constant_images_are_added_by_the_convolution() -> None:
    program = check_simulated(constant_images())
    assert kinds(program) == ["ImageConv", *["Conv"] * 3, "Pointwise"]  # the last one converts the output
    check_simulated(constant_images(), "fp32")
    check_simulated(constant_images(), target="cuda:sm_80")


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("made", [products, convolutions])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_each_activation(kind: str, made: Callable[[str], Graph], precision: str) -> None:
    assert checked_launches(made(kind), precision)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_constant_images(precision: str) -> None:
    assert checked_launches(constant_images(), precision)


@pytest.mark.parametrize("kind", ["LeakyRelu", "Clip"])
def test_numbers_that_are_nan_are_left_to_a_launch_of_their_own(kind: str) -> None:
    """The comparisons of an epilogue would ignore the bound."""
    n = Net()
    x = n.conv(n.input(1, 8, 6, 6), 8)
    nan = float("nan")
    y = n.op("LeakyRelu", x, attrs=LeakyReluAttrs(nan)) if kind == "LeakyRelu" else n.op("Clip", x, nan, 1.0)
    program = lowered(n.done(y))
    stages = [s["stage"][0] for step in program.steps for s in step.params["op"]["attrs"].get("epilogue", ())]
    owners = [step.params["op"]["kind"] for step in program.steps if kind in str(step.params["op"]["attrs"])]
    assert kind in stages
    assert owners == ["Pointwise"]
