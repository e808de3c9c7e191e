"""pad_channels: channels between convolutions get a multiple of 8, by zeros in the weights around them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds, lowered, tactics

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.table import OPDEFS
from optdnn.passes.base import PassContext
from optdnn.passes.pad_channels import PadChannels
from optdnn.passes.support.precision import PrecisionPlan

HALF = PassContext(target="cuda:sm_90a", precision="fp16")
SINGLE = PassContext(target="cuda:sm_90a", precision="fp32", plan=PrecisionPlan())
MEANS = ReduceAttrs(keepdims=False)
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


@pytest.mark.parametrize("end", [2 * C, 1 << 62])
def test_slices_are_halves_too(end: int) -> None:
    """A chunk of a tensor with any batch size is a Slice in legacy exports."""
    n = Net(np.float64)
    both = separable(n, 2 * C)
    first = n.op("Slice", both, n.ints(0), n.ints(-C), n.ints(1))
    second = n.op("Slice", both, n.ints(C), n.ints(end), n.ints(1))
    graph, _ = check_pass(PadChannels(), ends(n, n.op("Mul", first, second)), changes=1, context=HALF)
    assert channels_of(graph, "Conv") == {64, 8}
    assert channels_of(graph, "Slice", "Mul") == {32}


def test_refused_slices() -> None:
    """Slices of other axes, with a step, or with limits of the channels that are not constant; and parts too small to pad."""
    for limits in ([[0], [3], [2]], [[0], [C], [1], [2]], [[0, 0], [C, 3], [1, 2]], [[5], [5], [1]]):
        n = Net(np.float64)
        y = n.op("Slice", separable(n, 2 * C), *(n.ints(*v) for v in limits))
        check_refused(PadChannels(), n.done(y), because=r"Slice .* reads its channels", context=HALF)
    n = Net(np.float64)
    y = n.op("Slice", separable(n, 2 * C), n.input(1, name="first", dtype=np.int64), n.ints(C), n.ints(1))
    check_refused(PadChannels(), n.done(y), because=r"Slice .* reads its channels", context=HALF)
    n = Net(np.float64)
    y = n.op("Slice", separable(n, 2 * C), n.ints(1), n.ints(C + 1), n.ints(1))
    check_refused(PadChannels(), ends(n, y), because="groups of 1 channels", context=HALF)


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


def classifier(n: Net, y: Value, kind: str) -> Value:
    """A mean over the pixels of ``y``, and a product with it."""
    if kind == "pool":
        y = n.op("Reshape", n.op("GlobalAveragePool", y), n.ints(0, -1), attrs=OPDEFS["Reshape"].attrs())
    else:
        y = n.op("ReduceMean", y, n.ints(2, 3), attrs=MEANS)
    return n.matmul(y, 10) if kind == "matmul" else n.gemm(y, 10, trans_b=kind == "transposed")


@pytest.mark.parametrize("kind", ["pool", "gemm", "transposed", "matmul"])
def test_means_of_images_of_16_bits(kind: str) -> None:
    n = Net(np.float64)
    y = n.op("Relu", starts(n))
    y = n.op("Add", n.conv(y, C, bias=True), y)
    graph, _ = check_pass(
        PadChannels(), n.done(classifier(n, y, kind)), changes=1, rules={"pad_means": 1}, context=HALF
    )
    assert channels_of(graph, "Conv", "Relu", "GlobalAveragePool", "ReduceMean") == {8, 32}
    check_untouched(PadChannels(), graph, HALF)


def test_a_gate_of_products() -> None:
    n = Net(np.float64)
    y = starts(n)
    gate = n.gemm(n.gemm(n.op("ReduceMean", y, n.ints(2, 3), attrs=MEANS), 8), C)
    gate = n.op("Unsqueeze", n.op("Sigmoid", gate), n.ints(2, 3))
    graph, _ = check_pass(PadChannels(), ends(n, n.op("Mul", y, gate)), changes=1, rules={"pad_means": 1}, context=HALF)
    assert [graph.type(op.value).static_shape for op in graph.of_kind("Gemm")] == [(1, 8), (1, 32)]
    assert channels_of(graph, "Mul") == {32}


@pytest.mark.parametrize("last", ["scales", "sizes", "transpose"])
def test_filters_of_fp32_around_joins_resizes_and_transposed_convolutions(last: str) -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    first = n.conv(x, C, bias=True)
    second = n.op("MaxPool", n.conv(n.op("Concat", first, n.conv(x, 2 * C), attrs=ConcatAttrs(1)), C), attrs=halves())
    if last == "scales":
        y = n.op("Resize", second, None, n.const([1.0, 1.0, 2.0, 2.0], np.float32), attrs=ResizeAttrs())
    elif last == "sizes":
        y = n.op("Resize", second, None, None, n.ints(1, C, 6, 6), attrs=ResizeAttrs())
    else:
        y = n.conv_transpose(second, C, 2, bias=True)
    graph, _ = check_pass(PadChannels(), ends(n, y), changes=3 if last == "transpose" else 2, context=SINGLE)
    assert {c % 8 for c in channels_of(graph, "Conv", "Concat", "MaxPool", "Resize", "ConvTranspose")} == {0}


def halves() -> MaxPoolAttrs:
    return MaxPoolAttrs((2, 2), (2, 2), (0, 0, 0, 0), (1, 1))


@pytest.mark.parametrize("trans_b", [True, False])
def test_columns_of_products_of_16_bits(trans_b: bool) -> None:
    n = Net(np.float64)
    y = n.op("Tanh", n.gemm(n.input(4, 8), C, trans_b=trans_b))
    graph = n.done(n.gemm(y, 10, trans_b=trans_b))
    after, _ = check_pass(PadChannels(), graph, changes=1, rules={"pad_features": 1}, context=HALF)
    assert channels_of(after, "Gemm", "Tanh") == {32, 10}
    check_untouched(PadChannels(), graph, SINGLE)
    row = Net(np.float64)
    y = row.op("Tanh", row.gemm(row.input(1, 8), C, trans_b=trans_b))
    check_untouched(PadChannels(), row.done(row.gemm(y, 10, trans_b=trans_b)), HALF)


def test_precisions() -> None:
    n = Net(np.float64)
    graph = ends(n, starts(n))
    check_pass(PadChannels(), graph, changes=1, rules={"pad_filters": 1}, context=SINGLE)
    check_untouched(PadChannels(), graph, HALF)
    check_untouched(PadChannels(), graph, replace(SINGLE, plan=PrecisionPlan(nodes={"Conv_2": "fp16"})))
    check_untouched(PadChannels(), graph, PassContext(target="cuda:sm_90a", precision="tf32"))
    n = Net(np.float64)
    graph = ends(n, separable(n))
    check_pass(
        PadChannels(), graph, changes=1, rules={"pad_channels": 1}, context=replace(SINGLE, precision="tf32", plan=None)
    )
    check_untouched(PadChannels(), graph, replace(SINGLE, precision="fp64", plan=None))


def test_refused_means_and_filters() -> None:
    n = Net(np.float64)
    y = classifier(n, n.op("Relu", starts(n, 6)), "gemm")
    check_refused(PadChannels(), n.done(y), because="of 6 channels would become groups of 8", context=HALF)
    n = Net(np.float64)
    y = n.op("ReduceMean", starts(n), n.ints(2, 3), attrs=MEANS)
    y = n.op("Gemm", y, n.random(1, 4), attrs=GemmAttrs(transA=True))
    check_refused(PadChannels(), n.done(y), because="product .* is not of rows of channels", context=HALF)
    n = Net(np.float64)
    y = n.op("Reshape", n.op("GlobalAveragePool", starts(n)), n.ints(C))
    check_refused(PadChannels(), n.done(y), because="Reshape .* reads its channels", context=HALF)
    n = Net(np.float64)
    y = n.op("Resize", starts(n), None, n.const([1.0, 2.0, 1.0, 1.0], np.float32), attrs=ResizeAttrs())
    check_refused(PadChannels(), ends(n, y), because="Resize .* reads its channels", context=SINGLE)
    n = Net(np.float64)
    y = n.op("Mul", starts(n), n.op("Sigmoid", n.input(C, 1, 1, name="scale")))
    check_refused(PadChannels(), ends(n, y), because="Mul .* reads its channels", context=SINGLE)
    n = Net(np.float64)
    y = n.op("ReduceMax", starts(n), n.ints(1))
    check_refused(PadChannels(), n.done(y), because="ReduceMax .* reads its channels", context=SINGLE)
    n = Net(np.float64)
    y = n.op("Sqrt", n.op("Sub", n.op("Add", n.op("Relu", starts(n)), n.positive(C, 1, 1)), 0.1))  # of padding: NaN
    check_refused(PadChannels(), ends(n, y), because="Sqrt .* reads its channels", context=SINGLE)
    n = Net(np.float64)
    y = n.op("Resize", starts(n), None, n.const([1.0, 1.01, 2.0, 2.0], np.float32), attrs=ResizeAttrs())
    check_refused(PadChannels(), ends(n, y), because="Resize .* reads its channels", context=SINGLE)


def test_networks_without_a_candidate() -> None:
    n = Net(np.float64)
    check_untouched(PadChannels(), ends(n, separable(n, 32)), HALF)
    n = Net(np.float64)
    check_untouched(PadChannels(), n.done(separable(n, 32)), HALF)
    n = Net(np.float64)
    check_untouched(PadChannels(), n.done(n.op("ReduceMean", starts(n), n.ints(1, 2), attrs=MEANS)), HALF)
    n = Net(np.float64)
    check_untouched(PadChannels(), n.done(n.op("Gemm", n.input(2, C), n.random(C, 8), attrs=GemmAttrs())), HALF)


def test_an_empty_batch() -> None:
    n = Net(np.float64)
    y = n.op("GlobalAveragePool", n.op("Relu", n.conv(n.op("Relu", n.input(0, 8, 6, 6)), C)))
    y = n.op("Reshape", y, n.ints(0, -1), attrs=OPDEFS["Reshape"].attrs())
    check_pass(PadChannels(), n.done(n.gemm(y, 10)), changes=1, context=HALF, depends_on_input=False)


@pytest.mark.parametrize("axes", [None, (-3, -2, -1), (1, 3)])
def test_sizes_of_a_resize(axes: tuple[int, ...] | None) -> None:
    n = Net(np.float64)
    given = (1, C, 6, 9)
    sizes = n.ints(*(given if axes is None else [given[axis] for axis in axes]))
    y = n.op("Resize", starts(n), None, None, sizes, attrs=ResizeAttrs(axes=axes))
    graph, _ = check_pass(PadChannels(), ends(n, y), changes=1, context=SINGLE)
    assert channels_of(graph, "Resize") == {32}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_filters_on_the_gpu(precision: str) -> None:
    n = Net()
    y = n.op("Relu", n.conv(n.op("Relu", n.input(2, 8, 12, 12)), 100, bias=True))
    y = n.op("Relu", n.op("Add", n.conv(y, 100), y))
    graph = n.done(classifier(n, y, "pool"))
    program = lowered(graph, precision, target="cuda:sm_90a")
    if precision == "fp16":
        assert "means_sm90" in tactics(program, "GlobalAveragePool")
    else:  # no copy between the convolutions and the mean
        assert kinds(program)[:4] == ["JointPointwise", "Conv", "Conv", "GlobalAveragePool"]
    check_simulated(graph, precision)


def test_a_network_on_the_gpu() -> None:
    n = Net()
    first, second = n.op("Split", separable(n, 2 * C), attrs=SplitAttrs(1, 2), outputs=2)
    graph = ends(n, n.op("Mul", n.op("Gelu", first), second))
    program = lowered(graph, "fp16", target="cuda:sm_90a")
    assert "depthwise_paired" in tactics(program, "Conv")
    check_simulated(graph, "fp16")


# ---------------------------------------------------------------- groups


def grouped(n: Net, size: int = 112, groups: int = 3, *, gated: bool = False) -> Graph:
    """A bottleneck of RegNet's form, with squeeze-and-excitation if it is ``gated``."""
    channels = size * groups
    y = n.op("Relu", n.conv(n.input(1, 8, 4, 4), channels, 1, pads=0, bias=True))
    y = n.op("Relu", n.conv(y, channels, group=groups, strides=2, bias=True))
    if gated:
        z = n.op("Relu", n.conv(n.op("GlobalAveragePool", y), 16, 1, pads=0, bias=True))
        y = n.op("Mul", y, n.op("Sigmoid", n.conv(z, channels, 1, pads=0, bias=True)))
    return n.done(n.conv(y, 8, 1, pads=0, bias=True))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size", "wide"), [(112, 128), (96, 128), (168, 192)])
