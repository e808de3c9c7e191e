"""Prologues inside the Hopper convolution: scale, shift, gate and activation are applied to pixels before the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net, built
from support.simulated import TOLERANCE, feeds_of, lowered, simulate
from support.spills import check_spills

from optdnn.errors import InternalError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Value
from optdnn.kernels.conv import implicit_gemm as hopper
from optdnn.kernels.conv import problem as conv_problem
from optdnn.runtime.steps.lanes import accesses


def inside(n: Net, images: int, channels: int, *size: int) -> Value:
    """A channels-last value of another kernel, with a second reader."""
    return n.conv(n.input(images, 8, *size), channels, 1, pads=0)


def per_channel(n: Net, x: Value, channels: int) -> Value:
    """The scale, shift and activation of a BatchNormalization whose operand has another reader."""
    x = n.op("Mul", x, n.const(np.linspace(0.5, 1.5, channels, dtype=np.float32).reshape(1, channels, 1, 1)))
    return n.op("Add", x, n.const(np.linspace(-0.4, 0.6, channels, dtype=np.float32).reshape(1, channels, 1, 1)))


def dense_layer(n: Net, channels: int = 72, size: int = 9, activation: str = "Relu", **conv: Any) -> list[Value]:
    x = inside(n, 2, channels, size, 7)
    y = n.op(activation, per_channel(n, x, channels))
    return [n.op("Relu", n.conv(y, 24, **{"kernel": 1, "pads": 0, "bias": True, **conv})), x]


def twice(n: Net) -> list[Value]:
    x = inside(n, 2, 16, 9, 7)
    y = n.op("Relu", per_channel(n, n.op("Relu", per_channel(n, x, 16)), 16))
    return [n.conv(y, 24, 1, pads=0), x]


def gated(n: Net, channels: int = 96, images: int = 3, size: tuple[int, int] = (5, 7)) -> list[Value]:
    x, gate = inside(n, images, channels, *size), inside(n, images, channels, 1, 1)
    return [n.conv(n.op("Mul", x, n.op("Sigmoid", gate)), 40, 1, pads=0, bias=True), x]


def gated_first(n: Net) -> list[Value]:
    """NF-RegNet's prologue: the gate, a factor and an activation."""
    x, gate = inside(n, 9, 72, 7, 7), inside(n, 9, 72, 1, 1)
    y = n.op("Mul", n.op("Mul", x, n.op("Sigmoid", gate)), n.const(2.0))
    return [n.conv(n.op("Swish", y), 40, 1, pads=0, bias=True), x]


Build = Callable[[Net], list[Value]]
NETS: dict[str, Build] = {
    "scale, shift, relu": dense_layer,
    "of 16 channels": lambda n: dense_layer(n, 16),
    "of 32 channels, many pixels": lambda n: dense_layer(n, 32, 70),
    "hard swish": lambda n: dense_layer(n, activation="HardSwish"),
    "gate": gated,
    "gate of one image": lambda n: gated(n, 1152, 1),
    "gate of images of a few pixels": lambda n: gated(n, 72, 41, (2, 1)),
    "gate of images in one tile": lambda n: gated(n, 136, 16, (7, 7)),
    "first the gate": gated_first,
}
REFUSED: dict[str, Build] = {
    "a filter of several taps": lambda n: dense_layer(n, kernel=3, pads=1),
    "a stride": lambda n: dense_layer(n, strides=2),
    "two affine stages": twice,
    "channels that are no multiple of 8": lambda n: gated(n, 20),
}


def prologues(net: Build) -> list[int]:
    """The stages before each convolution of the program. simulate gives right results."""
    graph = built(net)
    program = lowered(graph, "fp16")
    feeds = feeds_of(graph)
    want, other, got = (
        evaluate(graph, feeds)["y0"],
        evaluate(graph, feeds_of(graph, 2))["y0"],
        simulate(program, feeds)["y0"],
    )
    scale = float(np.abs(want).max())
    assert float(np.abs(got - want).max()) / scale <= TOLERANCE["fp16"] < float(np.abs(other - want).max()) / scale / 4
    ops = [s.params["op"] for s in program.steps]
    return [len(op["attrs"]["prologue"]) for op in ops if op["kind"] == "Conv"]


@pytest.mark.parametrize("name", NETS)
def test_one_launch_does_prologue_and_product(name: str) -> None:
    stages = 4 if name == "first the gate" else 1 if "gate" in name else 3
    assert sorted(prologues(NETS[name]))[-1] == stages


@pytest.mark.parametrize("name", NETS)
def test_a_launch_names_all_that_it_reads(name: str) -> None:
    program = lowered(built(NETS[name]), "fp16")
    steps = [s for s in program.steps if s.params["op"]["kind"] == "Conv"]
    written = [a.buffer for s in steps for a in accesses(s) if a.write]
    assert len(written) == len(steps)  # bytes that a meaning does not name count as written


@pytest.mark.parametrize("name", REFUSED)
def test_stages_that_the_kernel_cannot_apply_are_a_launch_before_it(name: str) -> None:
    assert set(prologues(REFUSED[name])) == {0}


SOURCE = conv_problem.Source(7, 7, 96)


PROBLEM = conv_problem.Problem(2, 64, (SOURCE,), prologue=(("scale_shift",), ("relu",), ("gate",)))


@pytest.mark.parametrize(
    "config",
    [
        hopper.Config(1, 1, 1, 64, 3, alternate=True),
        hopper.Config(1, 1, 2, 64, 3, share=(2, 1)),
        hopper.Config(1, 2, 2, 160, 2),
    ],
)
def test_tiles_without_room_for_it_are_refused(config: hopper.Config) -> None:
    assert hopper.refuse(replace(PROBLEM, prologue=()), config) is None
    assert str(hopper.refuse(PROBLEM, config)).startswith("a prologue needs a single block")


@pytest.mark.parametrize(
    "problem",
    [
        {"sources": (conv_problem.Source(7, 7, 96, (3, 3), padding=(1, 1, 1, 1)),), "prologue": (("gate",),)},
        {"sources": (SOURCE, SOURCE)},
        {"sources": (SOURCE,), "dtype": "float8_e4m3fn"},
    ],
)
def test_a_prologue_is_for_one_source(problem: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match="a prologue needs one source of 16-bit pixels, or rows of fp32"):
        conv_problem.Problem(2, 64, epilogue=(), **{"prologue": (("relu",),), **problem})


def test_registers_are_counted_with_its_warpgroup() -> None:
    config = hopper.Config(1, 2, 1, 96, 2, blocks=2)
    assert hopper.refuse(replace(PROBLEM, prologue=()), config) is None
    assert "exceed 72 registers" in str(hopper.refuse(PROBLEM, config))


@pytest.mark.nvrtc
def test_every_chosen_tile_compiles_without_spills() -> None:
    for config in (
        hopper.Config(1, 1, 1, 48, 4, direct=True),
        hopper.Config(1, 1, 2, 128, 4),
        hopper.Config(1, 2, 1, 128, 4),
    ):
        assert hopper.refuse(PROBLEM, config) is None
        check_spills(hopper.recipe(PROBLEM, config), threads=(config.threads + PROBLEM.helpers) * config.blocks)
