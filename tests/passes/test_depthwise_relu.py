"""depthwise_relu: a ReLU that only depthwise convolutions read becomes their prologue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.passes.base import PassContext
from optdnn.passes.depthwise_relu import DepthwiseRelu

FP16 = PassContext(precision="fp16", target="cuda:sm_90a")


def net(
    *, readers: int = 1, kernel: int = 3, channels: int = 24, dtype: Any = np.float16, groups: int | None = None,
    other: str = "", pads: int | None = None,
) -> Graph:  # fmt: skip
    """A sum that depthwise convolutions read through a ReLU, and that is added to their results."""
    n = Net(dtype)
    x = n.conv(n.input(2, 8, 9, 7), channels, 1, pads=0)
    relu = n.op("Relu", x)
    given = {"pads": kernel // 2 if pads is None else pads, "group": groups or channels}
    total: Value = x
    for _ in range(readers):
        total = n.op("Add", total, n.conv(relu, channels, kernel, bias=True, **given))
    return n.done(n.op("Tanh", total), *([n.op(other, relu)] if other else []))


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_each_reader_applies_it(readers: int, kernel: int) -> None:
    graph, _ = check_pass(
        DepthwiseRelu(), net(readers=readers, kernel=kernel), changes=readers, promoted_changes=0, context=FP16
    )
    assert "Relu" not in graph.kinds()
    prologues = [[s.kind for s in op.attrs.prologue] for op in graph.of_kind("Conv")]
    assert sorted(prologues) == [[]] + [["Relu"]] * readers


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_other_types_have_no_kernel_for_it(dtype: Any) -> None:
    check_untouched(DepthwiseRelu(), net(dtype=dtype), context=FP16)


@pytest.mark.parametrize("given", [{"groups": 4}, {"channels": 18}, {"kernel": 9}])
def test_other_convolutions_have_no_kernel_for_it(given: dict[str, Any]) -> None:
    check_untouched(DepthwiseRelu(), net(**given), context=FP16)


def test_another_reader_needs_it_stored() -> None:
    check_refused(DepthwiseRelu(), net(other="Sigmoid"), because="reads the result of .*, too", context=FP16)


@pytest.mark.parametrize(("precision", "kinds"), [("fp16", {"Conv"}), ("bf16", {"Conv"}), ("fp32", {"Pointwise"})])
def test_who_computes_it(precision: str, kinds: set[str]) -> None:
    program = check_simulated(net(readers=2, dtype=np.float32), precision)
    assert {s.params["op"]["kind"] for s in program.steps if any(name.startswith("Relu") for name in s.src)} == kinds


def residual(
    activation: str = "Relu", *, dtype: Any = np.float16, readers: int = 1, channels: int = 24, group: int = 1, added: bool = True
) -> Graph:  # fmt: skip
    """A sum that convolutions of 3 x 3 pixels read through an activation, and that is ``added`` to their results."""
    n = Net(dtype)
    x = n.conv(n.input(2, 8, 9, 7), channels, 1, pads=0)
    y = n.op(activation, x)
    total = x if added else n.input(2, channels, 9, 7, name="r")
    for _ in range(readers):
        total = n.op("Add", total, n.conv(y, channels, 3, bias=True, group=group))
    return n.done(n.op("Exp", total))


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu", "Elu", "Swish", "Gelu", "Tanh"])
def test_another_convolution_applies_it_too(activation: str) -> None:
    graph, _ = check_pass(
        DepthwiseRelu(), residual(activation), changes=1, rules={"conv_activation": 1}, promoted_changes=0, context=FP16
    )
    assert activation not in graph.kinds()
    assert sorted([s.kind for s in op.attrs.prologue] for op in graph.of_kind("Conv")) == [[], [activation]]


def squared(*, readers: int = 1, added: bool = True) -> Graph:
    """A tensor, and a convolution of its squares, which is ``added`` to it."""
    n = Net(np.float16)
    x = n.conv(n.input(2, 8, 9, 7), 24, 1, pads=0)
    squares = n.op("Mul", x, x)
    sums = [n.op("Tanh", n.conv(squares, 24, 1, pads=0, bias=True)) for _ in range(readers)]
    return n.done(*([n.op("Add", y, x) for y in sums] if added else sums))


def test_a_convolution_squares_its_input() -> None:
    graph, _ = check_pass(
        DepthwiseRelu(), squared(), changes=1, rules={"conv_activation": 1}, promoted_changes=0, context=FP16
    )
    (conv,) = [op for op in graph.of_kind("Conv") if op.attrs.prologue]
    assert conv.attrs.prologue == (Stage("Mul", (~0, ~0)),)


def test_squares_that_are_stored_once() -> None:
    check_refused(DepthwiseRelu(), squared(readers=2), because="has 2 readers", context=FP16)
    check_refused(DepthwiseRelu(), squared(added=False), because="only Mul_.* reads the result", context=FP16)


@pytest.mark.parametrize("given", [{"dtype": np.float32}, {"channels": 20}, {"group": 2}, {"activation": "Sigmoid"}])
def test_convolutions_whose_kernels_do_not_apply_it(given: dict[str, Any]) -> None:
    check_untouched(DepthwiseRelu(), residual(**given), context=FP16)


def test_a_launch_before_it_may_apply_it() -> None:
    because = "only Relu_.* reads the result before it"
    check_refused(DepthwiseRelu(), residual(added=False), because=because, context=FP16)


def test_two_convolutions_read_it_from_memory() -> None:
    check_refused(
        DepthwiseRelu(), residual(readers=2), because="has 2 readers, so that it is stored once", context=FP16
    )
