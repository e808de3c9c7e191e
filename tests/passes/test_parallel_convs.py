"""fuse_conv_bn, parallel_convs: convolutions of one value that are added become one, if one kernel has the taps of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_conv_bn import FuseConvBn
from optdnn.passes.parallel_convs import parallel_convs

FUSE = FuseConvBn()
MERGED = "parallel_convs"


def added(n: Net, *values: Value) -> Value:
    total = values[0]
    for value in values[1:]:
        total = n.op("Add", total, value)
    return total


def merged(n: Net, y: Value, *, changes: int = 1, **options: Any) -> Any:
    """The only convolution of the result."""
    graph, _ = check_pass(FUSE, n.done(y), changes=changes, kinds={"Conv": 1}, **options)
    (conv,) = graph.of_kind("Conv")
    return graph, conv


@pytest.mark.parametrize("other", [1, (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("strides", [1, 2])
def test_a_smaller_kernel_lies_within_a_larger_one(other: Any, strides: int) -> None:
    n = Net()
    x = n.input(2, 6, 9, 9)
    k = (other, other) if isinstance(other, int) else other
    pads = [(s - 1) // 2 for s in k]
    small = n.conv(x, 4, k, pads=[*pads, *pads], strides=strides)
    graph, conv = merged(n, added(n, n.conv(x, 4, strides=strides, bias=True), small), rules={MERGED: 1})
    assert graph.constant_value(conv.inputs[1]).shape == (4, 6, 3, 3)
    assert len(conv.src) == 3


def test_the_smaller_kernel_may_come_first_and_be_subtracted() -> None:
    n = Net()
    x = n.input(2, 6, 9, 9)
    merged(n, n.op("Sub", n.conv(x, 4, 1, pads=0, bias=True), n.conv(x, 4)))


@pytest.mark.parametrize("group", [1, 2, 6])
def test_a_repvgg_block(group: int) -> None:
    n = Net()
    x = n.input(2, 6, 7, 7)
    y = added(n, n.bn(n.conv(x, 6, group=group)), n.bn(n.conv(x, 6, 1, pads=0, group=group)), n.bn(x))
    _, conv = merged(n, y, changes=3, rules={"conv_bn": 2, MERGED: 1})
    assert conv.attrs.group == group


def test_finer_groups_and_channels_lie_within_coarser_groups() -> None:
    n = Net()
    x = n.input(2, 12, 7, 7)
    branches = [n.conv(x, 12, 1, pads=0, group=g) for g in (12, 6, 4)]
    _, conv = merged(n, added(n, *branches, n.conv(x, 12, group=2)))
    assert conv.attrs.group == 2


@pytest.mark.parametrize("outputs", [8, 4])
def test_groups_of_different_sizes_in_and_out(outputs: int) -> None:
    n = Net()
    x = n.input(2, 16, 5, 5)
    merged(n, added(n, n.conv(x, outputs, group=2), n.conv(x, outputs, 1, pads=0, group=4)))


def test_the_value_itself_is_a_branch() -> None:
    n = Net()
    x = n.input(2, 6, 7, 7)
    graph, conv = merged(n, added(n, x, n.conv(x, 6, group=6), n.conv(x, 6, 1, pads=0, group=6), x))
    assert graph.constant_value(conv.inputs[1]).shape == (6, 1, 3, 3)


def test_a_residual_connection_around_one_convolution_stays() -> None:
    n = Net()
    x = n.input(2, 6, 7, 7)
    check_untouched(FUSE, n.done(n.op("Add", x, n.conv(x, 6))))
    n = Net()
    x = n.input(2, 6, 7, 7)
    merged(n, n.op("Add", n.op("Mul", x, 0.5), n.conv(x, 6)))  # with a scale, it is a branch


def test_scales_around_a_sum_of_branches_fold_into_it() -> None:
    """FastViT's mixer: x + scale * (branches(x) - bn(x))."""
    n = Net()
    x = n.input(2, 6, 7, 7)
    inner = n.op("Sub", added(n, n.conv(x, 6, group=6), n.conv(x, 6, 1, pads=0, group=6), n.bn(x)), n.bn(x))
    y = n.op("Add", x, n.op("Mul", inner, n.random(6, 1, 1)))
    check_pass(FUSE, n.done(y), changes=2, kinds={"Conv": 1, "Add": 1}, rules={MERGED: 1, "conv_scale_shift": 1})


@pytest.mark.parametrize("shape", [(1,), (6, 1, 1), (1, 6, 1, 1)], ids=str)
def test_a_constant_after_the_branches_becomes_their_bias(shape: tuple[int, ...]) -> None:
    n = Net()
    x = n.input(2, 6, 7, 7)
    y = n.op("Add", added(n, n.conv(x, 6), n.conv(x, 6, 1, pads=0), n.bn(x)), n.random(*shape))
    graph, _ = check_pass(FUSE, n.done(y), changes=2, kinds={"Conv": 1}, rules={MERGED: 1, "conv_scale_shift": 1})
    assert graph.constant_value(graph.of_kind("Conv")[0].inputs[2]).shape == (6,)


