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
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.norm import GroupNormAttrs, LayerNormAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.layers_of_parts import LayersOfParts, StepsOfItems

PASS = LayersOfParts()
COUNT, ITEMS = 5, 2
Layer = Callable[[Net, Value], Value]


def layer(n: Net, kind: str, size: int) -> Layer:
    """A layer of this kind, whose weights all its calls share. ``size``: the last size of its operand (images: 3 channels)."""
    w, bias, image = n.random(size, 4), n.random(4), n.random(3, 3, 3, 3)
    conv = ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))
    up = ConvTransposeAttrs((2, 2), (1, 1, 1, 1), (1, 1), (0, 0))
    return {
        "Gemm": lambda n, x: n.op("Gemm", x, w, bias, attrs=GemmAttrs()),
        "MatMul": lambda n, x: n.op("MatMul", x, w),
        "Conv": lambda n, x: n.op("Conv", x, image, attrs=conv),
        "ConvTranspose": lambda n, x: n.op("ConvTranspose", x, image, attrs=up),
    }[kind]


SIZES = {"Gemm": (6,), "MatMul": (3, 6), "Conv": (3, 4, 6), "ConvTranspose": (3, 4, 6)}


def frames(
    kind: str, *, axis: int = 1, backward: bool = False, count: int = COUNT, after: Layer | None = None,
) -> Graph:  # fmt: skip
    """A layer for each frame of a video, whose frames lie along ``axis``. ``after``: what follows each layer."""
    n = Net()
    sizes = list(SIZES[kind])
    x = n.op("Abs", n.input(*([ITEMS, count] if axis else [count, ITEMS]), *sizes))
    call, found = layer(n, kind, sizes[-1]), list[Value]()
    for t in reversed(range(count)) if backward else range(count):
        y = call(n, n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(axis)))
        found.append(y if after is None else after(n, y))
    return n.done(*found)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", SIZES)
def test_frames_are_items_of_one_batch(kind: str, axis: int) -> None:
    graph, _ = check_pass(PASS, frames(kind, axis=axis), changes=1, rules={"layer_of_parts": 1})
    (found,) = graph.of_kind(kind)
    assert graph.type(found.value).dims[0] == COUNT * ITEMS
    assert len(graph.of_kind("Transpose")) == axis
    assert len(graph.of_kind("Split")) == 1


def test_frames_from_the_last_one_on() -> None:
    graph, _ = check_pass(PASS, frames("Gemm", backward=True), changes=1)
    assert len(graph.of_kind("Gemm")) == 1
    assert not graph.of_kind("Unsqueeze")


def test_two_frames() -> None:
    graph, _ = check_pass(PASS, frames("Conv", count=2), changes=1)
    assert len(graph.of_kind("Conv")) == 1


def rows(n: Net, x: Value) -> Value:
    return n.op("Reshape", x, n.ints(ITEMS, -1))


def mean(keep: bool, *axes: int) -> Layer:
    return lambda n, x: n.op("ReduceMean", x, n.ints(*axes), attrs=ReduceAttrs(keepdims=keep))


def padded(*pads: int) -> Layer:
    return lambda n, x: n.op("Pad", x, n.ints(*pads), attrs=PadAttrs())


def normed(kind: str, attrs: Any = None, size: int = 3) -> Layer:
    return lambda n, x: n.op(kind, x, n.const(np.arange(size) + 1.0), n.const(np.ones(size)), attrs=attrs)


CALLS: dict[str, Layer] = {
    "activation": lambda n, x: n.op("Relu", x),
    "comparison": lambda n, x: n.op("Greater", x, n.const(0.5)),
    "row": lambda n, x: n.op("Mul", x, n.const(np.arange(6.0))),
    "maxima": lambda n, x: n.max_pool(x, 2),
    "mean of pixels": lambda n, x: n.op("GlobalAveragePool", x),
    "instance norm": normed("InstanceNormalization"),
    "group norm": normed("GroupNormalization", GroupNormAttrs(3)),
    "layer norm": normed("LayerNormalization", LayerNormAttrs(-1), 6),
    "residual": lambda n, x: n.op("Add", x, n.op("Sigmoid", x)),
    "channels side by side": lambda n, x: n.op("Concat", x, n.op("Relu", x), attrs=ConcatAttrs(1)),
    "rows of pixels": rows,
    "tokens": lambda n, x: n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 3, 1))),
    "softmax": lambda n, x: n.op("Softmax", x, attrs=SoftmaxAttrs(1)),
    "mean": mean(False, 2, 3),
    "part": lambda n, x: n.op("Slice", x, n.ints(1), n.ints(3), n.ints(2)),
    "padding": padded(0, 0, 1, 1, 0, 0, 1, 1),
    "twice as large": lambda n, x: n.op(
        "Resize", x, None, n.const([1, 1, 2, 2], np.float32), attrs=ResizeAttrs(mode="nearest")
    ),
}
"""Operators that compute each item by itself."""


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_equal_operators_are_one(call: Layer) -> None:
    one, many = frames("Conv", count=1, after=call), frames("Conv", after=call)
    inner = len([op for op in one.ops() if op.kind not in ("Input", "Output", "Constant", "Abs", "Gather", "Conv")])
    graph, _ = check_pass(PASS, many, changes=1 + inner, rules={"layer_of_parts": 1, "operator_of_items": inner})
    assert len(graph.of_kind("Split")) == 1


