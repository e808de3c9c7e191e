"""move_integers: the parts of a quantized Concat are quantized instead, if few of them need a launch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.quantized_nets import QNet
from test_integers import same_integers

from optdnn.ir.graph import Graph, Value
from optdnn.ir.verify import verify
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.quant import QuantizeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.integers import MoveIntegers
from optdnn.types import INT8

MOVE = MoveIntegers()
POOL = MaxPoolAttrs(kernel_shape=(3, 3), pads=(1, 1, 1, 1), strides=(1, 1), dilations=(1, 1))
Part = Callable[[QNet], Value]


def wide(n: QNet) -> Value:
    """A product whose weights exceed int8 when their zero point is subtracted."""
    stored = n.const(n.rng.integers(0, 256, (16, 16, 1, 1)), np.uint8)
    w = n.dq(stored, 0.01, 7)
    return n.op("Conv", data(n, 0.02, "w"), w, attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1)))


def data(n: QNet, scale: float = 0.03, name: str = "x") -> Value:
    return n.fake(n.input(2, 16, 6, 6, name=name), scale)


PARTS: dict[str, Part] = {
    "integers": data,
    "pool": lambda n: n.op("MaxPool", data(n, name="pooled"), attrs=POOL),
    "product": lambda n: n.qconv(data(n, 0.02, "c"), 16),
    "pointwise": lambda n: n.op("Relu", data(n, 0.02, "r")),
    "constant": lambda n: n.random(2, 16, 6, 6),
    "other scale": lambda n: data(n, 0.05, "o"),
    "pool of another scale": lambda n: n.op("MaxPool", data(n, 0.05, "p"), attrs=POOL),
    "input": lambda n: n.input(2, 16, 6, 6, name="i"),
    "product of float weights": lambda n: n.conv(data(n, 0.02, "d"), 16),
    "product of wide weights": wide,
    "product of floats": lambda n: n.conv(n.input(2, 16, 6, 6, name="f"), 16),
}
FREE, OTHERS = list(PARTS)[:5], list(PARTS)[5:]


def joined(*names: str, channels: bool = False, read: bool = False) -> Graph:
    n = QNet()
    y = n.op("Concat", *[PARTS[name](n) for name in names], attrs=ConcatAttrs(1))
    scale = n.const(np.full(n.dims(y)[1], 0.03) if channels else np.float32(0.03))
    stored = n.op(
        "QuantizeLinear", y, scale, n.const(np.zeros(n.graph.type(scale).static_shape), INT8), attrs=QuantizeAttrs(INT8)
    )
    return n.done(stored, *([n.op("Tanh", y)] if read else []))


def moved(graph: Graph) -> Graph:
    copy = graph.copy()
    MOVE(copy, PassContext())
    verify(copy)
    assert MOVE(copy, PassContext()).changes == 0
    return copy


@pytest.mark.parametrize("first", ["pool", "product", "pointwise"])
@pytest.mark.parametrize("second", FREE + OTHERS)
def test_parts_are_quantized(first: str, second: str) -> None:
    if first == second:
        second = "integers"
    graph = joined(first, second)
    done = moved(graph)
    (concat,) = done.of_kind("Concat")
    assert concat.outputs[0].type.dtype == np.int8
    rounded = {"integers": 0, "pool": 0, "constant": 0}
    inputs = len(graph.of_kind("QuantizeLinear")) - 1
    assert len(done.of_kind("QuantizeLinear")) == inputs + rounded.get(first, 1) + rounded.get(second, 1)
    same_integers(graph, done)


def test_parts_that_would_need_more_launches() -> None:
    for two in (("other scale", "input"), ("pool of another scale", "product of floats")):
        graph = joined("product", *two)
        report = MOVE(graph, PassContext())
        assert report.changes == 0
        assert any("would be quantized in launches of their own" in r.reason for r in report.refused)


@pytest.mark.parametrize(
    ("options", "because"),
    [({"read": True}, "has another reader"), ({"channels": True}, "it has a scale per channel")],
)
def test_refusals(options: dict[str, Any], because: str) -> None:
    graph = joined("product", "pointwise", **options)
    report = MOVE(graph, PassContext())
    assert report.changes == 0
    assert any(because in r.reason for r in report.refused)


@pytest.mark.parametrize("name", ["product", "pointwise"])
def test_a_result_is_quantized_before_it_is_pooled(name: str) -> None:
    n = QNet()
    graph = n.done(n.q(n.op("MaxPool", PARTS[name](n), attrs=POOL), 0.03))
    done = moved(graph)
    (pool,) = done.of_kind("MaxPool")
    assert pool.outputs[0].type.dtype == np.int8
    assert len(done.of_kind("QuantizeLinear")) == 2
    same_integers(graph, done)


@pytest.mark.parametrize(
    ("name", "twice", "because"),
    [
        ("input", False, "no launch computes the operand of MaxPool"),
        ("product of wide weights", False, "no launch computes the operand of MaxPool"),
        ("product of float weights", False, "no launch computes the operand of MaxPool"),
        ("product", True, "or its operand, has another reader"),
    ],
)
def test_pools_of_floats(name: str, twice: bool, because: str) -> None:
    n = QNet()
    x = PARTS[name](n)
    y = n.q(n.op("MaxPool", x, attrs=POOL), 0.03)
    graph = n.done(y, *([n.op("Tanh", x)] if twice else []))
    report = MOVE(graph, PassContext())
    assert report.changes == 0
    assert any(because in r.reason for r in report.refused)


@pytest.mark.parametrize("read", [False, True])
def test_pools_of_pools(read: bool) -> None:
    """The pyramid of YOLO (SPPF). If an operator reads a float, only this float is quantized in a launch of its own."""
    n = QNet()
    x = PARTS["product"](n)
    parts = [x]
    for _ in range(3):
        parts.append(n.op("MaxPool", parts[-1], attrs=POOL))
    graph = n.done(
        n.q(n.op("Concat", *reversed(parts), attrs=ConcatAttrs(1)), 0.03), *([n.op("Tanh", x)] if read else [])
    )
    done = moved(graph)
    assert {pool.outputs[0].type.dtype.name for pool in done.of_kind("MaxPool")} == {"int8"}
    assert len(done.of_kind("QuantizeLinear")) == 2
    same_integers(graph, done)


@pytest.mark.parametrize("product", [False, True])
def test_integers_that_only_floats_read(product: bool) -> None:
    n = QNet()
    y = n.fake(n.op("Concat", PARTS["product"](n), PARTS["other scale"](n), attrs=ConcatAttrs(1)), 0.03)
    graph = n.done(n.op("Tanh", y), *([n.qconv(y, 8)] if product else []))
    report = MOVE(graph, PassContext())
    assert (report.changes > 0) == product
    assert product or any("only operators on floats read the integers" in r.reason for r in report.refused)


def test_a_part_that_is_joined_twice() -> None:
    n = QNet()
    x = PARTS["product"](n)
    graph = n.done(n.q(n.op("Concat", x, x, attrs=ConcatAttrs(1)), 0.03))
    done = moved(graph)
    assert len(done.of_kind("QuantizeLinear")) == 2
    same_integers(graph, done)
