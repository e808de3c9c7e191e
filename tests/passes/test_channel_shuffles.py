"""Units that split, convolve, join and shuffle channels become convolutions of all channels; others stay, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.channel_shuffles import ChannelShuffles

FP16 = PassContext(precision="fp16", target="cuda:sm_90a")


def shuffled(n: Net, x: Value, groups: int = 2) -> Value:
    batch, channels, *size = n.dims(x)
    parts = n.op("Reshape", x, n.ints(batch, groups, channels // groups, *size))
    turned = n.op("Transpose", parts, attrs=TransposeAttrs(perm=(0, 2, 1, 3, 4)))
    return n.op("Reshape", turned, n.ints(batch, channels, *size))


def unit(
    n: Net,
    x: Value,
    *,
    last: bool = False,
    kernel: int = 3,
    relu: bool = True,
    dilations: int = 1,
    middle: Any = None,
    slices: bool = False,
) -> Value:
    """A unit without its shuffle. ``last``: the second half is kept. ``middle``: groups of the second convolution. ``slices``: two
    Slices take the halves."""
    half = n.dims(x)[1] // 2
    if slices:
        parts = [n.op("Slice", x, n.ints(a), n.ints(a + half), n.ints(1)) for a in (0, half)]
    else:
        parts = n.op("Split", x, n.ints(half, half), attrs=SplitAttrs(axis=1), outputs=2)
    kept, y = reversed(parts) if last else parts
    y = n.op("Relu", n.conv(y, half, 1, pads=0, bias=True))
    y = n.conv(y, half, kernel, pads=kernel // 2 * dilations, group=middle or half, dilations=dilations)
    y = n.conv(y, half, 1, pads=0, bias=True)
    y = n.op("Relu", y) if relu else y
    return n.op("Concat", *((y, kept) if last else (kept, y)), attrs=ConcatAttrs(axis=1))


def net(units: int = 1, channels: int = 12, first: str = "Relu", **options: Any) -> Graph:
    n = Net()
    x = shuffled(n, n.op(first, n.conv(n.input(2, 4, 6, 7), channels, 1, pads=0)))
    for _ in range(units):
        x = shuffled(n, unit(n, x, **options))
    return n.done(n.conv(x, 8, 1, pads=0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"last": True},
        {"kernel": 5},
        {"kernel": 3, "dilations": 2},
        {"channels": 16},
        {"slices": True},
        {"slices": True, "last": True},
    ],
    ids=str,
)
def test_units_become_convolutions_of_all_channels(options: dict[str, Any]) -> None:
    graph, report = check_pass(
        ChannelShuffles(),
        net(2, **options),
        changes=5,
        rules={"whole_unit": 2, "shuffle_into_weights": 3},
        context=FP16,
    )
    assert not {"Split", "Slice", "Concat", "Transpose", "Reshape"} & graph.kinds().keys()
    assert report.changes == 5


def test_a_unit_that_ends_without_a_relu() -> None:
    rules = {"whole_unit": 1, "shuffle_into_weights": 2}
    check_pass(ChannelShuffles(), net(1, relu=False), changes=3, rules=rules, context=FP16)


def test_a_shuffle_goes_after_the_convolution_of_each_channel_and_into_the_next() -> None:
    n = Net()
    x = shuffled(n, n.op("Relu", n.conv(n.input(2, 4, 6, 7), 12, 1, pads=0)), 3)
    y = n.conv(n.conv(x, 12, 3, pads=1, strides=2, group=12, bias=True), 8, 1, pads=0)
    graph, _ = check_pass(ChannelShuffles(), n.done(y), changes=2, rules={"shuffle_into_weights": 2}, context=FP16)
    assert "Transpose" not in graph.kinds()


def test_channels_between_convolutions_come_in_eights() -> None:
    graph, _ = check_pass(ChannelShuffles(), net(1, 12), changes=3, context=FP16)
    widths = [op.outputs[0].type.static_shape[1] for op in graph.ops() if op.kind == "Conv"]
    assert sorted(widths) == [8, 12, 12, 16, 16]


@pytest.mark.parametrize(
    ("graph", "context", "because"),
    [
        (lambda: net(), PassContext(precision="fp32", target="cuda:sm_90a"), "not for fp32"),
        (lambda: net(1, 1040), FP16, "more than 1024 channels"),
        (lambda: net(first="Tanh"), FP16, "may be negative"),
        (lambda: net(middle=3), FP16, "has groups"),
    ],
)
def test_units_that_stay(graph: Any, context: PassContext, because: str) -> None:
    made = graph()
    report = ChannelShuffles()(made, context)
    assert any(because in r.reason for r in report.refused if r.rule == "whole_unit"), report.refused
    assert {"Split", "Concat"} <= made.kinds().keys()


@pytest.mark.parametrize("strides", [1, 2])
def test_a_unit_of_groups_loses_its_shuffle(strides: int) -> None:
    """Zhang et al., 2018: groups, a shuffle, a convolution of each channel, and groups again, which become all channels."""
    n = Net()
    x = shuffled(n, n.op("Relu", n.conv(n.input(2, 6, 6, 7), 12, 1, pads=0, group=3, bias=True)), 3)
    y = n.conv(n.conv(x, 12, 3, pads=1, strides=strides, group=12, bias=True), 9, 1, pads=0, group=3, bias=True)
    graph, _ = check_pass(ChannelShuffles(), n.done(y), changes=2, rules={"shuffle_into_weights": 2}, context=FP16)
    assert "Transpose" not in graph.kinds()
    assert sorted(op.attrs.group for op in graph.of_kind("Conv")) == [1, 3, 12]


def test_shuffles_of_groups_that_stay() -> None:
    def net(filters: int = 12, own: bool = False) -> Graph:
        n = Net()
        x = shuffled(n, n.op("Relu", n.conv(n.input(1, 4, 6, 7), 12, 1, pads=0)))
        y = n.conv(x, 12, 3, pads=1, group=12) if own else x
        return n.done(n.conv(y, filters, 3, pads=1, group=3))

    fp32 = PassContext(precision="fp32", target="cuda:sm_90a")
    check_refused(ChannelShuffles(), net(), because="not for fp32", context=fp32)
    check_refused(
        ChannelShuffles(), net(60), because="with zeros for the other groups it would take longer", context=FP16
    )
    check_untouched(ChannelShuffles(), net(60, own=True), FP16)
    check_untouched(ChannelShuffles(), net(own=True), fp32)


def test_shuffles_that_stay() -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 4, 6, 7), 12, 1, pads=0))
    check_untouched(ChannelShuffles(), n.done(n.conv(unit(n, x), 8, 1, pads=0)), FP16)


def test_a_gpu_has_no_copies_left() -> None:
    program = check_simulated(net(2, 16), "fp16")
    assert "copy" not in [s.params["tactic"] for s in program.steps][1:]