@pytest.mark.parametrize(
    "call",
    [
        mean(True, 0), padded(1, 0, 0, 0, 0, 0, 0, 0), normed("LayerNormalization", LayerNormAttrs(0), 6),
        lambda n, x: n.op("Transpose", x, attrs=TransposeAttrs((1, 0, 2, 3))),
        lambda n, x: n.op("Softmax", x, attrs=SoftmaxAttrs(0)),
        lambda n, x: n.op("Reshape", x, n.ints(-1)),
        lambda n, x: n.op("Slice", x, n.ints(1), n.ints(2), n.ints(0)),
        lambda n, x: n.op("Concat", x, x, attrs=ConcatAttrs(0)),
        lambda n, x: n.op("Concat", x, n.const(np.ones((ITEMS, 1, 4, 6))), attrs=ConcatAttrs(1)),  # coordinates (CoordConv)
        lambda n, x: n.op("Add", x, n.const(np.arange(ITEMS * 3 * 4 * 6.0).reshape(ITEMS, 3, 4, 6))),
        lambda n, x: n.op("CumSum", x, n.const(0, np.int64)),
    ],
)  # fmt: skip
def test_operators_across_items_stay(call: Layer) -> None:
    check_pass(PASS, frames("Conv", after=call), changes=1, rules={"layer_of_parts": 1})


def test_operators_that_differ_stay() -> None:
    def after(n: Net, x: Value) -> Value:
        n.count += 1
        return n.op("Add", x, n.const(float(n.count)))

    _, report = check_pass(PASS, frames("Conv", after=after), changes=1)
    assert "the operators on the other parts differ" in {r.reason for r in report.refused}


def test_layers_after_layers() -> None:
    n = Net()
    x = n.op("Abs", n.input(ITEMS, COUNT, 3, 8, 8))
    first, w, found, target = layer(n, "Conv", 8), n.random(48, 7), list[Value](), n.ints(ITEMS, 48)
    for t in range(COUNT):
        y = n.op("Relu", first(n, n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(1))))
        found.append(n.op("Gemm", n.op("Reshape", n.max_pool(y, 2), target), w, attrs=GemmAttrs()))
    graph, _ = check_pass(PASS, n.done(*found), changes=5)
    assert [len(graph.of_kind(kind)) for kind in ("Conv", "Relu", "MaxPool", "Gemm", "Split")] == [1, 1, 1, 1, 1]


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


def test_equal_weights_of_folding_are_the_same() -> None:
    """A batch norm that is folded into a shared layer makes new weights for each call."""
    n = Net()
    w = np.arange(24.0).reshape(6, 4)
    found = [n.op("Gemm", n.input(ITEMS, 6, name=f"x{k}"), n.const(w), attrs=GemmAttrs()) for k in range(4)]
    check_pass(PASS, n.done(*found), changes=1)


@pytest.mark.parametrize("spoiled", ["items", "weights"])
def test_another_layer_stays(spoiled: str) -> None:
    graph, _ = check_pass(PASS, separate("Gemm", 5, spoiled=spoiled), changes=1)
    assert len(graph.of_kind("Gemm")) == 2


def test_few_tensors_stay() -> None:
    check_refused(PASS, separate("Gemm", 3), because="too few to be joined")


def test_two_images_are_joined() -> None:
    graph, _ = check_pass(PASS, separate("Conv", 2), changes=1)
    assert len(graph.of_kind("Conv")) == 1
    check_refused(PASS, separate("ConvTranspose", 2), because="too few to be joined")


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
    x, w = n.input(5, 1 << 26, 1), n.const(np.zeros((1, 2)))
    parts = [n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(0)) for t in range(5)]
    check_refused(PASS, n.done(*(n.op("Gemm", p, w, attrs=GemmAttrs()) for p in parts)), because="too much memory")


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


def test_steps_of_a_recurrence_are_positions() -> None:
    n = Net()
    x, w, state, found = (
        n.op("Abs", n.input(COUNT, ITEMS, 6)),
        n.random(6, 4),
        n.input(ITEMS, 4, name="h"),
        list[Value](),
    )
    for t in range(COUNT):
        part = n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(0))
        state = n.op("Add", n.op("Mul", state, n.const(0.5)), n.op("Gemm", part, w, attrs=GemmAttrs()))
        found.append(state)
    graph, _ = check_pass(PASS, n.done(*found), changes=1)
    after, _ = check_pass(StepsOfItems(), graph, changes=1)
    assert not after.of_kind("Split")
    check_untouched(StepsOfItems(), check_pass(PASS, frames("Gemm"), changes=1)[0])


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
