"""Transposed convolutions as convolutions to blocks of pixels: geometry, programs with every kernel family, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.net import Net, built
from support.on_gpu import checked_launches
from support.one_config import only_of
from support.simulated import (
    TOLERANCE,
    check_simulated,
    kinds,
    lowered,
    refusals,
    results_of,
    tactics,
)
from support.spills import check_spills

from optdnn.ir.graph import Value
from optdnn.kernels.conv import parts_kernel
from optdnn.kernels.conv.hopper_launch import family, ranked
from optdnn.kernels.conv.parts_kernel import PartsConfig
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.conv.subpixel import Axis, block_weights
from optdnn.kernels.conv.transpose import PartsConvTranspose, TiledConvTranspose
from optdnn.ops.conv import ConvTransposeAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.conv import conv, conv_transpose


def transposed(
    n: Net, x: Value, channels: int, kernel: tuple[int, ...], strides: tuple[int, ...], pads: tuple[int, ...] = (),
    extra: tuple[int, ...] = (), dilations: tuple[int, ...] = (), group: int = 1, bias: bool = True,
) -> Value:  # fmt: skip
    rank, c = len(kernel), n.dims(x)[1]
    assert isinstance(c, int)
    w = n.random(c, channels // group, *kernel, scale=(c * 2) ** -0.5)
    attrs = ConvTransposeAttrs(strides, pads or (0,) * 2 * rank, dilations or (1,) * rank, extra or (0,) * rank, group)
    return n.op("ConvTranspose", x, w, *([n.random(channels)] if bias else []), attrs=attrs)


def residual(n: Net) -> Value:
    x = n.input(2, 8, 5, 4)
    y = transposed(n, x, 16, (4, 4), (2, 2), (1, 1, 1, 1))
    return n.op("Add", n.op("Relu", y), transposed(n, x, 16, (2, 2), (2, 2)))


NETS: dict[str, Callable[[Net], Value]] = {
    "4x4 by 2, padded": lambda n: n.op("Relu", transposed(n, n.input(2, 16, 5, 4), 24, (4, 4), (2, 2), (1, 1, 1, 1))),
    "3x3 by 2, output padding": lambda n: transposed(n, n.input(2, 8, 5, 4), 8, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    "2x2 by 2": lambda n: n.op("Sigmoid", transposed(n, n.input(2, 8, 5, 4), 8, (2, 2), (2, 2))),
    "5x5 by 3": lambda n: transposed(n, n.input(2, 8, 5, 4), 3, (5, 5), (3, 3), (0, 1, 2, 1)),
    "a line": lambda n: transposed(n, n.input(2, 8, 7), 16, (4,), (2,), (1, 2)),
    "18 channels": lambda n: transposed(n, n.input(2, 8, 5, 4), 2, (3, 3), (3, 3)),
    "40 channels": lambda n: transposed(n, n.input(2, 8, 5, 4), 10, (2, 2), (2, 2), (1, 0, 0, 1)),
    "holes": lambda n: transposed(n, n.input(2, 8, 5, 4), 8, (3, 2), (2, 3), (1, 0, 2, 1), dilations=(2, 1)),
    "stride 1": lambda n: n.op("Relu", transposed(n, n.input(2, 8, 5, 4), 8, (3, 3), (1, 1), (1, 1, 1, 1), dilations=(1, 2))),
    "stride 1 along an axis": lambda n: transposed(n, n.input(2, 8, 5, 4), 8, (3, 4), (1, 2), (1, 1, 1, 1), bias=False),
    "more pads than taps": lambda n: transposed(n, n.input(2, 8, 7, 6), 8, (2, 3), (2, 1), (5, 3, 4, 4)),
    "windows with gaps": lambda n: transposed(n, n.input(2, 8, 5, 4), 8, (2, 2), (3, 4), (1, 0, 0, 0), (2, 0)),
    "a residual": residual,
    "inside a network": lambda n: n.conv(transposed(n, n.input(2, 8, 7, 5), 16, (5, 4), (3, 2), (1, 0, 2, 1), (0, 1)), 8, 1, pads=0),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_programs_compute_the_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("fp16", "tf32"):
        program = check_simulated(built(NETS[name]), precision)
        assert set(tactics(program, "ConvTranspose")) == {"subpixel_sm90"}
    for tactic, why in ((PartsConvTranspose, None), (TiledConvTranspose, "the test takes another kernel")):
        monkeypatch.setattr(PartsConvTranspose, "defer", lambda self, b, op, why=why: why)
        program = check_simulated(built(NETS[name]), "fp32")
        assert set(tactics(program, "ConvTranspose")) == {tactic.name}


@pytest.mark.parametrize("name", ["4x4 by 2, padded", "a line", "stride 1", "a residual"])
def test_programs_before_hopper_compute_the_network(name: str) -> None:
    program = check_simulated(built(NETS[name]), "bf16", target="cuda:sm_80")
    assert set(tactics(program, "ConvTranspose")) == {"subpixel_sm80"}


@pytest.mark.parametrize(
    ("name", "precision", "launches"),
    [
        ("4x4 by 2, padded", "fp32", ["ConvBlocks", "Copy"]),
        ("4x4 by 2, padded", "tf32", ["Copy", "ConvBlocks", "Copy"]),
        ("5x5 by 3", "fp32", ["Conv", "BlocksToSpace"]),
    ],
)
def test_a_result_with_a_plane_per_channel_is_copied_there(name: str, precision: str, launches: list[str]) -> None:
    program = lowered(built(NETS[name]), precision)
    assert kinds(program) == launches, "three channels are written directly"


def test_the_operators_after_the_blocks_are_one_launch() -> None:
    program = lowered(built(NETS["a residual"]), "fp16")
    after = kinds(program)[1:]  # the image's layout
    assert after == ["ConvBlocks", "Conv", "BlocksToSpace", "Pointwise"], "and the network's result is fp32"


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda n: transposed(n, n.input(2, 8, 5, 4), 8, (4, 4), (2, 2), group=2), "it has 2 groups"),
        (lambda n: n.op("ConvTranspose", n.input(1, 4, 5, 4), n.input(4, 4, 2, 2, name="w"), attrs=ConvTransposeAttrs((2, 2), (0,) * 4, (1, 1), (0, 0))), "weights are not constant"),
        (lambda n: transposed(n, n.input(1, 4, 2, 2), 4, (2, 2), (2, 2), (4, 4, 0, 0), (1, 1)), "cut off all results"),
        (lambda n: n.op("ConvTranspose", n.input(1, 4, 5, 4), n.random(4, 4, 2, 2), n.input(4, name="b"), attrs=ConvTransposeAttrs((2, 2), (0,) * 4, (1, 1), (0, 0))), "bias is not constant"),
    ],
)  # fmt: skip
def test_refusals(build: Callable[[Net], Value], reason: str) -> None:
    program = lowered(built(build), "fp16")
    assert tactics(program, "ConvTranspose") == ["conv_transpose_direct"]
    refused = refusals(program)
    assert any(reason in r for r in refused), refused


DEPTHWISE: dict[str, Callable[[Net], Value]] = {
    "12x1 by 2": lambda n: n.op("Relu", depthwise(n, n.input(2, 16, 5, 4), (12, 1), (2, 1), (5, 0, 5, 0))),
    "4x4 by 2": lambda n: depthwise(n, n.input(2, 24, 5, 4), (4, 4), (2, 2), (1, 1, 1, 1), bias=False),
    "output padding, holes": lambda n: depthwise(n, n.input(1, 4, 5, 4), (3, 2), (3, 2), (1, 0, 2, 1), (1, 0), (2, 1)),
    "a line": lambda n: depthwise(n, n.input(2, 8, 7), (4,), (2,), (1, 2)),
    "a volume": lambda n: depthwise(n, n.input(1, 8, 2, 3, 4), (2, 3, 2), (2, 1, 2), (0, 1, 0, 0, 1, 0)),
}  # fmt: skip


def depthwise(n: Net, x: Value, *rest: Any, bias: bool = True) -> Value:
    """A transposed convolution with a filter per channel between two convolutions, which want neighboring channels."""
    channels = n.dims(x)[1]
    assert isinstance(channels, int)
    y = transposed(n, n.conv(x, channels, 1, pads=0), channels, *rest, group=channels, bias=bias)
    return n.conv(y, channels, 1, pads=0)


@pytest.mark.parametrize("name", DEPTHWISE)
def test_a_filter_per_channel_takes_neighboring_channels_at_once(name: str) -> None:
    for precision in ("fp16", "fp32"):
        program = check_simulated(built(DEPTHWISE[name]), precision)
        by_tiles = "" if "holes" in name else "_tiles"
        assert tactics(program, "ConvTranspose") == [f"depthwise_transpose{by_tiles}"]


def test_channels_that_are_apart_in_memory_are_computed_one_by_one() -> None:
    n = Net()
    program = lowered(n.done(transposed(n, n.input(1, 7, 5, 4), 7, (4, 4), (2, 2), group=7)), "fp16")
    assert tactics(program, "ConvTranspose") == ["conv_transpose_direct"]
    assert "no two of its channels are neighbors in memory" in refusals(program)


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_odd_channels_before_hopper(precision: str) -> None:
    for channels, filters in ((12, 8), (8, 7)):
        n = Net()
        graph = n.done(transposed(n, n.input(1, channels, 5, 4), filters, (3, 3), (1, 1)))
        program = lowered(graph, precision, target="cuda:sm_80")
        assert tactics(program, "ConvTranspose") == ["subpixel_sm80"]
        for got, want in results_of(program, graph):
            assert np.abs(got - want).max() <= TOLERANCE[precision] * np.abs(want).max()


def test_tensors_too_large_for_the_fp32_kernel_are_refused() -> None:
    for shape, reason in (((1, 2, 16400), "larger than 16384"), ((768, 8, 512, 256), "32-bit offsets")):
        n = Net()
        rank = len(shape) - 2
        program = lowered(n.done(transposed(n, n.input(*shape), 8, (2,) * rank, (2,) * rank)), "fp32")
        refused: list[Any] = [r for t in program.meta["tactics"] for r in t.get("refused", ())]
        assert any(r["tactic"] == "subpixel_fp32" and reason in r["reason"] for r in refused), refused


def test_weights_in_blocks_give_the_transposed_convolution_exactly() -> None:
    rng = np.random.default_rng(3)
    for kernel, stride, dilation, pad, end in (
        (4, 2, 1, 1, 1),
        (3, 2, 1, 1, 0),
        (5, 3, 2, 2, 4),
        (2, 5, 1, 1, 0),
        (3, 1, 2, 1, 1),
    ):
        x, w = rng.standard_normal((1, 2, 6, 1)), rng.standard_normal((2, 3, kernel, 1))
        want = conv_transpose(
            x, w, strides=(stride, 1), pads=(pad, 0, end, 0), dilations=(dilation, 1), output_padding=(0, 0)
        )[0]
        axes = Axis.of(6, want.shape[2], kernel, stride, dilation, pad), Axis.of(1, 1, 1, 1, 1, 0)
        packed = block_weights(w, axes, (dilation, 1))
        assert np.count_nonzero(packed) == w.size
        (begin, after) = axes[0].pads
        assert min(begin, after) >= 0
        made = conv(x, packed, strides=(1, 1), pads=(begin, 0, after, 0), dilations=(axes[0].dilation, 1))[0]
        whole = made.reshape(1, stride, 3, -1).transpose(0, 2, 3, 1).reshape(1, 3, -1)
        got = whole[:, :, axes[0].crop : axes[0].crop + want.shape[2], None]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("2x2 by 2", ["ConvBlocks"]),
        ("40 channels", ["ConvBlocks"]),
        ("18 channels", ["Conv", "BlocksToSpace"]),
        ("5x5 by 3", ["Conv", "BlocksToSpace"]),
        ("stride 1", ["Conv"]),
    ],
)
def test_blocks_of_an_even_number_of_channels_are_scattered_in_fp32(
    name: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartsConvTranspose, "defer", lambda self, b, op: None)
    program = lowered(built(NETS[name]), "fp32")
    ops = [step.params["op"] for step in program.steps if "op" in step.params]
    assert [op["attrs"].get("of", op["kind"]) for op in ops if op["kind"] != "Copy"] == launches


@pytest.mark.parametrize(("size", "tactic"), [(64, "subpixel_parts_sm90"), (2, "subpixel_fp32")])
def test_large_images_in_fp32_take_tensor_cores(size: int, tactic: str) -> None:
    program = lowered(built(lambda n: transposed(n, n.input(2, 64, size, size), 64, (4, 4), (2, 2), (1,) * 4)), "fp32")
    assert tactics(program, "ConvTranspose") == [tactic]
    if size == 2:
        assert any("it is predicted to take" in r for r in refusals(program, "subpixel_parts_sm90"))


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "tfloat32"])
def test_direct_stores_that_scatter_compile_without_spills(dtype: str) -> None:
    source, out = Source(28, 28, 128, (2, 2), (1, 1), (1, 1, 1, 1), (1, 1)), "float32" if dtype == "tfloat32" else ""
    problem = Problem(16, 256, (source,), (("bias",), ("gelu",)), dtype, out, scatter=True)
    config = next(o.config for o in ranked(problem, of_arch("sm_90a")) if o.config.stores_directly)
    check_spills(family(config).recipe(problem, config), family(config).FUNCTION)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "config", [PartsConfig(1, 2, 128, 3), PartsConfig(2, 1, 144, 4), PartsConfig(1, 1, 56, 4, 8)], ids=str
)
def test_scattering_kernels_compile_without_spills(config: PartsConfig) -> None:
    source = Source(14, 14, 128, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    problem = Problem(
        16, 256, (source,), (("bias",), ("gelu",)), "float32", scatter=True, selective=True, equalized=True
    )
    assert parts_kernel.refuse(problem, config) is None
    check_spills(parts_kernel.recipe(problem, config), parts_kernel.FUNCTION)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "config", [PartsConfig(2, 1, 32, 3), PartsConfig(1, 2, 24, 3), PartsConfig(1, 1, 16, 3, 2)], ids=str
)
@pytest.mark.parametrize("name", NETS)
def test_tensor_cores_of_fp32_on_a_gpu(name: str, config: PartsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, PartsConvTranspose, config)
    assert checked_launches(built(NETS[name]), "fp32", 2e-6)


@pytest.mark.hopper
def test_launches_on_a_gpu_give_what_they_mean() -> None:
    for precision, bound in (("fp16", 2e-3), ("bf16", 1.6e-2), ("tf32", 1e-5), ("fp32", 2e-6)):
        for name, build in (NETS | DEPTHWISE).items():
            graph = built(build)
            assert {"Conv", "ConvBlocks", "ConvTranspose", "WeightsInParts"} & {
                e.kind for e in checked_launches(graph, precision, bound)
            }, name
