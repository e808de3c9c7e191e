"""True-fp32 convolutions and products in tiles: the operators that run on them, their meanings, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.layout import compile_checks
from support.net import Net, built
from support.on_gpu import launch_errors
from support.simulated import check_simulated, lowered, refusals, tactics
from support.spills import check_spills

from optdnn.config import BuildOptions
from optdnn.errors import InternalError
from optdnn.ir.graph import Value
from optdnn.kernels.conv import fp32_kernel as fp32
from optdnn.kernels.conv.parameters import Scatter
from optdnn.kernels.conv.parts import PartsConv, PartsGemm
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.ops.conv import ConvAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch


@pytest.fixture(autouse=True)
def scalar_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go first, although tensor cores are predicted to be faster."""
    for tactic in (PartsConv, PartsGemm):
        monkeypatch.setattr(tactic, "defer", lambda self, b, op: "scalar units are tested")


def residual_block(n: Net) -> Value:
    x = n.op("Relu", n.conv(n.input(2, 16, 9, 7), 24, bias=True))
    return n.op("Relu", n.op("Add", n.conv(x, 24, 1, pads=0, bias=True), x))


def backward(n: Net, *shape: int, name: str = "x") -> Value:
    """An input whose rows are read from the last one to the first."""
    return n.op("Slice", n.input(*shape, name=name), n.ints(-1), n.ints(-shape[-2] - 1), n.ints(-2), n.ints(-1))


NETS: dict[str, Callable[[Net], Value]] = {
    "a residual block": residual_block,
    "a stem": lambda n: n.op("Relu", n.conv(n.input(2, 5, 34, 30), 16, 7, pads=3, strides=2, bias=True)),
    "odd channels": lambda n: n.conv(n.conv(n.input(2, 16, 9, 7), 21), 6),
    "groups": lambda n: n.op("Relu", n.conv(n.input(2, 32, 9, 7), 48, group=4, bias=True)),
    "groups of few channels": lambda n: n.conv(n.input(2, 6, 9, 7), 16, group=2),
    "one axis": lambda n: n.conv(n.input(2, 16, 20), 12, 5, pads=2),
    "dilated, strided": lambda n: n.op("Sigmoid", n.conv(n.input(2, 16, 15, 13), 32, dilations=2, strides=2, pads=2)),
    "gemm": lambda n: n.op("Relu", n.gemm(n.op("Relu", n.gemm(n.input(5, 32), 40)), 10)),
    "rows in reverse": lambda n: n.op("Relu", n.gemm(backward(n, 12, 32), 40)),
    "rows of three axes": lambda n: n.op("Gelu", n.matmul(n.input(3, 5, 32), 24)),
}


@pytest.mark.parametrize("name", NETS)
def test_programs_compute_the_network(name: str) -> None:
    program = check_simulated(built(NETS[name]), "fp32")
    assert {"conv_fp32", "gemm_fp32"} & set(tactics(program))
    assert not {"conv_direct", "matmul_tiled"} & set(tactics(program))


def weights_over_three_axes(n: Net) -> Value:
    attrs = ConvAttrs((1, 1, 1), (0,) * 6, (1, 1, 1))
    return n.op("Conv", n.input(1, 2, 4, 5, 6), n.input(8, 2, 3, 3, 3, name="w"), attrs=attrs)  # type: ignore[no-any-return]


def computed_bias(n: Net) -> Value:
    attrs = ConvAttrs((1, 1), (0,) * 4, (1, 1))
    return n.op("Conv", n.input(1, 16, 5, 6), n.random(8, 16, 3, 3), n.input(8, name="b"), attrs=attrs)  # type: ignore[no-any-return]


