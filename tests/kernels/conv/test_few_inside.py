"""Convolutions whose filters read few channels (several filters per channel, narrow groups), with one output per thread."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_graph
from support.simulated import lowered

from optdnn.ir.graph import Graph
from optdnn.ops.conv import ConvAttrs

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int]] = {
    # channels and size of the input; filter, filters per group, stride
    "two filters per channel": ((48, 14, 14), (7, 7), 2, 2),
    "three filters per channel": ((12, 9, 8), (3, 3), 3, 1),
    "more taps than are unrolled": ((8, 20, 20), (9, 9), 2, 1),
    "a row too long to unroll": ((8, 30), (11,), 2, 1),
    "a sequence": ((24, 40), (5,), 2, 1),
    "a volume": ((6, 5, 6, 7), (3, 3, 3), 2, 1),
}


def net(name: str, inside: int = 1) -> Graph:
    n = Net()
    (channels, *size), kernel, filters, stride = CASES[name]
    groups = channels // inside
    weight = n.random(groups * filters, inside, *kernel)
    axes = len(kernel)
    attrs = ConvAttrs(
        strides=(stride,) * axes, pads=tuple(k // 2 for k in kernel) * 2, dilations=(1,) * axes, group=groups
    )
    x = n.op("Relu", n.input(2, channels, *size))
    return n.done(n.op("Conv", x, weight, n.random(groups * filters), attrs=attrs))


def own_kernel(graph: Graph) -> str:
    """The source of the convolution's kernel."""
    (kernel,) = [k for k in lowered(graph, "fp32").kernels if k.function == "window"]
    return kernel.generated["generated.cuh"]


@pytest.mark.parametrize("name", ["two filters per channel", "a sequence", "a volume"])
def test_loads_of_several_taps_are_in_flight(name: str) -> None:
    assert "seen1_0" in own_kernel(net(name))


@pytest.mark.parametrize("name", ["more taps than are unrolled", "a row too long to unroll"])
def test_many_taps_run_in_a_loop(name: str) -> None:
    assert "seen1_0" not in own_kernel(net(name))


@needs_compiler
@pytest.mark.parametrize("inside", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_processor_agree_with_their_meaning(name: str, inside: int, tmp_path: Path) -> None:
    assert compare_graph(net(name, inside), "fp32", tmp_path) >= 1


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_gpu_agree_with_their_meaning(name: str) -> None:
    checked_launches(net(name), "fp32", 2e-6)
