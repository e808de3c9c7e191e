"""sibling_sums: the gates of a convolutional LSTM, and sums of convolutions that stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.sibling_sums import SumsOfSiblings

CUDA = PassContext(target="cuda:sm_90a")


def conv(
    n: Net, x: Value, out: int = 4, *, k: int = 3, bias: bool = False, weight: Any = None, group: int = 1
) -> Value:
    w = n.random(out, n.dims(x)[1] // group, k, k) if weight is None else weight
    attrs = ConvAttrs(strides=(1, 1), pads=(k // 2,) * 4, dilations=(1, 1), group=group)
    return n.op("Conv", x, w, *([n.random(out)] if bias else []), attrs=attrs)


def images(n: Net, size: int = 6) -> tuple[Value, Value]:
    return n.input(1, 3, size, size), n.input(1, 4, size, size, name="h")


@pytest.mark.parametrize("turned", [False, True])
def test_gates_of_a_convolutional_lstm(turned: bool) -> None:
    n = Net(np.float64)
    x, h = images(n)
    kernels = ("Sigmoid", "Sigmoid", "Tanh", "Sigmoid")
    sums = []
    for k in range(4):
        pair = conv(n, x, bias=k == 1), conv(n, h)
        sums.append(n.op("Add", *(pair[::-1] if turned and k == 2 else pair)))
    graph = n.done(*(n.op(kind, s) for kind, s in zip(kernels, sums, strict=True)))
    kinds = {"Conv": 2, "Add": 1, "Split": 1, "Sigmoid": 3, "Tanh": 1}
    after, _ = check_pass(SumsOfSiblings(), graph, changes=1, kinds=kinds, context=CUDA)
    assert [o.type.dims[1] for o in after.of_kind("Split")[0].outputs] == [4, 4, 4, 4]
    assert {c.outputs[0].type.dims[1] for c in after.of_kind("Conv")} == {16}


def test_sums_of_other_geometry_stay() -> None:
    n = Net(np.float64)
    x, h = images(n)
    outs = [n.op("Add", conv(n, x), conv(n, h)) for _ in range(3)]
    graph = n.done(*outs, n.op("Add", conv(n, x, k=1), conv(n, h)))
    _, report = check_pass(SumsOfSiblings(), graph, changes=1, kinds={"Conv": 4, "Add": 2, "Split": 1}, context=CUDA)
    assert any("fewer than 3" in r.reason for r in report.refused)


def refused(n: Net, outs: list[Value], because: str) -> None:
    check_refused(SumsOfSiblings(), n.done(*outs), because=because, context=CUDA)


def test_two_sums_are_refused() -> None:
    n = Net(np.float64)
    x, h = images(n)
    refused(n, [n.op("Add", conv(n, x), conv(n, h)) for _ in range(2)], "fewer than 3 sums add convolutions")


def test_sums_of_different_kernels_are_refused() -> None:
    n = Net(np.float64)
    x, h = images(n)
    refused(n, [n.op("Add", conv(n, x, k=k), conv(n, h)) for k in (1, 3, 5)], "have this geometry and type")


def test_computed_weights_are_refused() -> None:
    n = Net(np.float64)
    x, h = images(n)
    w = n.input(4, 4, 3, 3, name="w")
    refused(n, [n.op("Add", conv(n, x), conv(n, h, weight=w)) for _ in range(3)], "its weights are not constant")


def test_grouped_convolutions_are_refused() -> None:
    n = Net(np.float64)
    x, h = images(n)
    refused(
        n, [n.op("Add", conv(n, x), conv(n, h, group=2)) for _ in range(3)], "a grouped convolution reads only its own"
    )


def test_large_sums_are_refused() -> None:
    n = Net(np.float64)
    x, h = images(n, 300)
    refused(n, [n.op("Add", conv(n, x, 16, k=1), conv(n, h, 16, k=1)) for _ in range(3)], "the sums would be stored")


def test_neighbors() -> None:
    n = Net(np.float64)
    x, h = images(n)
    squares = [n.op("Add", conv(n, x), conv(n, x)) for _ in range(3)]
    read_twice = conv(n, h)
    outs = [*squares, read_twice, n.op("Add", conv(n, x), read_twice), n.op("Add", conv(n, x), n.op("Relu", h))]
    check_untouched(SumsOfSiblings(), n.done(*outs), context=CUDA)


# ---------------------------------------------------------------- one step of results that are computed before


def stepped(
    n: Net, h: Value, count: int = 4, *, axis: int = 0, scalar: bool = True, at: int = 2, places: tuple[int, ...] = ()
) -> list[Value]:  # fmt: skip
    """Sums of a convolution of ``h`` and one step of tensors with five steps along ``axis``."""
    channels, *size = n.dims(h)[1:]
    whole = [1, channels, *size]
    outs = []
    for k in range(count):
        shape = [*whole[:axis], 5, *whole[axis:]] if scalar else [5 if i == axis else d for i, d in enumerate(whole)]
        index = places[k] if places else at
        place = n.const(np.asarray(index if scalar else [index]), np.int64)
        entry = n.op("Gather", n.input(*shape, name=f"r{k}"), place, attrs=GatherAttrs(axis))
        pair = entry, conv(n, h, int(channels), bias=k == 1)  # type: ignore[arg-type]
        outs.append(n.op("Add", *(pair[::-1] if k % 2 else pair)))
    return outs


@pytest.mark.parametrize(("axis", "scalar"), [(0, True), (2, True), (4, True), (0, False)])
def test_gates_that_add_one_step_of_other_results(axis: int, scalar: bool) -> None:
    """Convolutions of all steps' inputs are computed before the first step (Keras's ConvLSTM2D)."""
    n = Net(np.float64)
    outs = stepped(n, n.input(1, 4, 6, 6, name="h"), axis=axis, scalar=scalar)
    kinds = {"Conv": 1, "Add": 1, "Split": 1, "Concat": 1, "Gather": 1}
    after, _ = check_pass(SumsOfSiblings(), n.done(*outs), changes=1, kinds=kinds, context=CUDA)
    assert after.of_kind("Conv")[0].outputs[0].type.dims[1] == 16


def test_too_few_or_different_steps_stay() -> None:
    n = Net(np.float64)
    refused(
        n, stepped(n, n.input(1, 4, 6, 6, name="h"), 2), "fewer than 3 sums add convolutions of this value to entries"
    )
    n = Net(np.float64)
    outs = stepped(n, n.input(1, 4, 6, 6, name="h"), 3, places=(0, 1, 2))
    refused(n, outs, "fewer than 3 sums add convolutions of this value to entries")


def test_entries_along_the_channels_stay() -> None:
    n = Net(np.float64)
    outs = stepped(n, n.input(1, 1, 6, 6, name="h"), 3, axis=1, scalar=False)
    refused(n, outs, "the entries are taken along their channels")


def test_large_entries_stay() -> None:
    n = Net(np.float64)
    refused(n, stepped(n, n.input(1, 16, 160, 160, name="h"), 3), "MB would be moved to save")