def no_channels(n: Net) -> Value:
    return n.op("Conv", n.input(1, 0, 5, 6), n.random(8, 0, 3, 3), attrs=ConvAttrs((1, 1), (0,) * 4, (1, 1)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("build", "precision", "reason"),
    [
        (lambda n: n.conv(n.input(2, 16, 9, 7), 16), "fp16", "the kernel takes fp32, not float16"),
        (lambda n: n.conv(n.input(2, 16, 9, 7), 16, group=4), "fp32", "a group of 4 filters"),
        (lambda n: n.conv(n.input(2, 4, 9, 7), 20, group=2), "fp32", "a group has 10 filters, not a multiple of 4"),
        (computed_bias, "fp32", "its bias is not constant"),
        (no_channels, "fp32", "it has no channels"),
        (weights_over_three_axes, "fp32", "not of one or two spatial axes"),
        (lambda n: n.conv(n.input(1, 2, 3, 16400), 8, pads=1), "fp32", "larger than 16384"),
        (lambda n: n.matmul(n.input(1 << 22, 1024), 8), "fp32", "more elements than 32-bit offsets"),
        (lambda n: n.conv(n.input(1 << 12, 8, 256, 256), 8), "fp32", "more elements than 32-bit offsets"),
        (lambda n: n.op("MatMul", n.input(4, 8), n.input(8, 4, name="m")), "fp32", "not a constant matrix"),
    ],
)
def test_refusals(build: Callable[[Net], Value], precision: str, reason: str) -> None:
    assert any(reason in r for r in refusals(lowered(built(build), precision))), reason


def test_a_few_channel_image_is_read_as_it_is_given() -> None:
    program = lowered(built(NETS["a stem"]), "fp32")
    assert [s.params["op"]["kind"] for s in program.steps] == ["Conv", "Copy"], "the copy is of the result"


DENSE = fp32.Problem(
    2, 14, 14, 64, 128, (3, 3), fp32.Strides(12544, 896, 64), fp32.Strides(25088, 1792, 128), padding=(1,) * 4
)
PROBLEMS = {
    "whole": (DENSE, fp32.Config(128, 128)),
    "a cluster": (DENSE, fp32.Config(32, 32, 4, 4, split=8)),
    "planes": (replace(DENSE, in_channels=3, at=fp32.Strides(588, 14, 1), plane=196), fp32.Config(128, 64)),
    "odd": (replace(DENSE, channels=127, out_at=fp32.Strides(24892, 1778, 127)), fp32.Config(64, 64, 4, 8, 32, 2)),
    "a residual": (
        replace(DENSE, epilogue=(("bias",), ("add",), ("gelu",)), residual_at=DENSE.out_at), fp32.Config(64, 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.nvrtc
def test_kernels_compile_without_spills(name: str) -> None:
    problem, config = PROBLEMS[name]
    for arch in ("sm_90a", "sm_80") if config.split == 1 else ("sm_90a",):
        assert fp32.refuse(problem, config, arch) is None
        check_spills(fp32.recipe(problem, config, arch), threads=config.threads)


@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout() -> None:
    problem, config = PROBLEMS["a residual"]
    made = fp32.launch(problem, config, of_arch("sm_90a"))
    compile_checks(made, {str(p.operand): p.at for p in made.pointers}, f"sizeof(Params) == {len(made.parameters)}")
    assert {p.operand for p in made.pointers} == {"pixels", "weights", "bias", "residual", "output"}


def test_configurations_and_their_refusals() -> None:
    found = fp32.candidates(DENSE, of_arch("sm_90a"))
    assert {c.split for c in found} >= {1, 2, 8}
    assert all(c.split == 1 for c in fp32.candidates(DENSE, of_arch("sm_80")))
    for config, reason in (
        (fp32.Config(100, 64), "not a tile"),
        (fp32.Config(128, 128, stages=12), "shared memory"),
        (fp32.Config(32, 32, 4, 4, split=30), "too few for 30 blocks"),
        (fp32.Config(16, 96, 4, 4), "its threads do not share the copies evenly"),
    ):
        assert reason in str(fp32.refuse(DENSE, config))
    assert all(fp32.Config.read(str(c)) == c for c in fp32.CONFIGS)
    assert fp32.Config.read("ffma64x64") is None
    assert "other depths" in str(fp32.refuse(DENSE, fp32.Config(64, 64, depth=24)))
    scatter = Scatter((2, 2), (0, 0), 30, (28, 28), (1, 1, 1))
    assert "a multiple of 4 channels" in str(fp32.no_kernel(replace(DENSE, channels=120, scatter=scatter)))
    large = replace(DENSE, batch=1 << 20)
    assert "more elements" in str(fp32.refuse(large, found[0]))
    assert "do not divide" in str(fp32.no_kernel(replace(DENSE, groups=3)))
    assert fp32.no_kernel(replace(DENSE, kernel=(20, 1))) == "it is empty"


def test_a_choice_that_cannot_run_is_an_error() -> None:
    n = Net()
    graph = n.done(n.conv(n.input(1, 16, 9, 7), 16))
    (row,) = [t for t in lowered(graph, "fp32").meta["tactics"] if t["kind"] == "Conv"]
    options = BuildOptions(target="simulate", precision="fp32")
    optimize(graph, options, "simulate")
    choice = TacticChoice("conv_fp32", str(fp32.Config(64, 64, split=16)))
    with pytest.raises(InternalError, match="are too few for 16 blocks"):
        lower_cuda(graph, options, of_arch("sm_90a"), {}, prepared=Prepared({row["signature"]: choice}))


def test_only_chains_in_the_order_of_k_are_row_invariant() -> None:
    n = Net()
    graph = n.done(n.conv(n.input(1, 512, 7, 7), 64))
    assert any("k" in t["config"][4:] for t in lowered(graph, "fp32").meta["tactics"] if t["tactic"] == "conv_fp32")
    (row,) = [t for t in lowered(graph, "fp32", row_invariant=True).meta["tactics"] if t["kind"] == "Conv"]
    assert row["tactic"] == "conv_fp32"
    assert "k" not in row["config"]


@pytest.mark.hopper
def test_launches_on_a_gpu_give_what_they_mean() -> None:
    for name, build in NETS.items():
        graph = built(build)
        assert max(launch_errors(lowered(graph, "fp32", "cuda:sm_90a"), graph, "Conv")) < 2e-6, name


@pytest.mark.hopper
@pytest.mark.parametrize("channels", [64, 20, 3])
def test_every_configuration_on_a_gpu_agrees_with_its_meaning(channels: int) -> None:
    n = Net()
    x = n.input(2, channels, 15, 13)
    graph = n.done(
        n.op("Relu", n.op("Add", n.conv(x, 72, 3, strides=2, pads=1, bias=True), n.input(2, 72, 8, 7, name="r")))
    )
    (row,) = [t for t in lowered(graph, "fp32").meta["tactics"] if t["tactic"] == "conv_fp32"]
    problem = replace(DENSE, in_channels=channels, channels=72)
    for config in fp32.CONFIGS:
        if fp32.refuse(problem, config) is None:
            choices = {row["signature"]: TacticChoice("conv_fp32", str(config))}
            (error,) = launch_errors(lowered(graph, "fp32", "cuda:sm_90a", choices=choices), graph, "Conv")
            assert error < 2e-6, (config, error)
