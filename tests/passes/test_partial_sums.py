"""Additions to some channels of a convolution become additions to all of them. Other additions stay, for a reason."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.partial_sums import PartialSums

FP16 = PassContext(precision="fp16", target="cuda:sm_90a")
SIZE = (6, 7)


def channels(n: Net, x: Value, begin: int, end: int) -> Value:
    return n.op("Slice", x, n.ints(begin), n.ints(end), n.ints(1))


def joined(n: Net, *parts: Value, axis: int = 1) -> Value:
    return n.op("Concat", *parts, attrs=ConcatAttrs(axis=axis))


def shortcut(few: int = 8, many: int = 12, **options: Any) -> Graph:
    """As in ReXNet: an image is added to the first channels of a convolution."""
    n = Net()
    x = n.op("Relu", n.input(2, few, *SIZE))
    y = n.conv(x, many, 1, pads=0, bias=True, **options)
    first, rest = n.op("Split", y, n.ints(few, many - few), attrs=SplitAttrs(axis=1), outputs=2)
    return n.done(n.op("Relu", joined(n, n.op("Add", x, first), rest)))


def dual(blocks: int = 2, add: int = 16, more: int = 8) -> Graph:
    """As in DPN: some channels are added, others appended."""
    n = Net()
    x = n.conv(n.input(1, 8, *SIZE), add + more, 1, pads=0)
    for _ in range(blocks):
        width = n.dims(x)[1]
        y = n.conv(n.op("Relu", x), add + more, 1, pads=0)
        total = n.op("Add", channels(n, x, 0, add), channels(n, y, 0, add))
        x = joined(n, total, channels(n, x, add, width), channels(n, y, add, add + more))
    return n.done(n.op("Relu", x))


def test_a_shortcut_of_fewer_channels() -> None:
    graph, _ = check_pass(PartialSums(), shortcut(), changes=1, context=FP16)
    assert graph.kinds() == {"Add": 1, "Concat": 1, "Conv": 1, "Relu": 2}


@pytest.mark.parametrize("blocks", [1, 3])
def test_channels_that_are_added_and_appended(blocks: int) -> None:
    graph, _ = check_pass(PartialSums(), dual(blocks), changes=blocks, context=FP16)
    assert graph.kinds() == {"Add": blocks, "Concat": blocks, "Conv": blocks + 1, "Relu": blocks + 1}


def test_two_convolutions_need_no_zeros_of_images() -> None:
    n = Net()
    x = n.input(2, 8, *SIZE)
    a, b = n.conv(x, 12, 1, pads=0), n.conv(x, 10, 3, pads=1, bias=True)
    total = n.op("Add", channels(n, a, 0, 4), channels(n, b, 6, 10))
    graph = n.done(joined(n, channels(n, b, 0, 6), total, channels(n, a, 4, 12)))
    after, _ = check_pass(PartialSums(), graph, changes=1, context=FP16)
    assert after.kinds() == {"Add": 1, "Conv": 2}


def test_channels_before_those_that_are_added() -> None:
    n = Net()
    x = n.op("Relu", n.input(2, 4, *SIZE))
    y = n.conv(x, 12, 1, pads=0)
    total = n.op("Add", channels(n, y, 4, 8), x)
    check_pass(
        PartialSums(), n.done(joined(n, channels(n, y, 0, 4), total, channels(n, y, 8, 12))), changes=1, context=FP16
    )


@pytest.mark.parametrize(
    ("graph", "context", "because"),
    [
        (lambda: shortcut(), PassContext(precision="fp32", target="cuda:sm_90a"), "not for fp32"),
        (lambda: shortcut(group=4), FP16, "neither tensor comes from a convolution"),
        (lambda: _read_twice(), FP16, "neither tensor comes from a convolution"),
        (lambda: _in_turn(), FP16, "go to several ranges"),
        (lambda: _appended(40), FP16, "more than 4 times as many filters"),
    ],
)
def test_refusals(graph: Any, context: PassContext, because: str) -> None:
    check_refused(PartialSums(), graph(), because=because, context=context)


def _read_twice() -> Graph:
    n = Net()
    x = n.op("Relu", n.input(2, 8, *SIZE))
    y = n.conv(x, 12, 1, pads=0)
    result = joined(n, n.op("Add", x, channels(n, y, 0, 8)), channels(n, y, 8, 12))
    return n.done(result, n.op("Relu", y))


def _in_turn() -> Graph:
    n = Net()
    x = n.op("Relu", n.input(2, 8, *SIZE))
    y = n.conv(x, 12, 1, pads=0)
    first = n.op("Add", channels(n, x, 4, 8), channels(n, y, 0, 4))
    return n.done(joined(n, first, channels(n, x, 0, 4), channels(n, y, 4, 12)))


def _appended(kept: int) -> Graph:
    n = Net()
    x = n.op("Relu", n.input(2, kept, *SIZE))
    y = n.conv(x, 8, 1, pads=0)
    total = n.op("Add", channels(n, x, 0, 4), channels(n, y, 0, 4))
    return n.done(joined(n, total, channels(n, x, 4, kept), channels(n, y, 4, 8)))


def test_other_concatenations_stay() -> None:
    n = Net()
    x, y = n.input(2, 8, *SIZE), n.input(2, 8, *SIZE, name="y")
    check_untouched(PartialSums(), n.done(joined(n, n.conv(x, 8, 1, pads=0), y)), FP16)
    n = Net()
    x = n.op("Relu", n.input(2, 8, *SIZE))
    total = n.op("Add", n.conv(x, 8, 1, pads=0), x)
    check_untouched(PartialSums(), n.done(joined(n, total, n.op("Sigmoid", x))), FP16)  # three tensors
    n = Net()
    x = n.op("Relu", n.input(2, 8, *SIZE))
    y = n.conv(x, 8, 1, pads=0)
    check_untouched(PartialSums(), n.done(joined(n, n.op("Add", x, y), x, axis=2)), FP16)  # not along channels


def test_a_gpu_writes_the_parts_in_place() -> None:
    program = check_simulated(dual(3), "fp16")
    tactics = [s.params["tactic"].split()[0] for s in program.steps]
    assert tactics.count("copy") == 1  # the input's layout, and zeros of three widths
    assert tactics.count("conv_sm90") == 4
    assert len(tactics) == 1 + 4 + 1  # and the last activation, in its order; convolutions apply the others
