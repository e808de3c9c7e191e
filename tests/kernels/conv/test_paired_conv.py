"""Gates of convolutions: two convolutions of the same image in one launch, refusals, and taps that are far apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.conv_cases import check_no_spills
from support.net import Net, built
from support.on_gpu import checked_launches
from support.one_config import CONFIGS, PAIR_TOLERANCE, STORED, only_of
from support.simulated import check_simulated, kinds, lowered, refusals, tactics

from optdnn.errors import InternalError
from optdnn.ir.graph import Value
from optdnn.kernels.conv import patch_kernel
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.narrow import NarrowConv
from optdnn.kernels.conv.paired import PairedConv, PairedParts
from optdnn.kernels.conv.parts import PartsConv
from optdnn.kernels.conv.parts_kernel import PartsConfig
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.tactic import Offer
from optdnn.ops.index import SplitAttrs


def gate(n: Net, x: Value, kinds: Sequence[str] = ("Tanh", "Sigmoid"), axis: int = 1) -> Value:
    """The product of the halves of some channels, each after its activation."""
    halves = n.op("Split", x, attrs=SplitAttrs(axis, 2), outputs=2)
    return n.op("Mul", *(n.op(kind, half) if kind else half for kind, half in zip(kinds, halves, strict=True)))


def of_a_line(n: Net) -> Value:
    return gate(n, n.conv(n.input(2, 16, 40), 48, 3, bias=True))


def of_an_image(n: Net) -> Value:
    y = gate(n, n.conv(n.input(2, 24, 9, 7), 80, 3), ("", "Sigmoid"))
    return n.op("Relu", y)


def of_one_tap(n: Net) -> Value:
    return gate(n, n.conv(n.input(3, 40, 20), 32, 1, pads=0, bias=True), ("Swish", ""))


def with_conditions(n: Net) -> Value:
    x, m = n.input(2, 16, 40), n.input(2, 24, 40, name="m")
    return gate(n, n.op("Add", n.conv(x, 48, 3, bias=True), n.conv(m, 48, 1, pads=0, bias=True)))


def of_two_layers(n: Net) -> Value:
    """The conditions of both layers are channels of one convolution."""
    x, m = n.input(1, 16, 40), n.input(1, 24, 40, name="m")
    conditions = n.conv(m, 96, 1, pads=0, bias=True)
    for k in range(2):
        own = n.op("Slice", conditions, n.ints(48 * k), n.ints(48 * k + 48), n.ints(1))
        y = gate(n, n.op("Add", n.conv(x, 48, 3, pads=2, dilations=2), own))
        x = n.op("Add", x, n.conv(y, 16, 1, pads=0, bias=True))
    return x


def of_far_taps(n: Net) -> Value:
    """Taps that are too far apart for TMA: the line is read as rows."""
    x, m = n.input(1, 16, 800), n.input(1, 24, 800, name="m")
    return gate(n, n.op("Add", n.conv(x, 32, 3, pads=200, dilations=200), n.conv(m, 32, 1, pads=0)))


NETS: dict[str, Callable[[Net], Value]] = {
    f.__name__: f for f in (of_a_line, of_an_image, of_one_tap, with_conditions, of_two_layers, of_far_taps)
}


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
@pytest.mark.parametrize("name", NETS)
def test_a_gate_is_one_launch(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tactic in (PairedConv, PairedParts, PartsConv):
        monkeypatch.setattr(tactic, "defer", lambda self, b, op: None)
    program = check_simulated(built(NETS[name]), precision)
    tactic = PairedParts.name if precision == "fp32" else PairedConv.name
    layers = 2 if name == "of_two_layers" else 1
    assert kinds(program).count("PairedConv") == layers
    assert kinds(program).count("Conv") == (layers if name == "of_two_layers" else 0)
    assert [t for t in tactics(program, "Conv") if t.startswith("conv_paired")] == [tactic] * layers


def two(n: Net, change: str = "") -> Value:
    """``Relu(conv(x)) * conv(x)``. One convolution is changed."""
    x = n.input(1, 16, 12, 12)
    channels = 20 if change == "odd" else 24
    own = n.conv(x, channels, bias=change == "bias")
    y = n.input(1, 16, 12, 12, name="y") if change == "image" else x
    other = n.conv(y, channels, 1 if change == "kernel" else 3, pads=0 if change == "kernel" else 1)
    if change == "scaled":
        other = n.op("Mul", n.op("Tanh", other), n.const(3.0))
    if change == "residual":
        other = n.op("Add", n.op("Tanh", other), y)
    return n.op("Add" if change == "sum" else "Mul", n.op("Relu", own), other)


@pytest.mark.parametrize(
    ("build", "precision", "because"),
    [
        (lambda n: two(n, "sum"), "fp16", "it is not multiplied by another convolution of the same image"),
        (lambda n: two(n, "image"), "fp16", "it is not multiplied by another convolution of the same image"),
        (lambda n: two(n, "kernel"), "fp16", "it is not multiplied by another convolution of the same image"),
        (lambda n: two(n, "odd"), "fp16", "its number of channels is not a multiple of 8"),
        (lambda n: two(n, "scaled"), "fp16", "its stages have constants"),
        (lambda n: two(n, "sum"), "fp32", "it is not multiplied by another convolution of the same image"),
        (lambda n: gate(n, n.conv(n.input(1, 3, 12, 12), 32)), "fp16", "reads 3 channels"),
        (
            lambda n: gate(n, n.conv(n.input(1, 16, 800), 32, 3, pads=150, dilations=150)),
            "fp16",
            "TMA's corners are 8-bit",
        ),
        (
            lambda n: gate(
                n,
                n.op(
                    "Add",
                    n.conv(n.input(1, 16, 800), 32, 3, pads=200, dilations=200),
                    n.conv(n.input(1, 16, 800, name="m"), 32, 3),
                ),
            ),
            "fp16",
            "read lines in rows of different lengths",
        ),
    ],
)
def test_refusals(build: Callable[[Net], Value], precision: str, because: str) -> None:
    program = lowered(built(build), precision)
    assert any(because in reason for reason in refusals(program, "conv_paired*"))
    assert "PairedConv" not in kinds(program)


def test_a_factor_with_slopes_of_its_channels_is_refused() -> None:
    n = Net()
    x = n.input(1, 16, 12, 12)
    program = lowered(n.done(n.op("Mul", n.conv(x, 24), n.op("PRelu", n.conv(x, 24), n.random(24, 1, 1)))))
    assert any("is more than an activation" in reason for reason in refusals(program, "conv_paired*"))


def test_two_launches_that_are_predicted_to_be_faster_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairedConv, "configs", lambda self, b, op: [Offer(None, 1.0)])
    monkeypatch.setattr(NarrowConv, "refuse", lambda *given: "it is left out")
    program = lowered(built(two))
    assert tactics(program, "Conv") == ["conv_sm90", "conv_sm90"]
    assert any("two launches are predicted to take" in reason for reason in refusals(program, "conv_paired*"))


def far(pads: int | tuple[int, int], dilation: int, length: int = 800) -> Callable[[Net], Value]:
    def build(n: Net) -> Value:
        x = n.input(2, 16, length)
        return n.op("Add", n.op("Relu", n.conv(x, 16, 3, pads=pads, dilations=dilation, bias=True)), x)

    return build


@pytest.mark.parametrize("pads", [200, (400, 0)])
def test_a_line_whose_taps_are_far_apart_lies_in_rows(pads: int | tuple[int, int]) -> None:
    program = check_simulated(built(far(pads, 200)))
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "Conv"]
    assert step.params["tactic"].startswith("conv_sm90")
    assert step.params["op"]["attrs"]["dilations"] == [1, 1]
    assert step.params["reads"][0][2] == [2, 16, 4, 200]


@pytest.mark.parametrize(("pads", "dilation", "length"), [(150, 150, 800), (120, 200, 800), (300, 300, 800)])
def test_a_line_that_rows_do_not_fit_stays(pads: int, dilation: int, length: int) -> None:
    n = Net()
    y = n.conv(n.input(2, 16, length), 16, 3, pads=pads, dilations=dilation)
    program = lowered(n.done(y))
    assert not [t for t in tactics(program, "Conv") if t == "conv_sm90"]
    assert any("TMA's corners are 8-bit" in reason for reason in refusals(program, "conv_sm90"))


def test_sums_of_two_convolutions_of_lines_are_one_launch() -> None:
    n = Net()
    x, m = n.input(2, 16, 40), n.input(2, 24, 40, name="m")
    program = check_simulated(n.done(n.op("Relu", n.op("Add", n.conv(x, 32, 3), n.conv(m, 32, 1, pads=0)))))
    assert kinds(program).count("ConvSum") == 1
    assert "Conv" not in kinds(program)


def problem(**changed: Any) -> Problem:
    images = Source(1, 4096, 64, (1, 3), (1, 1), (0, 1, 0, 1))
    stages: dict[str, Any] = {"epilogue": (("bias",), ("tanh",), ("mul",)), "beside": (("bias",), ("sigmoid",))}
    return Problem(**{"batch": 2, "channels": 256, "sources": (images,), **stages, **changed})


def test_patches_and_other_results_take_no_pairs() -> None:
    config = next(iter(patch_kernel.candidates(problem(beside=None, epilogue=(("bias",),)), _gpu())))
    assert patch_kernel.refuse(problem(), config) == "it does not combine pairs of channels"
    for wrong in ({"pooled": True}, {"scatter": True}, {"out": "float32"}):
        with pytest.raises(InternalError, match="have pairs of channels"):
            problem(**wrong)


def _gpu() -> Any:
    from optdnn.runtime.cuda.device import facts_for
    from optdnn.target_name import TargetName

    return facts_for(TargetName.parse("cuda:sm_90a"))


@pytest.mark.nvrtc
def test_the_kernel_compiles_without_spills() -> None:
    both = problem(sources=(Source(1, 4096, 64, (1, 3), (1, 1), (0, 1, 0, 1)), Source(1, 4096, 80)))
    for made in (problem(), both):
        for config in (
            Config(2, 1, 1, 128, 4),
            Config(1, 1, 2, 64, 4, alternate=True),
            Config(1, 2, 1, 64, 5, direct=True),
        ):
            check_no_spills(made, config)
        check_no_spills(replace(made, dtype="tfloat32", out="float32"), Config(2, 1, 1, 96, 2, direct=True))
        check_no_spills(replace(made, dtype="float32"), PartsConfig(2, 1, 144, 3))


def test_biases_of_both_factors_are_added() -> None:
    """Also if one factor has none."""
    n = Net()
    x = n.input(1, 16, 12)
    own, other = n.conv(x, 16, 3, bias=True), n.conv(x, 16, 3)
    program = check_simulated(n.done(n.op("Mul", n.op("Tanh", own), n.op("Sigmoid", other))))
    assert "PairedConv" in kinds(program)


def large(n: Net) -> Value:
    """More tiles than multiprocessors, and a last tile that is cut."""
    x, m = n.input(2, 72, 9001), n.input(2, 40, 9001, name="m")
    return gate(n, n.op("Add", n.conv(x, 272, 3, pads=2, dilations=2, bias=True), n.conv(m, 272, 1, pads=0)))


@pytest.mark.hopper
@pytest.mark.parametrize("precision", PAIR_TOLERANCE)
@pytest.mark.parametrize("config", [*CONFIGS, *STORED], ids=str)
@pytest.mark.parametrize("name", [*NETS, "large"])
def test_each_configuration_on_a_gpu(
    name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_of(monkeypatch, PairedParts if precision == "fp32" else PairedConv, config)
    graph = built({**NETS, "large": large}[name])
    found = checked_launches(graph, precision, PAIR_TOLERANCE[precision])
    assert "PairedConv" in {e.kind for e in found}
