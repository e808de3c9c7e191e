"""fuse_siblings: products and convolutions whose epilogues read tensors that can be read as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.check import check_pass, check_refused
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_siblings import FuseSiblings

CUDA = PassContext(target="cuda:sm_90a")
WIDTH = 8


def gated(n: Net, x: Value, *factors: Value) -> Value:
    """A product, a bias, and factors: the stages of an epilogue."""
    stages = [Stage("Add", (-1, 2)), *(Stage("Mul", (-2 - k, 3 + k)) for k in range(len(factors)))]
    w, b = n.random(6, WIDTH), n.random(WIDTH)
    return n.op("MatMul", x, w, b, *factors, attrs=MatMulAttrs(epilogue=tuple(stages)))  # type: ignore[no-any-return]


def triangle(ports: Sequence[int], gates: int = 3, masks: int = 1) -> Graph:
    """The gated and masked factors of a triangle multiplication. ``ports``: the gate of each, a part of one tensor; ``masks``:
    1 if they share a mask, 2 if each has its own, 0 without a mask."""
    n = Net(np.float64)
    x, y = n.input(5, 6), n.input(5, gates * WIDTH, name="y")
    parts = n.op("Split", y, n.ints(*[WIDTH] * gates), attrs=SplitAttrs(1), outputs=gates)
    given = [n.input(5, 1, name=f"m{k}") for k in range(masks)]
    used = [given[k % masks : k % masks + 1] for k in range(len(ports))] if masks else [[]] * len(ports)
    made = [gated(n, x, parts[port], *mask) for port, mask in zip(ports, used, strict=True)]
    others = [n.op("Tanh", part) for k, part in enumerate(parts) if k not in ports]
    return n.done(*(n.op("Exp", v) for v in made), *others)


@pytest.mark.parametrize(("ports", "gates", "slices"), [((0, 1), 2, 0), ((1, 0), 2, 0), ((0, 1), 3, 1), ((1, 2), 3, 1)])
def test_gates_that_are_parts_of_one_tensor(ports: Sequence[int], gates: int, slices: int) -> None:
    graph, _ = check_pass(FuseSiblings(), triangle(ports, gates), changes=1, context=CUDA)
    (product,) = graph.of_kind("MatMul")
    assert product.outputs[0].type.static_shape == (5, 2 * WIDTH)
    assert [s.kind for s in product.attrs.epilogue] == ["Add", "Mul", "Mul"]
    assert len(graph.of_kind("Slice")) == slices


def test_gates_without_a_mask() -> None:
    graph, _ = check_pass(FuseSiblings(), triangle((0, 1), masks=0), changes=1, context=CUDA)
    assert len(graph.of_kind("MatMul")) == 1


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (triangle((0, 2)), "parts of a tensor that are not side by side"),
        (triangle((1, 1)), "parts of a tensor that are not side by side"),
        (triangle((0, 1), masks=2), "has the same geometry, type and activation"),
    ],
    ids=["a part between them", "one part twice", "masks of their own"],
)
def test_other_parts_are_refused(graph: Graph, because: str) -> None:
    check_refused(FuseSiblings(), graph, because=because, context=CUDA)


def test_tensors_of_their_own_are_refused() -> None:
    n = Net(np.float64)
    x = n.input(5, 6)
    made = [gated(n, x, n.input(5, WIDTH, name=name)) for name in "ab"]
    check_refused(FuseSiblings(), n.done(*made), because="reads a value that is not a constant", context=CUDA)


def test_processors_leave_them() -> None:
    because = "reads a value that is not a constant"
    check_refused(FuseSiblings(), triangle((0, 1)), because=because, context=PassContext(target="cpu"))


def recurrent(ports: Sequence[int], parts: int = 3, *, axis: int = 1, context: str = "Split") -> Graph:
    """The gates of RAFT-Stereo's recurrent unit: convolutions of one image that add parts of its context. ``ports``: their parts;
    ``axis``: along which the context is split."""
    n = Net(np.float64)
    x, whole = n.input(2, 6, 8, 8), [2, WIDTH, 8, 8]
    size = whole[axis]
    whole[axis] *= parts
    y = n.input(*whole, name="y")
    taken = n.op("Split", y, n.ints(*[size] * parts), attrs=SplitAttrs(axis), outputs=parts)
    if context == "Slice":
        taken = [n.op("Slice", y, n.ints(k * size), n.ints((k + 1) * size), n.ints(axis)) for k in range(parts)]
    made = []
    for port in ports:
        attrs = ConvAttrs(
            strides=(1, 1),
            dilations=(1, 1),
            pads=(1, 1, 1, 1),
            epilogue=(Stage("Add", (-1, 3)), Stage("Sigmoid", (-2,))),
        )
        made.append(n.op("Conv", x, n.random(WIDTH, 6, 3, 3), n.random(WIDTH), taken[port], attrs=attrs))
    others = [n.op("Tanh", part) for k, part in enumerate(taken) if k not in ports]
    return n.done(*(n.op("Exp", v) for v in made), *others)


@pytest.mark.parametrize(("ports", "parts", "slices"), [((0, 1), 2, 0), ((1, 0), 2, 0), ((0, 1), 3, 1), ((2, 1), 3, 1)])
def test_gates_that_add_parts_of_a_context(ports: Sequence[int], parts: int, slices: int) -> None:
    graph, _ = check_pass(FuseSiblings(), recurrent(ports, parts), changes=1, rules={"siblings": 1}, context=CUDA)
    (convolution,) = graph.of_kind("Conv")
    assert convolution.outputs[0].type.static_shape == (2, 2 * WIDTH, 8, 8)
    assert [s.kind for s in convolution.attrs.epilogue] == ["Add", "Sigmoid"]
    assert len(graph.of_kind("Slice")) == slices


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (recurrent((0, 2)), "parts of a tensor that are not side by side"),
        (recurrent((0, 1), axis=2), "reads a value that is not a constant"),
        (recurrent((0, 1), context="Slice"), "reads a value that is not a constant"),
    ],
    ids=["a part between them", "parts of rows", "slices"],
)
def test_other_contexts_are_refused(graph: Graph, because: str) -> None:
    check_refused(FuseSiblings(), graph, because=because, context=CUDA)