def test_the_branches_of_a_sum_that_is_broadcast() -> None:
    """Another value of fewer dimensions is added to their sum."""
    n = Net()
    x = n.input(2, 6, 7, 7)
    y = n.op("Add", added(n, n.conv(x, 6), n.conv(x, 6, 1, pads=0)), n.input(6, 1, 1, name="shift"))
    check_pass(FUSE, n.done(y), changes=1, kinds={"Add": 1, "Conv": 1}, rules={MERGED: 1})


def test_another_term_between_stays_a_term() -> None:
    n = Net()
    x, r = n.input(2, 6, 7, 7), n.input(2, 6, 7, 7, name="r")
    y = n.op("Sub", added(n, n.conv(x, 6), r), n.op("Sub", r, n.conv(x, 6, 1, pads=0)))
    check_pass(FUSE, n.done(y), changes=3, kinds={"Conv": 1, "Add": 1, "Sub": 1})


def test_dilated_taps_that_lie_on_the_grid() -> None:
    n = Net()
    x = n.input(1, 4, 11, 11)
    y = added(n, n.conv(x, 4, 5, pads=2), n.conv(x, 4, 3, dilations=2, pads=2), n.conv(x, 4, 3))
    _, conv = merged(n, y)
    assert conv.attrs.dilations == (1, 1)


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank: int) -> None:
    n = Net()
    x = n.input(2, 3, *(6,) * rank)
    merged(n, added(n, n.conv(x, 3), n.conv(x, 3, 1, pads=0), x))


def test_symbolic_sizes() -> None:
    n = Net()
    x = n.input(symbol("n"), 3, symbol("h"), symbol("w"))
    merged(n, n.op("Add", n.conv(x, 3), n.bn(x)), sizes={"n": 2, "h": 6, "w": 5})


def sum_of_two(n: Net, x: Value, first: dict[str, Any], second: dict[str, Any]) -> Graph:
    return n.done(n.op("Add", n.conv(x, 6, **first), n.conv(x, 6, **second)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"group": 6}, {"kernel": 1, "pads": 0}),  # a dense 3x3 convolution would be nine times the work
        ({"kernel": 3}, {"kernel": 3, "dilations": 2, "pads": 2}),
        ({"kernel": (1, 3), "pads": (0, 1, 0, 1)}, {"kernel": (3, 1), "pads": (1, 0, 1, 0)}),
        ({"group": 2}, {"group": 3}),
    ],
)
def test_branches_that_do_not_fit_stay(first: dict[str, Any], second: dict[str, Any]) -> None:
    n = Net()
    graph = sum_of_two(n, n.input(2, 6, 9, 9), first, second)
    check_refused(FUSE, graph, because="differ in strides, groups or taps", rule=MERGED)


def test_weights_of_eight_bits_stay_apart() -> None:
    n = Net()
    graph = sum_of_two(n, n.input(2, 6, 9, 9), {}, {"kernel": 1, "pads": 0})
    check_refused(FUSE, graph, because="in 8 bits, the sum", context=PassContext(precision="int8+fp16"))
    check_pass(FUSE, graph, changes=1, context=PassContext(precision="fp16"))


def test_a_sum_of_weights_that_overflows_stays() -> None:
    n = Net(np.float16)
    x = n.input(1, 1, 3, 3)
    big = [n.op("Conv", x, n.const(np.full((1, 1, 1, 1), 6e4)), attrs=_plain()) for _ in range(2)]
    check_refused(FUSE, n.done(added(n, *big)), because="would overflow", rule=MERGED)


def _plain() -> Any:
    from optdnn.ops.conv import ConvAttrs

    return ConvAttrs((1, 1), (0,) * 4, (1, 1))


def _others(case: str) -> Graph:
    n = Net()
    x, z = n.input(2, 6, 7, 7), n.input(2, 6, 7, 7, name="z")
    if case == "other inputs":
        return n.done(n.op("Add", n.conv(x, 6), n.conv(z, 6)))
    if case == "read twice":
        y = n.conv(x, 6)
        return n.done(n.op("Add", y, n.conv(x, 6, 1, pads=0)), n.op("Relu", y))
    if case == "unknown weights":
        w = n.input(6, 6, 1, 1, name="w")
        return n.done(n.op("Add", n.op("Conv", x, w, attrs=_plain()), n.conv(x, 6)))
    if case == "broadcast":
        return n.done(n.op("Add", n.conv(x, 6), n.input(6, 1, 1, name="v")))
    return n.done(n.op("Add", n.op("Relu", n.conv(x, 6)), n.conv(x, 6)))


@pytest.mark.parametrize("case", ["other inputs", "read twice", "unknown weights", "broadcast", "activation"])
def test_other_sums_are_no_candidates(case: str) -> None:
    graph = _others(case)
    rule = FuseConvBn()
    rule.rules = (parallel_convs,)
    check_untouched(rule, graph)
