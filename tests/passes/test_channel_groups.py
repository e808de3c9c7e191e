"""Sums over groups of channels become additions of slices, or part of a convolution's weights. Others stay, for a reason."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops import index, reduce, softmax
from optdnn.passes.channel_groups import MOST_GROUPS, ChannelGroups

SIZE = (6, 7)
SUM = reduce.ReduceAttrs(keepdims=False)


def view(n: Net, x: Value, *shape: int) -> Value:
    return n.op("Reshape", x, n.ints(*shape))


def total(n: Net, x: Value, axis: int = 1, attrs: Any = SUM) -> Value:
    return n.op("ReduceSum", x, n.ints(axis), attrs=attrs)


def split_attention(radix: int = 2, cardinal: int = 1, channels: int = 16, batch: int = 2) -> Graph:
    """ResNeSt's (`timm.layers.SplitAttn`)."""
    n = Net()
    y = n.op("Relu", n.conv(n.input(batch, 8, *SIZE), radix * channels, group=radix * cardinal, bias=True))
    groups = view(n, y, batch, radix, channels, *SIZE)
    gap = n.op("GlobalAveragePool", total(n, groups))
    hidden = n.op("Relu", n.conv(gap, 8, 1, pads=0, group=cardinal, bias=True))
    scores = n.conv(hidden, radix * channels, 1, pads=0, group=cardinal)
    weights = n.op("Softmax", view(n, scores, batch, radix, 1, channels), attrs=softmax.SoftmaxAttrs(1))
    mixed = total(n, n.op("Mul", groups, view(n, weights, batch, radix, channels, 1, 1)))
    return n.done(n.conv(mixed, 16, 1, pads=0))


def selective_kernels(paths: int = 2, channels: int = 16) -> Graph:
    """SKNet's (`timm.layers.SelectiveKernel`): images of several filters, stacked."""
    n = Net()
    x = n.input(2, 8, *SIZE)
    made = [n.op("Relu", n.conv(x, channels, 3, pads=k + 1, dilations=k + 1)) for k in range(paths)]
    stack = n.op("Concat", *(view(n, y, 2, 1, channels, *SIZE) for y in made), attrs=index.ConcatAttrs(axis=1))
    hidden = n.conv(n.op("GlobalAveragePool", total(n, stack)), paths * channels, 1, pads=0)
    weights = n.op("Softmax", view(n, hidden, 2, paths, channels, 1, 1), attrs=softmax.SoftmaxAttrs(1))
    return n.done(n.conv(total(n, n.op("Mul", stack, weights)), 16, 1, pads=0))


@pytest.mark.parametrize(("radix", "cardinal"), [(2, 1), (4, 1), (2, 4)])
def test_split_attention(radix: int, cardinal: int) -> None:
    after, _ = check_pass(ChannelGroups(), split_attention(radix, cardinal), changes=2)
    assert "ReduceSum" not in after.kinds()
    assert {after.type(op.value).rank for op in after.ops() if op.kind in ("Add", "Mul")} == {4}
    assert after.kinds()["Add"] == radix - 1


@pytest.mark.parametrize("paths", [2, 3])
def test_selective_kernels(paths: int) -> None:
    after, _ = check_pass(ChannelGroups(), selective_kernels(paths), changes=2)
    assert "ReduceSum" not in after.kinds()
    assert after.kinds()["Add"] == 2 * (paths - 1)


def test_an_average_that_something_else_reads_is_one_of_the_sum() -> None:
    n = Net()
    x = n.op("Relu", n.input(2, 8, *SIZE))
    gap = n.op("GlobalAveragePool", total(n, view(n, x, 2, 2, 4, *SIZE)))
    after, _ = check_pass(ChannelGroups(), n.done(n.op("Sigmoid", gap)), changes=1)
    assert after.kinds()["Slice"] == 2


def test_groups_of_something_else_stay() -> None:
    n = Net()
    x = n.op("Exp", n.op("Relu", n.input(2, 3, 4, *SIZE)))
    check_refused(ChannelGroups(), n.done(total(n, x)), because="not those of an image's channels")
    x = n.op("Relu", n.input(2, 12, *SIZE, name="image"))
    groups = n.op("Mul", view(n, x, 2, 3, 4, *SIZE), n.random(1, 1, 4, *SIZE))
    check_refused(ChannelGroups(), n.done(total(n, groups)), because="not multiplied and added one by one")


@pytest.mark.parametrize(
    ("groups", "axis", "attrs"), [(MOST_GROUPS + 1, 1, SUM), (2, 2, SUM), (2, 1, reduce.ReduceAttrs())]
)
def test_other_sums_stay(groups: int, axis: int, attrs: Any) -> None:
    n = Net()
    x = view(n, n.op("Relu", n.input(2, groups * 4, *SIZE)), 2, groups, 4, *SIZE)
    check_untouched(ChannelGroups(), n.done(total(n, x, axis, attrs)))


@pytest.mark.parametrize("graph", [split_attention(2, 2, 32), selective_kernels(2, 32)])
def test_their_images_stay_channels_last(graph: Graph) -> None:
    program = check_simulated(graph, "fp16")
    assert not [s for s in program.steps if s.params["op"]["kind"] == "ReduceSum"]
    assert sum(s.params["op"]["kind"] == "Copy" for s in program.steps) <= 1, "the input alone"
