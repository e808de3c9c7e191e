"""pool_last: average pools change places with 1x1 convolutions that have fewer channels out than in; pools of points."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph
from optdnn.ops.pool import AveragePoolAttrs, MaxPoolAttrs
from optdnn.passes.pool_last import PoolLast

LAST = PoolLast()


def branch(
    *, size: int = 3, pads: int = 1, include_pad: bool = True, strides: int = 1, channels: int = 4, kernel: int = 1,
    group: int = 1, readers: int = 1, conv_pads: int = 0, rank: int = 2, bias: bool = True,
) -> Graph:  # fmt: skip
    n = Net()
    x = n.input(2, 12, *(7,) * rank)
    y = n.average_pool(x, size, pads=pads, strides=strides, include_pad=include_pad)
    others = [n.op("Neg", y) for _ in range(readers - 1)]
    return n.done(n.op("Relu", n.conv(y, channels, kernel, pads=conv_pads, group=group, bias=bias)), *others)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "pads"), [(3, 1), (5, 2), (3, 0), (2, 0)])
def test_the_pool_moves_after_the_convolution(size: int, pads: int, bias: bool) -> None:
    graph, _ = check_pass(LAST, branch(size=size, pads=pads, bias=bias), changes=1, kinds={"Conv": 2, "Relu": 1})
    first, second = (op for op in graph.order() if op.kind == "Conv")
    assert (first.attrs.group, second.attrs.group) == (1, 4)
    assert first.input(2) is None
    assert (second.input(2) is not None) == bias
    assert graph.constant_value(second.inputs[1]).shape == (4, 1, size, size)


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank: int) -> None:
    check_pass(LAST, branch(rank=rank), changes=1, kinds={"Conv": 2, "Relu": 1})


def test_without_padding_both_ways_of_counting_are_one() -> None:
    check_pass(LAST, branch(pads=0, include_pad=False), changes=1)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"include_pad": False}, "a number that depends on the position"),
        ({"channels": 8}, "reduces 12 channels only to 8"),
        ({"readers": 2}, "is used 2 times"),
    ],
)
def test_refusals(options: dict[str, Any], because: str) -> None:
    check_refused(LAST, branch(**options), because=because)


@pytest.mark.parametrize("options", [{"strides": 2}, {"kernel": 3, "conv_pads": 1}, {"group": 2}, {"conv_pads": 1}])
def test_other_pairs_are_no_candidates(options: dict[str, Any]) -> None:
    check_untouched(LAST, branch(**options))


def points(
    kind: str = "MaxPool", *, size: tuple[int, ...] = (1, 1), strides: tuple[int, ...] = (2, 3), **attrs: Any
) -> Graph:
    n = Net()
    own = MaxPoolAttrs if kind == "MaxPool" else AveragePoolAttrs
    x = n.op("Exp", n.input(2, 3, 8, 9))
    pool = n.op(kind, x, attrs=own(size, strides, attrs.pop("pads", (0, 0, 0, 0)), (1, 1), **attrs))
    return n.done(n.op("Neg", pool))


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("strides", [(2, 3), (1, 2), (5, 1)])
def test_a_pool_of_points_is_a_slice(kind: str, strides: tuple[int, ...]) -> None:
    kinds = {"Exp": 1, "Neg": 1, "Slice": 1}
    check_pass(LAST, points(kind, strides=strides), changes=1, rules={"pool_of_points": 1}, kinds=kinds)


@pytest.mark.parametrize("options", [{"size": (1, 2)}, {"strides": (1, 1)}, {"pads": (0, 0, 1, 0)}], ids=str)
def test_other_pools_stay(options: dict[str, Any]) -> None:
    check_untouched(LAST, points(**options))
