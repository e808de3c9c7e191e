"""Convolutions of several taps that apply a ReLU to their pixels (residual blocks of RefineNet, VQ-VAE and HiFi-GAN)."""

from __future__ import annotations

import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds, lowered

from optdnn.errors import InternalError
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.conv.hopper_launch import ranked
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.unary import LeakyReluAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

GPU = of_arch("sm_90a")


def blocks(
    activation: str = "Relu", *, channels: int = 64, size: tuple[int, ...] = (20, 16), kernel: int = 3, count: int = 2
) -> Graph:
    """Residual blocks: each adds convolutions of the activated input to the input."""
    n = Net()
    x = n.conv(n.input(1, 16, *size), channels, 1, pads=0)
    attrs = LeakyReluAttrs(0.1) if activation == "LeakyRelu" else None
    for _ in range(count):
        y = n.conv(n.op(activation, x, attrs=attrs), channels, kernel, bias=True, pads=kernel // 2)
        x = n.op("Add", n.conv(n.op(activation, y, attrs=attrs), channels, kernel, bias=True, pads=kernel // 2), x)
    return n.done(n.conv(x, 16, 1, pads=0))


def divisive(*, inverse: bool, channels: int = 64, size: tuple[int, ...] = (20, 16), kernel: int = 1) -> Graph:
    """Divisive normalization of image compression (GDN: Ballé et al., 2016): each value is divided by the root of a weighted sum of the
    squares of its pixel's channels. ``inverse``: it is multiplied."""
    n = Net()
    x = n.conv(n.input(1, 16, *size), channels, 1, pads=0)
    taps, pads = (kernel,) * len(size), (kernel // 2,) * 2 * len(size)
    attrs = ConvAttrs((1,) * len(size), pads, (1,) * len(size))
    weight = n.const(0.01 * n.rng.uniform(size=(channels, channels, *taps)))
    total = n.op("Sqrt", n.op("Conv", n.op("Mul", x, x), weight, n.positive(channels), attrs=attrs))
    return n.done(n.conv(n.op("Mul" if inverse else "Div", x, total), 16, 1, pads=0))


DIVISIVE = {
    "GDN": divisive(inverse=False),
    "inverse GDN": divisive(inverse=True),
    "GDN of few channels": divisive(inverse=False, channels=24),
    "GDN of sequences": divisive(inverse=False, size=(150,)),
    "GDN of windows": divisive(inverse=False, kernel=3),
}
NETS = {
    "images": blocks(),
    "leaky": blocks("LeakyRelu", size=(9, 11)),
    "sequence": blocks("LeakyRelu", size=(150,), kernel=7),
    "few channels": blocks(channels=24, kernel=5),
    "SiLU": blocks("Swish"),
    "ELU": blocks("Elu", size=(150,)),
    "GELU": blocks("Gelu", channels=32),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NETS)
def test_the_convolution_applies_the_activation(name: str, precision: str) -> None:
    program = check_simulated(NETS[name], precision, tolerance=6e-2 if precision == "bf16" else 1e-2)
    assert [k for k in kinds(program) if k in ("Conv", "Pointwise")].count("Conv") == 6
    assert "Pointwise" not in kinds(program)[1:-1]
    before = [s.params["op"]["attrs"]["prologue"] for s in program.steps if s.params["op"]["kind"] == "Conv"]
    assert sum(bool(stages) for stages in before) == 2


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", DIVISIVE)
def test_one_launch_normalizes_by_division(name: str, precision: str) -> None:
    program = check_simulated(DIVISIVE[name], precision)
    between = [s.params["op"] for s in program.steps if s.params["op"]["kind"] in ("Conv", "Pointwise")][-3:-1]
    assert [op["kind"] for op in between][-1] == "Conv"
    (own,) = [op for op in between if op["attrs"].get("prologue")]
    assert [stage["stage"][0] for stage in own["attrs"]["prologue"]] == ["Mul"]
    root = [stage["stage"][0] for stage in own["attrs"]["epilogue"]]
    assert root == (["Sqrt", "Mul"] if name == "inverse GDN" else ["Sqrt", "Reciprocal", "Mul"])


def test_products_that_fill_the_gpu_leave_it_to_a_launch() -> None:
    program = lowered(blocks(channels=512, size=(128, 128), count=1), "fp16")
    assert "Pointwise" in kinds(program)[1:-1]


def test_other_activations_take_a_launch() -> None:
    assert "Pointwise" in kinds(check_simulated(blocks("Sigmoid", count=1), "fp16"))[1:-1]


def problem(*stages: tuple[str | float, ...], kernel: tuple[int, int] = (3, 3)) -> Problem:
    pads = tuple(k // 2 for k in kernel) * 2
    return Problem(1, 64, (Source(20, 16, 64, kernel, (1, 1), pads),), (("bias",),), "float16", prologue=stages)


def test_stages_after_padding_keep_zeros() -> None:
    assert problem(("relu",)).k_steps == 9
    assert problem(("gate",), kernel=(1, 1)).k_steps == 1
    for stage in (("gate",), ("scale_shift",), ("sigmoid",)):
        with pytest.raises(InternalError, match="keeps the zeros of padding"):
            problem(stage)


@pytest.mark.nvrtc
def test_kernels_compile_without_spills() -> None:
    one = problem(("leaky_relu", 0.1))
    found = [offer.config for offer in ranked(one, GPU) if isinstance(offer.config, implicit_gemm.Config)]
    assert found
    for config in found[:3]:
        (kernel,) = nvrtc.resources(implicit_gemm.recipe(one, config)).values()
        assert kernel.spill_bytes == 0, str(config)


@pytest.mark.hopper
@pytest.mark.parametrize("name", [*NETS, *DIVISIVE])
def test_every_launch_does_what_its_step_means(name: str) -> None:
    checked_launches({**NETS, **DIVISIVE}[name], "fp16")
