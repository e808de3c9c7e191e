"""layers_of_parts: layers with the same weights on several tensors are one layer of all items; others stay, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.passes.layers_of_parts import LayersOfParts
from optdnn.passes.products_of_parts import ProductsOfParts

PASS = LayersOfParts()
COUNT, ITEMS = 5, 2
Layer = Callable[[Net, Value], Value]


def layer(n: Net, kind: str, size: int) -> Layer:
    """A layer of this kind, whose weights all its calls share. ``size``: the last size of its operand (images: 3 channels)."""
    w, image, bias = n.random(size, 4), n.random(4, 3, 3, 3), n.random(4)
    one, three = (n.random(m) for m in (size, 3))
    conv = ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))
    return {
        "Gemm": lambda n, x: n.op("Gemm", x, w, bias, attrs=GemmAttrs()),
        "MatMul": lambda n, x: n.op("MatMul", x, w),
        "Conv": lambda n, x: n.op("Conv", x, image, bias, attrs=conv),
        "InstanceNormalization": lambda n, x: n.op("InstanceNormalization", x, three, three),
        "LayerNormalization": lambda n, x: n.op("LayerNormalization", x, one, one, attrs=LayerNormAttrs(-1)),
        "MaxPool": lambda n, x: n.max_pool(x, 2),
        "GlobalAveragePool": lambda n, x: n.op("GlobalAveragePool", x),
    }[kind]


SIZES = {"Gemm": (6,), "MatMul": (3, 6)} | dict.fromkeys(
    ["Conv", "InstanceNormalization", "LayerNormalization", "MaxPool", "GlobalAveragePool"], (3, 4, 6)
)


def frames(
    kind: str, *, axis: int = 1, backward: bool = False, after: str = "", count: int = COUNT, joined: bool = True
) -> Graph:
    """A layer for each frame of a video, whose frames lie along ``axis``. ``after``: an operator on each result."""
    n = Net()
    sizes = list(SIZES[kind])
    x = n.op("Abs", n.input(*([ITEMS, count] if axis else [count, ITEMS]), *sizes))
    call, found = layer(n, kind, sizes[-1]), list[Value]()
    for t in reversed(range(count)) if backward else range(count):
        y = call(n, n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(axis)))
        found.append(n.op(after, y) if after else y)
    return n.done(n.op("Concat", *found, attrs=ConcatAttrs(1))) if joined else n.done(*found)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", SIZES)
def test_frames_are_items_of_one_batch(kind: str, axis: int) -> None:
    graph, _ = check_pass(PASS, frames(kind, axis=axis), changes=1)
    (found,) = graph.of_kind(kind)
    assert graph.type(found.value).dims[0] == COUNT * ITEMS
    assert len(graph.of_kind("Transpose")) == axis


@pytest.mark.parametrize("kind", ["Gemm", "MaxPool"])
def test_frames_from_the_last_one_on(kind: str) -> None:
    graph, _ = check_pass(PASS, frames(kind, backward=True), changes=1)
    assert len(graph.of_kind(kind)) == 1


def test_two_frames_that_nothing_joins() -> None:
    graph, _ = check_pass(PASS, frames("Conv", count=2, joined=False), changes=1)
    assert len(graph.of_kind("Conv")) == 1


def test_layers_after_layers() -> None:
    n = Net()
    x = n.op("Abs", n.input(ITEMS, COUNT, 3, 8, 8))
    first, last, w, found = layer(n, "Conv", 8), layer(n, "MaxPool", 8), n.random(64, 7), list[Value]()
    for t in range(COUNT):
        y = n.op("Relu", first(n, n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(1))))
        y = n.op("Reshape", last(n, y), n.ints(ITEMS, 64))
        found.append(n.op("Gemm", y, w, attrs=GemmAttrs()))
    graph, _ = check_pass(PASS, n.done(*found), changes=3)
    assert [len(graph.of_kind(kind)) for kind in ("Conv", "Relu", "MaxPool", "Gemm")] == [1, 1, 1, 1]


def test_stages_of_all_parts() -> None:
    graph, _ = check_pass(PASS, frames("Gemm", after="Relu"), changes=1)
    after, _ = check_pass(ProductsOfParts(), graph, changes=1, rules={"stages_of_parts": 1})
    assert len(after.of_kind("Relu")) == 1


def separate(kind: str, count: int, *, spoiled: str = "") -> Graph:
    """A layer on ``count`` inputs. ``spoiled``: what differs at the last one."""
    n = Net()
    sizes = SIZES[kind]
    call, found = layer(n, kind, sizes[-1]), list[Value]()
    for k in range(count):
        last = k == count - 1
        items = 3 if last and spoiled == "items" else ITEMS
        x = n.op("Abs", n.input(items, *sizes, name=f"x{k}"))
        if last and spoiled == "operand":
            found.append(call(n, found[0]))
        elif last and spoiled == "weights":
            found.append(layer(n, kind, sizes[-1])(n, x))
        else:
            found.append(call(n, x))
    return n.done(*found)


def test_separate_tensors_are_joined() -> None:
    graph, _ = check_pass(PASS, separate("Gemm", 4), changes=1)
    (concat,) = graph.of_kind("Concat")
    assert len(concat.inputs) == 4
    assert len(graph.of_kind("Gemm")) == 1


@pytest.mark.parametrize("spoiled", ["items", "weights"])
def test_another_layer_stays(spoiled: str) -> None:
    graph, _ = check_pass(PASS, separate("Gemm", 5, spoiled=spoiled), changes=1)
    assert len(graph.of_kind("Gemm")) == 2


def test_few_tensors_stay() -> None:
    check_refused(PASS, separate("Gemm", 3), because="too few to be joined")
    check_refused(PASS, separate("InstanceNormalization", 5), because="too few to be joined")
    check_untouched(PASS, separate("MaxPool", 5))


def test_layers_that_depend_on_one_another_stay() -> None:
    n = Net()
    x, w = n.input(ITEMS, 6), n.random(6, 6)
    for _ in range(COUNT):
        x = n.op("Gemm", x, w, attrs=GemmAttrs())
    check_refused(PASS, n.done(x), because="depend on one another")


def test_large_layers_stay() -> None:
    n = Net(np.float32)
    x, w = n.input(4, 1 << 9, 1 << 10), n.const(np.zeros((1 << 10, 1 << 9)))
    parts = [n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(0)) for t in range(4)]
    graph = n.done(*(n.op("Gemm", part, w, attrs=GemmAttrs()) for part in parts))
    check_refused(PASS, graph, because="large enough for a launch of its own")


def test_results_that_take_too_much_memory_stay() -> None:
    n = Net(np.float32)
    x = n.input(5, 1 << 20, 4, 4, 4)
    parts = [n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(0)) for t in range(5)]
    check_refused(PASS, n.done(*(n.max_pool(part, 2) for part in parts)), because="too much memory")


@pytest.mark.parametrize(
    ("operands", "attrs"),
    [
        ({"w": "input"}, GemmAttrs()),
        ({"x": (6, ITEMS)}, GemmAttrs(transA=True)),
        ({"bias": (ITEMS, 4)}, GemmAttrs()),
    ],
    ids=["computed weights", "items are columns", "a bias for each item"],
)  # fmt: skip
def test_other_products_are_no_candidates(operands: dict[str, Any], attrs: GemmAttrs) -> None:
    n = Net()
    x = n.op("Abs", n.input(COUNT, *operands.get("x", (ITEMS, 6))))
    w = n.input(6, 4, name="w") if "w" in operands else n.random(6, 4)
    bias = n.random(*operands.get("bias", (4,)))
    parts = [n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(0)) for t in range(COUNT)]
    check_untouched(PASS, n.done(*(n.op("Gemm", part, w, bias, attrs=attrs) for part in parts)))


def test_layer_norms_of_all_items_are_no_candidates() -> None:
    n = Net()
    x, scale = n.op("Abs", n.input(COUNT, ITEMS, 6)), n.random(ITEMS, 6)
    parts = [n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(0)) for t in range(COUNT)]
    check_untouched(PASS, n.done(*(n.op("LayerNormalization", p, scale, attrs=LayerNormAttrs(0)) for p in parts)))


def test_a_network_of_spiking_neurons() -> None:
    """Two layers of leaky integrate-and-fire neurons: each is a product and a scan, not a product and an operator per step."""
    n = Net(np.float32)
    steps, x = 8, n.input(8, 4, 16)
    layers = [n.random(16, 32), n.random(32, 16)]
    states, found = [n.const(np.zeros((4, size))) for size in (32, 16)], list[Value]()
    for t in range(steps):
        y = n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(0))
        for k, w in enumerate(layers):
            charged = n.op("Add", n.op("Mul", states[k], n.const(0.9)), n.op("Gemm", y, w, attrs=GemmAttrs()))
            y = n.op("Cast", n.op("Greater", charged, n.const(0.5)), attrs=CastAttrs())
            states[k] = n.op("Sub", charged, y)
        found.append(n.op("Unsqueeze", y, n.ints(0)))
    program = check_simulated(n.done(n.op("Concat", *found, attrs=ConcatAttrs(0))))
    assert kinds(program).count("PointwiseScan") == 2
    assert sum(kind in ("Conv", "Gemm", "MatMul") for kind in kinds(program)) == 2
