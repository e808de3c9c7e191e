"""Products of fp32 in parts whose launch applies stages to the pixels: gates of squeeze-and-excitation, pre-activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net, built
from support.on_gpu import checked_launches
from support.one_config import only_of
from support.simulated import check_simulated, kinds, lowered
from support.spills import check_spills

from optdnn.errors import InternalError
from optdnn.kernels.conv import parts_kernel
from optdnn.kernels.conv.parts import PartsConv
from optdnn.kernels.conv.parts_kernel import PartsConfig
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.ops.conv import ConvAttrs

CONFIGS = (PartsConfig(2, 1, 24, 3), PartsConfig(1, 2, 16, 3), PartsConfig(1, 1, 40, 2, 2))


def gated(channels: int = 72, size: int = 9, kernel: int = 1, *, sizes: bool = False) -> Callable[[Net], Any]:
    """Squeeze-and-excitation in front of a convolution. ``sizes``: input channels whose weights are of very different sizes."""

    def make(n: Net) -> Any:
        x = n.op("Relu", n.conv(n.input(3, 16, size, size), channels, 3))
        gate = n.op("Sigmoid", n.conv(n.op("GlobalAveragePool", x), channels, 1, pads=0))
        y = n.op("Mul", x, gate)
        if not sizes:
            return n.conv(y, 40, kernel, pads=kernel // 2)
        weight = (
            np.random.default_rng(0).standard_normal((40, channels, 1, 1))
            * 10.0 ** np.linspace(-9, 2, channels)[:, None, None]
        )
        weight[3, :9] = 0
        return n.op("Conv", y, n.const(weight.astype(np.float32)), attrs=ConvAttrs((1, 1), (0,) * 4, (1, 1)))

    return make


def preactivated(kernel: int = 1, function: str = "Relu") -> Callable[[Net], Any]:
    """A pre-activation of features that another operator reads, too."""

    def make(n: Net) -> Any:
        x = n.conv(n.input(2, 16, 11, 10), 104, 3)
        y = n.conv(n.op(function, n.bn(x)), 104, kernel, pads=kernel // 2)
        return n.op("Add", x, y)

    return make


NETS: dict[str, Callable[[Net], Any]] = {
    "gate": gated(), "images that share tiles": gated(72, 3), "gate, channels of other sizes": gated(sizes=True),
    "pre-activation": preactivated(),
}  # fmt: skip


@pytest.fixture
def _forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartsConv, "defer", lambda self, b, op: None)


@pytest.mark.usefixtures("_forced")
@pytest.mark.parametrize("name", NETS)
def test_the_launch_applies_the_stages(name: str) -> None:
    program = check_simulated(built(NETS[name]), "fp32", target="cuda:sm_90a")
    found = [s.params["op"]["attrs"] for s in program.steps if s.params["op"]["kind"] == "WeightsInParts"]
    assert [bool(a.get("prologue")) for a in found].count(True) == 1
    assert "Pointwise" not in kinds(program)


@pytest.mark.usefixtures("_forced")
@pytest.mark.parametrize("build", [gated(kernel=3), preactivated(3), preactivated(1, "Gelu")])
def test_stages_of_several_taps_and_functions_are_a_launch(build: Callable[[Net], Any]) -> None:
    program = check_simulated(built(build), "fp32", target="cuda:sm_90a")
    assert kinds(program).count("Pointwise") == 1


def test_squeeze_and_excitation_has_no_launch_of_its_own() -> None:
    assert "Pointwise" not in kinds(lowered(built(gated(240, 28)), "fp32", target="cuda:sm_90a"))


def rows(prologue: tuple[Any, ...]) -> Problem:
    return Problem(
        8,
        256,
        (Source(14, 14, 96),),
        (("bias",), ("add",)),
        "float32",
        prologue=prologue,
        selective=True,
        equalized=True,
    )


def test_only_rows_have_a_prologue() -> None:
    filtered = Source(14, 14, 96, (3, 3), (1, 1), (1, 1, 1, 1))
    with pytest.raises(InternalError, match="rows of fp32"):
        replace(rows((("gate",),)), sources=(filtered,))


@pytest.mark.parametrize("config", [PartsConfig(2, 1, 136, 3), PartsConfig(1, 2, 136, 3)], ids=str)
def test_tiles_that_would_spill_are_refused(config: PartsConfig) -> None:
    problem = rows((("gate",),))
    assert parts_kernel.refuse(problem, config) == "not a tile of this kernel"
    assert parts_kernel.refuse(replace(problem, selective=False), PartsConfig(2, 1, 136, 3)) is None


@pytest.mark.nvrtc
@pytest.mark.parametrize("prologue", [(("gate",),), (("scale_shift",), ("relu",), ("gate",))], ids=str)
@pytest.mark.parametrize(
    "config", [PartsConfig(2, 1, 112, 3), PartsConfig(1, 2, 112, 3), PartsConfig(1, 1, 112, 3)], ids=str
)
def test_they_compile_without_spills(config: PartsConfig, prologue: tuple[Any, ...]) -> None:
    check_spills(parts_kernel.recipe(rows(prologue), config), parts_kernel.FUNCTION)


@pytest.mark.hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_each_configuration_on_a_gpu(name: str, config: PartsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, PartsConv, config)
    assert checked_launches(built(NETS[name]), "fp32", 2e-6)
