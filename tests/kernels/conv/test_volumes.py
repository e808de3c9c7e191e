"""Convolutions over three axes on GPUs: what runs them, in how many launches, and that their programs compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import check_simulated, feeds_of, kinds, lowered

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions


def volume(
    n: Net, x: Value, filters: int, kernel: tuple[int, int, int], strides: Any = (1, 1, 1), **more: Any
) -> Value:
    """conv + bn + relu, padded to keep sizes."""
    channels = n.dims(x)[1]
    assert isinstance(channels, int)
    group = more.pop("group", 1)
    pads = more.pop("pads", tuple(k // 2 for k in kernel) * 2)
    w = n.random(
        filters, channels // group, *kernel, scale=(channels // group * kernel[0] * kernel[1] * kernel[2]) ** -0.5
    )
    attrs = ConvAttrs(strides, pads, more.pop("dilations", (1, 1, 1)), group)
    return n.op("Relu", n.bn(n.op("Conv", x, w, attrs=attrs)))  # type: ignore[no-any-return]


def block(n: Net, x: Value, filters: int, stride: int) -> Value:
    """Of a 3-D ResNet."""
    y = volume(n, x, filters, (3, 3, 3), (stride,) * 3)
    y = n.bn(n.conv(y, filters, 3))
    if stride > 1:
        x = n.bn(n.conv(x, filters, 1, pads=0, strides=stride))
    return n.op("Relu", n.op("Add", y, x))  # type: ignore[no-any-return]


def r3d(n: Net) -> Value:
    x = volume(n, n.input(1, 3, 5, 22, 18), 16, (3, 7, 7), (1, 2, 2))
    return block(n, block(n, x, 16, 1), 32, 2)


def factored(n: Net) -> Value:
    """R(2+1)D: 45 and 57 channels, which pixels are filled up behind."""
    x = n.input(2, 3, 5, 18, 14)
    for filters in (45, 57):
        x = volume(n, volume(n, x, filters, (1, 3, 3), (1, 2, 2)), 24, (3, 1, 1), (2, 1, 1))
    return x


NETS: dict[str, Callable[[Net], Value]] = {
    "a 3-D ResNet": r3d,
    "frames, then depth": factored,
    "asymmetric": lambda n: volume(n, n.input(3, 16, 7, 9, 5), 24, (3, 2, 3), (2, 1, 2), pads=(2, 1, 0, 0, 0, 1)),
    "dilated": lambda n: volume(n, n.input(2, 8, 9, 11, 7), 16, (3, 3, 3), dilations=(2, 2, 1), pads=(2, 2, 1) * 2),
    "odd channels": lambda n: volume(n, volume(n, n.input(1, 5, 4, 6, 7), 21, (3, 3, 3)), 13, (2, 3, 3)),
    "groups": lambda n: volume(n, n.input(3, 32, 5, 7, 6), 64, (3, 3, 3), group=2),
    "pools between": lambda n: n.average_pool(volume(n, n.max_pool(volume(n, n.input(1, 8, 8, 12, 12), 16, (3, 3, 3))), 24, (3, 3, 3))),
    "gates": lambda n: n.op("Mul", y := volume(n, n.input(2, 8, 4, 6, 5), 16, (3, 3, 3)), n.op("Sigmoid", n.op("GlobalAveragePool", y))),
}  # fmt: skip


def tactics(program: Program) -> set[str]:
    return {t["tactic"] for t in program.meta["tactics"] if t["kind"] == "Conv"}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", NETS)
def test_programs_compute_the_network(name: str, precision: str) -> None:
    n = Net()
    program = check_simulated(n.done(NETS[name](n)), precision)
    assert tactics(program)
    assert not {"conv_direct", "depthwise"} & tactics(program), "no convolution runs one element a thread"


def test_launches_of_a_network() -> None:
    """For each convolution over three axes one copy of the frames under its taps, and itself. The downsampling convolution is a
    second source of another one, for which frames are chosen; no padding, no view and no residual costs a launch."""
    n = Net()
    first, one = ["Pointwise", "Frames", "Conv"], ["Frames", "Conv"]
    assert kinds(lowered(n.done(r3d(n)), "fp16")) == [
        *first, *one, *one, *one, "Frames", "Copy", "ConvSum", "Pointwise",
    ]  # fmt: skip


def test_depth_alone_is_one_launch() -> None:
    n = Net()
    y = volume(n, volume(n, n.input(2, 16, 5, 6, 7), 32, (1, 3, 3)), 16, (3, 1, 1), (2, 1, 1))
    found = kinds(lowered(n.done(n.op("GlobalAveragePool", y)), "fp16"))
    assert found == ["Pointwise", "Copy", "Conv", "Conv", "GlobalAveragePool", "Pointwise"], "the copy is of the input"


def joined(n: Net, starts: list[int]) -> Graph:
    x = n.op("Exp", n.input(2, 9, 4))
    parts = [n.op("Slice", x, n.ints(s), n.ints(s + 5), n.ints(1), n.ints(1)) for s in starts]
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(2)))


@pytest.mark.parametrize(
    ("starts", "copies"), [([0, 2, 4], 1), ([0, 1, 4], 2), ([4, 3, 2, 1, 0], 1), ([1], 1), ([0, 0], 1)]
)
def test_equally_distant_parts_are_copied_at_once(starts: list[int], copies: int) -> None:
    assert kinds(check_simulated(joined(Net(), starts), "fp32")).count("Copy") == copies


@pytest.mark.nvrtc
def test_kernels_compile() -> None:
    n = Net()
    assert lowered(n.done(r3d(n)), "fp16", "cuda:sm_90a").kernels


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", NETS)
def test_launches_on_a_gpu_give_what_they_mean(name: str, precision: str) -> None:
    n = Net()
    graph = n.done(NETS[name](n))
    context: Any = CudaRunner(lowered(graph, precision, "cuda:sm_90a"), LoadOptions()).context()
    errors = [e.error for e in check_steps(context, feeds_of(graph))]
    assert errors
    assert max(errors) < 4e-3
