"""gated_residual and gated_rows: gates that convolutions apply to images as they read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.canonicalize_arithmetic import CanonicalizeArithmetic
from optdnn.passes.image_tokens import ImageTokens
from optdnn.passes.rules import gates

PASS, ROWS = CanonicalizeArithmetic(), ImageTokens()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the least size of an image."""
    monkeypatch.setattr(gates, "LEAST", 0)


IMAGE = (2, 8, 5, 6)


def responses(
    *, last: bool = False, shifted: bool = True, swapped: bool = False, channels: int = 8, dtype: Any = np.float64
) -> Graph:
    """A global response norm as in ConvNeXt V2, and the convolution or product that reads it."""
    n = Net(dtype)
    x = n.op("Relu", n.input(2, 5, 6, channels) if last else n.conv(n.input(2, 16, 5, 6), channels, 1, pads=0))
    pixels, axis, one = ((1, 2), 3, (channels,)) if last else ((2, 3), 1, (channels, 1, 1))
    size = n.op("ReduceL2", x, n.ints(*pixels), attrs=ReduceAttrs())
    gate = n.op("Div", size, n.op("Add", n.op("ReduceMean", size, n.ints(axis), attrs=ReduceAttrs()), 1e-6))
    y = n.op("Mul", n.op("Mul", x, gate), n.random(*one))
    y = n.op("Add", y, n.random(*one)) if shifted else y
    y = n.op("Add", *((x, y) if swapped else (y, x)))
    return n.done(n.matmul(y, 32) if last else n.conv(y, 32, 1, pads=0))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", [{}, {"last": True}, {"shifted": False}, {"swapped": True}])
def test_a_value_and_its_product_are_multiplied_once(options: dict[str, Any]) -> None:
    graph, _ = check_pass(PASS, responses(**options), changes=1, rules={"gated_residual": 1})
    shapes = [graph.type(op.value).shape for kind in ("Mul", "Add") for op in graph.of_kind(kind)]
    large = (2, 5, 6, 8) if options.get("last") else IMAGE
    assert shapes.count(large) == 1 + options.get("shifted", True)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("last", [False, True])
def test_a_response_norm_is_a_stage_of_the_convolution(last: bool) -> None:
    program = check_simulated(responses(last=last, channels=64, dtype=np.float32), "fp16")
    conv = [s.params["op"] for s in program.steps if s.params["op"]["kind"] == "Conv"][-1]
    assert [s["stage"][0] for s in conv["attrs"]["prologue"]] == ["Mul"]


def gated(n: Net, x: Value, gate: Value, *, units: int = 4, kernel: int = 1) -> Graph:
    """``x * gate + x`` in front of a convolution."""
    return n.done(n.conv(n.op("Add", n.op("Mul", x, gate), x), units, kernel, pads=kernel // 2))


def test_small_images_are_multiplied_by_a_launch() -> None:
    check_refused(PASS, responses(), because="has fewer than", rule="gated_residual")


@pytest.mark.usefixtures("small")
def test_other_sums_stay() -> None:
    n = Net(np.float64)
    graph = gated(n, n.input(*IMAGE), n.input(2, 8, 1, 1, name="gate"), kernel=3)
    check_refused(PASS, graph, because="no 1x1 convolution", rule="gated_residual")
    n = Net(np.float64)
    graph = gated(n, n.input(*IMAGE), n.input(2, 1, 5, 6, name="gate"))
    check_refused(PASS, graph, because="not one number for all pixels", rule="gated_residual")
    n = Net(np.float64)
    x = n.input(*IMAGE)
    shifted = n.op(
        "Mul", n.op("Add", n.op("Mul", x, n.input(2, 8, 1, 1, name="a")), 1.5), n.input(2, 8, 1, 1, name="b")
    )
    check_untouched(PASS, n.done(n.conv(n.op("Add", shifted, x), 4, 1)))  # another constant for each gate
    n = Net(np.float64)
    x, other = n.input(*IMAGE), n.input(*IMAGE, name="other")
    y = n.op("Add", n.op("Mul", x, n.input(2, 8, 1, 1, name="a")), other)
    check_untouched(PASS, n.done(n.conv(y, 4, 1)))


def pixels(
    *, gate: tuple[int, ...] = (2, 1, 1, 8), shape: tuple[int, ...] = (2, 5, 6, 8), bias: bool = False, readers: int = 1
) -> Graph:
    """Gated pixels times a matrix."""
    n = Net(np.float64)
    x = n.op("Mul", n.input(*shape), n.input(*gate, name="gate"))
    y = n.matmul(x, 4)
    y = n.op("Add", y, n.random(4)) if bias else y
    return n.done(n.op("Relu", y), *(n.op("Abs", x) for _ in range(readers - 1)))


@pytest.mark.parametrize("bias", [False, True])
def test_gated_pixels_are_an_image_of_a_convolution(bias: bool) -> None:
    graph, _ = check_pass(ROWS, pixels(bias=bias), changes=1, rules={"gated_rows": 1})
    (conv,) = graph.of_kind("Conv")
    assert [s.kind for s in conv.attrs.prologue] == ["Mul"]
    assert (conv.input(2) is not None) == bias
    assert not {"MatMul", "Add", "Mul"} & set(graph.kinds())


def test_other_products_of_gated_pixels_stay() -> None:
    check_refused(ROWS, pixels(readers=2), because="used 2 times", rule="gated_rows")
    check_refused(ROWS, pixels(shape=(2, 1, 1, 8)), because="have one pixel", rule="gated_rows")
    check_untouched(ROWS, pixels(gate=(2, 5, 6, 1)))
    check_untouched(ROWS, pixels(gate=(2, 1, 8), shape=(2, 30, 8)))
