"""pad_channels: channels between convolutions get a multiple of 8, by zeros in the weights around them."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, lowered, tactics

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.pad_channels import PadChannels

HALF = PassContext(target="cuda:sm_90a", precision="fp16")
ONES = ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1))
C = 27
"""Channels: of 32 with zeros behind them."""


def ends(n: Net, y: Value) -> Graph:
    return n.done(n.conv(n.op("Relu", y), 8, 1, pads=0, bias=True))


def starts(n: Net, channels: int = C) -> Value:
    return n.conv(n.op("Relu", n.input(1, 8, 6, 6)), channels, bias=True)


def separable(n: Net, channels: int = C) -> Value:
    return n.conv(starts(n, channels), channels, group=channels, bias=True)


def channels_of(graph: Graph, *kinds: str) -> set[int]:
    return {graph.type(op.value).static_shape[1] for op in graph.of_kind(*kinds)}


def test_a_depthwise_convolution_between_two_others() -> None:
    n = Net(np.float64)
    graph, _ = check_pass(PadChannels(), ends(n, separable(n)), changes=1, kinds={"Conv": 3, "Relu": 2}, context=HALF)
    assert channels_of(graph, "Conv") == {32, 8}
    assert [op.attrs.group for op in graph.of_kind("Conv")] == [1, 32, 1]
    assert [sorted(op.src) for op in graph.of_kind("Conv")] == [["Conv_2"], ["Conv_3"], ["Conv_5"]]


@pytest.mark.parametrize("sizes", [True, False])
def test_halves_get_zeros_of_their_own(sizes: bool) -> None:
    n = Net(np.float64)
    both = separable(n, 2 * C)
    if sizes:
        first, second = n.op("Split", both, n.ints(C, C), attrs=SplitAttrs(1), outputs=2)
    else:
        first, second = n.op("Split", both, attrs=SplitAttrs(1, 2), outputs=2)
    y = n.op("Mul", n.op("Gelu", first), second)
    graph, _ = check_pass(PadChannels(), ends(n, y), changes=1, context=HALF)
    assert channels_of(graph, "Conv") == {64, 8}
    assert channels_of(graph, "Gelu", "Mul", "Split") == {32}


def test_constants_of_channels_pools_and_broadcast_values() -> None:
    n = Net(np.float64)
    y = separable(n)
    y = n.op("PRelu", y, n.random(C, 1, 1))
    y = n.op("Add", n.op("Mul", y, n.random(1, C, 1, 1)), 2.0)
    gate = n.conv(n.op("GlobalAveragePool", y), C, 1, pads=0)
    y = n.op("Mul", y, n.op("Sigmoid", gate))
    y = n.op("Mul", y, n.input(1, 1, 6, 6, name="mask"))
    graph, _ = check_pass(PadChannels(), ends(n, n.op("Add", y, separable_of(n, y))), changes=1, context=HALF)
    assert channels_of(graph, "Conv", "GlobalAveragePool", "PRelu") == {32, 8}


def separable_of(n: Net, x: Value) -> Value:
    return n.conv(n.conv(x, C, 1, pads=0), C, group=C)


@pytest.mark.parametrize("size", [(20,), (3, 5, 4)])
def test_sequences_and_volumes(size: tuple[int, ...]) -> None:
    n = Net(np.float64)
    x = n.conv(n.input(1, 8, *size), C, 1, pads=0)
    y = n.conv(n.op("Swish", n.conv(x, C, group=C)), 8, 1, pads=0)
    graph, _ = check_pass(PadChannels(), n.done(y), changes=1, context=HALF)
    assert channels_of(graph, "Swish") == {32}


def test_refusals() -> None:
    n = Net(np.float64)
    y = separable(n)
    check_refused(PadChannels(), n.done(y), because=r"Output .* reads its channels", context=HALF)
    n = Net(np.float64)
    check_refused(PadChannels(), ends(n, n.op("Reciprocal", separable(n))), because="Reciprocal .* reads", context=HALF)
    n = Net(np.float64)
    grouped = n.conv(separable(n), C, group=3)
    check_refused(PadChannels(), ends(n, grouped), because="has groups", context=HALF)
    n = Net(np.float64)
    check_refused(
        PadChannels(), ends(n, separable(n, 10)), because="of 10 channels would become groups of 16", context=HALF
    )
    n = Net(np.float64)
    y = n.op("Conv", separable(n), n.op("Relu", n.input(8, C, 1, 1, name="w")), attrs=ONES)
    check_refused(PadChannels(), n.done(y), because="has no constant weights", context=HALF)


def test_networks_without_a_candidate() -> None:
    n = Net(np.float64)
    check_untouched(PadChannels(), ends(n, separable(n, 28)), HALF)
    n = Net(np.float64)
    check_untouched(PadChannels(), ends(n, separable(n)), PassContext(target="cuda:sm_90a", precision="fp32"))
    n = Net(np.float64)
    check_untouched(PadChannels(), ends(n, starts(n)), HALF)
    n = Net(np.float64)
    check_untouched(PadChannels(), n.done(n.op("Gemm", n.input(2, C), n.random(C, 8), attrs=GemmAttrs())), HALF)


def test_a_network_on_the_gpu() -> None:
    n = Net()
    first, second = n.op("Split", separable(n, 2 * C), attrs=SplitAttrs(1, 2), outputs=2)
    graph = ends(n, n.op("Mul", n.op("Gelu", first), second))
    program = lowered(graph, "fp16", target="cuda:sm_90a")
    assert "depthwise_paired" in tactics(program, "Conv")
    check_simulated(graph, "fp16")
