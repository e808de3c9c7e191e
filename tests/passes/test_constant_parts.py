"""constant_parts: constant channels in front of a product are multiplied when the network is built."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.constant_parts import ConstantParts
from optdnn.types import BF16

PASS = ConstantParts()


def images(n: Net, *parts: Any, batch: int = 2, axis: int = 1) -> Value:
    """A Concat of parts: a number stands for a channel of this value, "places" for the column numbers of the pixels."""
    made = []
    for part in parts:
        if isinstance(part, float):
            part = n.const(np.full((batch, 1, 6, 5), part))
        elif part == "places":
            part = n.const(np.broadcast_to(np.linspace(-1, 1, 5), (batch, 1, 6, 5)))
        made.append(part)
    return n.op("Concat", *made, attrs=ConcatAttrs(axis))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kernel", "pads", "part", "convolutions"), [
    (1, 0, 0.5, 1), (3, 0, 0.5, 1), (3, 1, 0.5, 2), (1, 0, "places", 2), (3, 1, "places", 2),
])  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_convolutions(kernel: int, pads: int, part: Any, convolutions: int, first: bool) -> None:
    """Channels of one value, without padding, add a number to each channel of the result; others add an image."""
    n = Net()
    x = n.input(2, 8, 6, 5)
    y = images(n, *((part, x) if first else (x, part)))
    graph, _ = check_pass(PASS, n.done(n.conv(y, 4, kernel, pads=pads, bias=True)), changes=1)
    assert not graph.of_kind("Concat")
    assert len(graph.of_kind("Conv")) == convolutions


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "transB"])
@pytest.mark.parametrize("even", [True, False])
def test_rows(kind: str, even: bool) -> None:
    n = Net()
    row = n.rng.standard_normal((1 if even else 6, 3))
    y = n.op("Concat", n.const(np.broadcast_to(row, (6, 3))), n.input(6, 16), attrs=ConcatAttrs(1))
    y = n.matmul(y, 8) if kind == "MatMul" else n.gemm(y, 8, trans_b=kind == "transB")
    graph, _ = check_pass(PASS, n.done(y), changes=1)
    assert len(graph.of_kind("MatMul", "Gemm")) == (1 if even else 2)


@pytest.mark.parametrize("kind", ["Conv", "MatMul"])
def test_weights_of_bf16(kind: str) -> None:
    n = Net(BF16)
    if kind == "Conv":
        y = n.conv(images(n, n.input(2, 8, 6, 5), 0.5), 4, 1, pads=0)
    else:
        y = n.matmul(n.op("Concat", n.const(np.ones((6, 3))), n.input(6, 16), attrs=ConcatAttrs(1)), 8)
    graph, _ = check_pass(PASS, n.done(y), changes=1)
    assert not graph.of_kind("Concat")


def test_the_other_parts_stay_joined() -> None:
    n = Net()
    x, z = n.input(2, 8, 6, 5), n.input(2, 3, 6, 5, name="z")
    graph, _ = check_pass(PASS, n.done(n.conv(images(n, x, 2.0, z, "places"), 4)), changes=1)
    (joined,) = graph.of_kind("Concat")
    assert len(joined.inputs) == 2


def test_all_readers_are_products() -> None:
    n = Net()
    y = images(n, n.input(2, 8, 6, 5), 0.25)
    graph, _ = check_pass(PASS, n.done(n.conv(y, 4), n.conv(y, 8, 1, pads=0)), changes=2)
    assert not graph.of_kind("Concat")


def test_zeros_add_nothing() -> None:
    n = Net()
    check_pass(PASS, n.done(n.conv(images(n, n.input(2, 8, 6, 5), 0.0), 4)), changes=1, kinds={"Conv": 1})


def equation(steps: int) -> Graph:
    """A step of an equation that convolutions describe, with the time as a channel."""
    n = Net()
    x = n.input(2, 16, 6, 5)
    for k in range(steps):
        x = n.op("Add", x, n.op("Tanh", n.conv(images(n, x, k / 4), 16, bias=True)))
    return n.done(x)


def test_nothing_is_copied_between_the_convolutions() -> None:
    found = kinds(check_simulated(equation(3)))
    # The added constant is a stage; if it is an image, the shortcut is a separate launch. Input and output are transposed.
    assert found == ["Copy", "Conv", *["Conv", "Pointwise"] * 2, "Pointwise"]


def test_it_refuses() -> None:
    n = Net()
    y = images(n, n.input(2, 8, 6, 5), 0.25)
    check_refused(PASS, n.done(n.conv(y, 4), n.op("Relu", y)), because="reads the joined tensor as well")
    n = Net()
    y = images(n, n.input(2, 3, 6, 5), 0.25)
    check_refused(PASS, n.done(n.conv(y, 16)), because="larger than the joined tensor")
    n = Net()
    y = images(n, n.input(2, 8, symbol("h", 2, 9), 5), 0.25, axis=1)
    check_refused(PASS, n.done(n.conv(y, 4)), because="sizes of the joined tensors are not known")


def test_other_products_are_no_candidates() -> None:
    n = Net()
    x = n.input(2, 7, 6, 5)
    y = images(n, x, 0.25)
    check_untouched(PASS, n.done(n.conv(y, 4, group=2)))
    n = Net()
    y = images(n, n.input(2, 7, 6, 5), 0.25)
    check_untouched(PASS, n.done(n.conv(y, 4, pads=0, auto_pad="SAME_UPPER")))
    n = Net()
    y = images(n, n.input(2, 7, 6, 5), n.input(2, 1, 6, 5, name="z"))
    check_untouched(PASS, n.done(n.conv(y, 4)))
    n = Net()
    y = n.op("Concat", n.input(1, 5), n.const(np.ones((1, 5))), attrs=ConcatAttrs(0))
    check_untouched(PASS, n.done(n.matmul(y, 4)))
    n = Net()
    y = n.op("Concat", n.input(6, 5), n.const(np.ones((6, 1))), attrs=ConcatAttrs(1))
    check_untouched(PASS, n.done(n.op("MatMul", y, n.input(6, 4, name="w")), n.op("MatMul", n.random(3, 6), y)))
    n = Net()
    y = n.op("Concat", n.input(6, 5), n.const(np.ones((6, 1))), attrs=ConcatAttrs(1))
    check_untouched(PASS, n.done(n.op("Gemm", y, n.random(6, 4), attrs=GemmAttrs(transA=True))))
    n = Net()
    y = n.op("Concat", n.input(2, 0, 5), n.const(np.ones((2, 0, 1))), attrs=ConcatAttrs(2))  # no rows
    check_untouched(PASS, n.done(n.op("MatMul", y, n.random(6, 4))))
