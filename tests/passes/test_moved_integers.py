"""move_integers: integers are moved, and dequantized for the product that reads them. Brevitas rounds nothing in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.quantized_nets import QNet
from support.simulated import check_simulated, kinds

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.integers import MoveIntegers

MOVE = MoveIntegers()


def image(n: QNet, name: str = "x", scale: float = 0.03, zero: int | None = None, dtype: Any = np.int8) -> Value:
    return n.fake(n.input(2, 8, 6, 6, name=name), scale, zero, dtype)


def joined(n: QNet, *parts: Value) -> Value:
    return n.op("Concat", *parts, attrs=ConcatAttrs(1))


def resized(n: QNet, x: Value, mode: str = "nearest", **more: str) -> Value:
    attrs = ResizeAttrs(
        **{"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor", **more}
    )
    crops = "tf_crop" in attrs.coordinate_transformation_mode
    roi = n.const(np.array([0, 0, 0, 0, 1, 1, 2, 2]), np.float32) if crops else None
    return n.op("Resize", x, roi, n.const(np.array([1, 1, 2, 2]), np.float32), attrs=attrs)


def halves(n: QNet, x: Value) -> Value:
    split = n.op("Split", x, n.ints(4, 4), attrs=SplitAttrs(1), outputs=2)
    return joined(n, *reversed(split))


SAME = MaxPoolAttrs((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), False)
MOVES: dict[str, tuple[Callable[[QNet, Value], Value], int]] = {
    "pool": (lambda n, x: n.pool(x), 1),
    "concat": (lambda n, x: joined(n, x, image(n, "z")), 1),
    "twice": (lambda n, x: n.op("Transpose", n.pool(x), attrs=TransposeAttrs((0, 1, 3, 2))), 2),
    "resize": (lambda n, x: resized(n, x), 1),
    "pyramid": (lambda n, x: joined(n, x, y := n.op("MaxPool", x, attrs=SAME), y), 2),
    "halves": (halves, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_the_integers_are_moved(name: str) -> None:
    after, changes = MOVES[name]
    n = QNet()
    graph = n.done(n.qconv(after(n, image(n)), 8))
    made, _ = check_pass(MOVE, graph, changes=changes, rules={"dequantize_after_moves": changes})
    (conv,) = made.of_kind("Conv")
    assert made.op(conv.inputs[0]).kind == "DequantizeLinear"  # type: ignore[arg-type]
    feeds = random_feeds(graph, 1)
    for a, b in zip(evaluate(graph, feeds).values(), evaluate(made, feeds).values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_stay_integers_beside_moved_data() -> None:
    n = QNet()
    report = FoldConstants()(n.done(n.qconv(joined(n, n.pool(image(n)), n.pool(image(n, "z"))), 8)))
    assert [r.reason for r in report.refused] == ["it holds the integer weights of a quantized operator"]
    n = QNet()
    assert FoldConstants()(n.done(n.qconv(resized(n, image(n), "linear"), 8))).changes == 1


@pytest.mark.parametrize(("zero", "dtype"), [(None, np.int8), (-128, np.int8), (3, np.uint8)])
def test_all_convolutions_have_8_bits(zero: int | None, dtype: Any) -> None:
    """Also if the values are read as floats, by a shortcut."""
    n = QNet()
    x = n.fake(n.op("Relu", n.qconv(image(n), 16)), 0.02, zero, dtype)
    y = n.pool(x)
    z = n.op("Add", n.op("Relu", n.qconv(y, 16)), y)
    program = check_simulated(n.done(n.qconv(n.fake(z, 0.04), 8)), "fp16")
    assert kinds(program).count("QuantizedConv") == 3
    assert "Conv" not in kinds(program)


def used_as_floats() -> Graph:
    n = QNet()
    return n.done(n.op("Tanh", n.pool(image(n))))


def float_weights() -> Graph:
    n = QNet()
    return n.done(n.conv(n.pool(image(n)), 8))


@pytest.mark.parametrize("graph", [used_as_floats(), float_weights()], ids=["floats", "float weights"])
def test_values_that_no_quantized_product_reads(graph: Graph) -> None:
    check_untouched(MOVE, graph)


def after(move: Callable[[QNet], Value]) -> Graph:
    n = QNet()
    return n.done(n.qconv(move(n), 8))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (after(lambda n: joined(n, image(n), image(n, "z", 0.04))), "different scales or zero points"),
        (after(lambda n: joined(n, image(n), image(n, "z", zero=3))), "different scales or zero points"),
        (after(lambda n: joined(n, image(n), image(n, "z", dtype=np.uint8))), "not all of int8, or of uint8"),
        (after(lambda n: n.pool(image(n, dtype=np.int16))), "not all of int8, or of uint8"),
        (after(lambda n: n.pool(n.fake_channels(n.input(2, 8, 6, 6), np.full(8, 0.03)))), "several scales"),
    ],
    ids=["scales", "zero points", "types", "16 bits", "channels"],
)
def test_moves_that_stay_on_floats(graph: Graph, because: str) -> None:
    check_refused(MOVE, graph, because=because, rule="dequantize_after_moves")


@pytest.mark.parametrize("more", [{"mode": "linear"}, {"coordinate_transformation_mode": "tf_crop_and_resize"}])
def test_interpolated_values_are_no_moved_ones(more: dict[str, str]) -> None:
    check_untouched(MOVE, after(lambda n: resized(n, image(n), **more)))