def test_groups_fill_tiles(size: int, wide: int, gated: bool) -> None:
    graph, _ = check_pass(
        PadChannels(), grouped(Net(np.float64), size, gated=gated), changes=1, rules={"pad_groups": 1}, context=HALF
    )
    (conv,) = [op for op in graph.of_kind("Conv") if op.attrs.group > 1]
    assert conv.attrs.group == 3
    assert channels_of(graph, "Conv") == {3 * wide, 8, *([16] if gated else [])}
    weight = graph.constant_value(conv.inputs[1])
    assert weight is not None
    assert weight.shape == (3 * wide, wide, 3, 3)


@pytest.mark.parametrize("size", [56, 64, 128])
def test_other_groups_stay(size: int) -> None:
    check_untouched(PadChannels(), grouped(Net(np.float64), size), HALF)


@pytest.mark.parametrize(
    ("precision", "target"), [("fp32", "cuda:sm_90a"), ("int8", "cuda:sm_90a"), ("fp16", "cuda:sm_80")]
)
def test_groups_stay_in_other_precisions_and_on_other_gpus(precision: str, target: str) -> None:
    check_untouched(PadChannels(), grouped(Net(np.float64)), PassContext(target=target, precision=precision))


def test_refused_groups() -> None:
    check_refused(
        PadChannels(), grouped(Net(), 80), because="groups of 80 channels would become groups of 128", context=HALF
    )
    n = Net()
    y = n.conv(n.input(1, 8, 4, 4), 224, bias=True)
    y = n.op("Add", n.conv(y, 224, group=2, bias=True), y)
    check_refused(
        PadChannels(), ends(n, y), because="the padding would reach Add_3, and all that it adds", context=HALF
    )
    n = Net()
    y = n.conv(n.conv(n.input(1, 8, 4, 4), 224, bias=True), 224, group=2)
    check_refused(PadChannels(), n.done(y), because="Output .* reads its channels", context=HALF)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_groups_on_the_gpu(precision: str) -> None:
    program = check_simulated(grouped(Net(), 112, gated=True), precision)
    assert "conv_bands_sm90" in tactics(program, "Conv")
