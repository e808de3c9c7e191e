"""Explicitly quantized networks: one form, integers stay integers, and nothing between equal scales is dequantized."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.quantized_nets import QNet

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph, Value
from optdnn.ir.verify import verify
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs, SplitAttrs
from optdnn.ops.quant import DequantizeAttrs, IntegerConvAttrs, QuantizeAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.integers import CanonicalizeIntegers, MoveIntegers, ShiftZeroPoints
from optdnn.types import INT8, INT32, UINT8

CANONICAL, MOVE, SHIFT = CanonicalizeIntegers(), MoveIntegers(), ShiftZeroPoints()


def q(n: Net, x: Value, scale: float = 0.05, zero: int = 0, dtype: Any = INT8) -> Value:
    return n.op("QuantizeLinear", x, n.const(scale), n.const(zero, dtype), attrs=QuantizeAttrs(dtype, axis=0))  # type: ignore[no-any-return]


def dq(n: Net, x: Value, scale: Any = 0.05, zero: int | None = 0, axis: int = 0) -> Value:
    dtype = n.graph.type(x).dtype
    z = None if zero is None else n.const(zero, dtype)
    return n.op("DequantizeLinear", x, n.const(scale), z, attrs=DequantizeAttrs(axis=axis))  # type: ignore[no-any-return]


def weights(n: Net, *shape: int) -> Value:
    return n.const(n.rng.integers(-127, 128, shape), np.int8)


def same_integers(a: Graph, b: Graph) -> None:
    """Results of two networks are equal, except for ties, which may differ by a step."""
    for seed in range(3):
        feeds = random_feeds(a, seed)
        for x, y in zip(evaluate(a, feeds).values(), evaluate(b, feeds).values(), strict=True):
            assert np.abs(x.astype(np.float64) - y).max() <= (1 if x.dtype.kind in "iu" else 1e-6)
            assert (x != y).mean() < 0.01


def linear(transposed: bool) -> Graph:
    n = Net()
    x = dq(n, q(n, n.input(3, 8)))
    steps = n.rng.uniform(0.01, 0.02, 4)
    if transposed:
        w = n.op("Transpose", dq(n, weights(n, 4, 8), steps, None, axis=0), attrs=TransposeAttrs((1, 0)))
    else:
        w = dq(n, weights(n, 8, 4), steps, None, axis=1)
    return n.done(n.op("MatMul", x, w))


def test_weights_beside_integers_are_not_folded() -> None:
    graph = linear(False)
    report = FoldConstants()(graph)
    assert report.fired == []
    assert [r.reason for r in report.refused] == ["it holds the integer weights of a quantized operator"]
    alone = Net()
    folded = alone.done(alone.op("MatMul", alone.input(3, 8), dq(alone, weights(alone, 8, 4))))
    assert [r.reason for r in FoldConstants()(folded).refused] == ["its weights stay packed"]


def test_transposed_weights_are_transposed_as_integers() -> None:
    graph = linear(True)
    assert FoldConstants()(graph).changes == 0
    done, _ = check_pass(CANONICAL, graph, changes=1, rules={"transpose_integers": 1},
                         kinds={"DequantizeLinear": 2, "MatMul": 1, "QuantizeLinear": 1})  # fmt: skip
    (scales,) = [done.type(op.inputs[1]) for op in done.of_kind("DequantizeLinear") if op.attrs.axis == 1]  # type: ignore[arg-type]
    assert scales.static_shape == (4,)
    assert FoldConstants()(done).changes == 0


@pytest.mark.parametrize("bias", [False, True])
def test_qlinear_conv(bias: bool) -> None:
    n = Net()
    x = q(n, n.input(1, 4, 6, 6), 0.03, 7, UINT8)
    operands = [x, n.const(0.03), n.const(7, np.uint8), weights(n, 5, 4, 3, 3), n.const(n.rng.uniform(1e-3, 2e-3, 5)),
                n.const(np.zeros(5), np.int8), n.const(0.02), n.const(9, np.uint8)]  # fmt: skip
    if bias:
        operands.append(n.const(n.rng.integers(-5000, 5000, 5), np.int32))
    attrs = IntegerConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))
    graph = n.done(n.op("QLinearConv", *operands, attrs=attrs))
    done = graph.copy()
    report = CANONICAL(done)
    assert [f.rule for f in report.fired] == ["qlinear_to_qdq"]
    assert done.kinds() == {"Conv": 1, "DequantizeLinear": 2 + bias, "QuantizeLinear": 2}
    same_integers(graph, done)
    assert FoldConstants()(done).changes == 0
    assert CANONICAL(done).changes == 0


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("scales", [True, False])
def test_qlinear_conv_with_scales_or_zero_points_per_channel(scales: bool, constant: bool) -> None:
    """ONNX lets one number stand beside a number for each channel."""
    n = Net()
    x = q(n, n.input(1, 4, 6, 6), 0.03, 7, UINT8)
    scale = n.const(n.rng.uniform(1e-3, 2e-3, 5) if scales else 1e-3)
    points = np.int8(3 if scales else [1, -2, 0, 5, 9])
    zero = n.const(points, np.int8) if constant else n.input(*points.shape, dtype=np.int8, name="zero")
    operands = [
        x,
        n.const(0.03),
        n.const(7, np.uint8),
        weights(n, 5, 4, 3, 3),
        scale,
        zero,
        n.const(0.02),
        n.const(9, np.uint8),
    ]
    graph = n.done(n.op("QLinearConv", *operands, attrs=IntegerConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))))
    if not constant:
        check_refused(CANONICAL, graph, because="not both, and they are not constant")
        return
    done = graph.copy()
    assert [f.rule for f in CANONICAL(done).fired] == ["qlinear_to_qdq"]
    verify(done)
    same_integers(graph, done)


def test_qlinear_matmul_with_scales_per_row_stays() -> None:
    def product(scale: Any) -> Graph:
        n = Net()
        x = q(n, n.input(3, 8), 0.03, 7, UINT8)
        zero = np.full(np.shape(scale), 7)
        operands = [x, n.const(scale), n.const(zero, np.uint8), weights(n, 8, 4), n.const(0.01), n.const(0, np.int8),
                    n.const(0.05), n.const(100, np.uint8)]  # fmt: skip
        return n.done(n.op("QLinearMatMul", *operands))

    graph = product(0.03)
    done = graph.copy()
    assert CANONICAL(done).changes == 1
    same_integers(graph, done)
    check_refused(CANONICAL, product([0.03, 0.02, 0.01]), because="scales per row")


@pytest.mark.parametrize("points", [[0, 0, 0, 0], [1, 0, -2, 3], 0])
def test_qlinear_matmul_with_scales_per_column(points: Any) -> None:
    """ONNX Runtime's QOperator format with per_channel."""
    n = Net()
    x = q(n, n.input(3, 8), 0.03, 7, UINT8)
    columns = n.const([0.01, 0.02, 0.005, 0.03])
    operands = [x, n.const(0.03), n.const(7, np.uint8), weights(n, 8, 4), columns, n.const(points, np.int8),
                n.const(0.05), n.const(100, np.uint8)]  # fmt: skip
    graph = n.done(n.op("QLinearMatMul", *operands))
    if not points:
        check_refused(CANONICAL, graph, because="scales per column, and other zero points")
        return
    done = graph.copy()
    assert [f.rule for f in CANONICAL(done).fired] == ["qlinear_to_qdq"]
    (of_columns,) = [op for op in done.of_kind("DequantizeLinear") if done.type(op.inputs[1]).dims == (4,)]  # type: ignore[arg-type]
    assert of_columns.attrs.axis == 1
    same_integers(graph, done)


def test_dequantized_and_quantized_again_is_nothing() -> None:
    n = Net()
    x = q(n, n.input(4, 5), 0.05, 3)
    graph = n.done(dq(n, q(n, dq(n, x, 0.05, 3), 0.05, 3), 0.05, 3))
    check_pass(CANONICAL, graph, changes=1, rules={"requantize_same": 1},
               kinds={"DequantizeLinear": 1, "QuantizeLinear": 1}, promoted_changes=0)  # fmt: skip
    n = Net()
    x = q(n, n.input(4, 5), 0.05, 3)
    check_untouched(CANONICAL, n.done(dq(n, q(n, dq(n, x, 0.05, 3), 0.05, 4), 0.05, 4)))
    n = Net()
    x = q(n, n.input(4, 5), 0.05, 3)
    check_refused(
        CANONICAL, n.done(dq(n, q(n, dq(n, x, 1e-40, 3), 1e-40, 3), 1.0)), because="not a constant normal number"
    )


def on_another_type(zero: int = 133, scale: float = 0.05) -> Graph:
    """int8 with zero point 5, then uint8: one grid with zero point 133."""
    n = Net()
    x = dq(n, q(n, n.input(1, 2, 4, 4), 0.05, 5), 0.05, 5)
    return n.done(n.op("Relu", dq(n, q(n, x, scale, zero, UINT8), scale, zero)))


def test_the_same_grid_of_another_type_is_nothing() -> None:
    kinds = {"QuantizeLinear": 1, "DequantizeLinear": 1, "Relu": 1}
    rules = {"requantize_same_grid": 1}
    check_pass(CANONICAL, on_another_type(), changes=1, kinds=kinds, rules=rules, promoted_changes=0)


@pytest.mark.parametrize("options", [{"zero": 132}, {"scale": 0.0501}])
def test_other_grids_are_rounded_again(options: Any) -> None:
    check_untouched(CANONICAL, on_another_type(**options))


def test_a_grid_of_vanishing_steps_is_refused() -> None:
    n = Net()
    x = dq(n, n.input(4, dtype=np.int8), 1e-40, 5)
    y = n.op("Mul", dq(n, q(n, x, 1e-40, 133, UINT8), 1e-40, 133), 1e38)
    check_refused(CANONICAL, n.done(y), because="its scale is not a normal number", rule="requantize_same_grid")


def pooled(behind: float = 0.05, dtype: Any = INT8, twice: bool = False) -> Graph:
    n = Net()
    x = dq(n, q(n, n.input(1, 4, 8, 8), dtype=dtype))
    y = n.max_pool(x)
    graph = n.graph
    if twice:
        graph.add_output(y, "pooled")
    return n.done(dq(n, q(n, y, behind, dtype=dtype), behind))


@pytest.mark.parametrize("dtype", [INT8, UINT8])
def test_pooling_between_equal_scales_is_of_integers(dtype: Any) -> None:
    done, _ = check_pass(MOVE, pooled(dtype=dtype), changes=1,
                         kinds={"DequantizeLinear": 1, "MaxPool": 1, "QuantizeLinear": 1}, promoted_changes=0)  # fmt: skip
    assert done.of_kind("MaxPool")[0].outputs[0].type.dtype == dtype


@pytest.mark.parametrize("dtype", [np.dtype(np.int16), np.dtype(np.uint16)])
def test_pooling_of_wider_integers_stays_of_floats(dtype: Any) -> None:
    check_refused(MOVE, pooled(dtype=dtype), because="only floats and 8-bit integers")


def test_a_concat_of_one_scale_is_of_integers() -> None:
    n = Net()
    a, b = n.input(1, 2, 4, name="a"), n.input(1, 3, 4, name="b")
    y = n.op("Concat", dq(n, q(n, a)), dq(n, q(n, b)), attrs=ConcatAttrs(1))
    graph = n.done(dq(n, q(n, y)))
    MOVE(graph)
    assert graph.kinds() == {"Concat": 1, "DequantizeLinear": 1, "QuantizeLinear": 2}
    assert graph.of_kind("Concat")[0].outputs[0].type.dtype == INT8


def test_an_operand_of_another_scale_is_requantized_in_front() -> None:
    done, _ = check_pass(MOVE, pooled(behind=0.04), changes=1,
                         kinds={"DequantizeLinear": 2, "MaxPool": 1, "QuantizeLinear": 2}, promoted_changes=0)  # fmt: skip
    assert done.of_kind("MaxPool")[0].outputs[0].type.dtype == INT8
    n = Net()
    a, b = n.input(1, 2, 4, name="a"), n.input(1, 3, 4, name="b")
    y = n.op("Concat", dq(n, q(n, a, 0.04), 0.04), dq(n, q(n, b)), attrs=ConcatAttrs(1))
    graph = n.done(dq(n, q(n, y)))
    done = graph.copy()
    MOVE(done)
    assert done.kinds() == {"Concat": 1, "DequantizeLinear": 2, "QuantizeLinear": 3}
    assert done.of_kind("Concat")[0].outputs[0].type.dtype == INT8
    same_integers(graph, done)


@pytest.mark.parametrize(("dtype", "zero", "other"), [(INT8, -128, UINT8), (UINT8, 128, INT8)])
def test_zero_points_at_the_end_of_their_type_become_zero(dtype: Any, zero: int, other: Any) -> None:
    def graph(zero: int, read_too: bool = False) -> Graph:
        n = Net()
        x = q(n, n.input(2, 4, 5), 0.05, zero, dtype)
        if read_too:
            n.graph.add_output(x, "integers")
        return n.done(n.op("Relu", dq(n, x, 0.05, zero)), n.op("Neg", dq(n, x, 0.04, zero + (3 if zero < 0 else -3))))

    done, _ = check_pass(SHIFT, graph(zero), changes=1, rules={"shift_zero_point": 1}, promoted_changes=1,
                         kinds={"DequantizeLinear": 2, "QuantizeLinear": 1, "Relu": 1, "Neg": 1})  # fmt: skip
    (made,) = done.of_kind("QuantizeLinear")
    assert (made.outputs[0].type.dtype, made.input(2)) == (other, None)
    assert {int(done.constant_value(op.inputs[2])) for op in done.of_kind("DequantizeLinear")} == {
        0,
        3 if zero < 0 else -3,
    }  # type: ignore[arg-type]
    check_untouched(SHIFT, graph(zero + (1 if zero < 0 else -1)))
    check_refused(SHIFT, graph(zero, read_too=True), because="other operators than DequantizeLinear read")


def test_float_readers_keep_the_float_form() -> None:
    check_refused(MOVE, pooled(twice=True), because="has another reader")


def padded(zero: int, dtype: Any, *value: float, mode: str = "constant", computed: bool = False) -> Graph:
    n = Net()
    point = n.op("Neg", n.input(name="z", dtype=INT8)) if computed else n.const(zero, dtype)
    x = dq(n, q(n, n.input(2, 3, 5), 0.05, zero, dtype), 0.05, zero)
    y = n.op("Pad", x, n.ints(0, 0, 2, 0, 0, 1), *(n.const(v) for v in value), attrs=PadAttrs(mode))
    y = n.op("QuantizeLinear", y, n.const(0.05), point, attrs=QuantizeAttrs(dtype, axis=0))
    return n.done(dq(n, y, 0.05, zero))


@pytest.mark.parametrize("value", [(), (0.0,)])
@pytest.mark.parametrize(("zero", "dtype"), [(0, INT8), (-9, INT8), (117, UINT8), (0, UINT8)])
def test_integers_are_padded_with_their_zero_point(zero: int, dtype: Any, value: tuple[float, ...]) -> None:
    before = padded(zero, dtype, *value)
    done, _ = check_pass(MOVE, before, changes=1,
                         kinds={"DequantizeLinear": 1, "Pad": 1, "QuantizeLinear": 1}, promoted_changes=0)  # fmt: skip
    (pad,) = done.of_kind("Pad")
    assert pad.outputs[0].type.dtype == dtype
    filler = done.constant_value(pad.input(2))
    assert (0 if filler is None else int(filler)) == zero
    assert filler is None or filler.dtype == dtype
    for seed in range(3):
        feeds = random_feeds(before, seed)
        for a, b in zip(evaluate(before, feeds).values(), evaluate(done, feeds).values(), strict=True):
            np.testing.assert_array_equal(a, b)
            assert not a[..., :2].any()


@pytest.mark.parametrize("value", [(), (0.0,)])
def test_integers_are_padded_with_their_own_elements(value: tuple[float, ...]) -> None:
    before = padded(117, UINT8, *value, mode="reflect")
    done, _ = check_pass(MOVE, before, changes=1,
                         kinds={"DequantizeLinear": 1, "Pad": 1, "QuantizeLinear": 1}, promoted_changes=0)  # fmt: skip
    assert done.of_kind("Pad")[0].input(2) is None
    same_integers(before, done)


def test_values_padded_with_another_number_stay_float() -> None:
    check_refused(MOVE, padded(0, INT8, 1.5), because="no integer form")
    check_refused(MOVE, padded(0, INT8, computed=True), because="zero point that is not constant")


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("dtype", [INT8, UINT8])
def test_integers_are_interpolated_as_floats(dtype: Any, mode: str) -> None:
    def resized(dtype: Any) -> Graph:
        n = Net()
        x = q(n, n.input(1, 2, 5, 6), dtype=dtype, zero=3)
        return n.done(n.op("Resize", x, None, n.const(np.array([1, 1, 2, 2]), np.float32), attrs=ResizeAttrs(mode)))

    graph, moved = resized(dtype), resized(dtype)
    assert MOVE(moved, PassContext()).changes == 1
    verify(moved)
    assert moved.kinds() == {"QuantizeLinear": 1, "Cast": 2, "Resize": 1, "Round": 1, "Clip": 1}
    same_integers(graph, moved)


def enlarged(factor: float = 2, scale: Any = 0.05, *, read: bool = False, mode: str = "nearest", **attrs: Any) -> Graph:
    """A resized float image is quantized."""
    n = Net()
    x = n.op("Relu", n.input(1, 2, 6, 4))
    roi = n.const(np.array([0, 0, 0, 0, 1, 1, 1.2, 1.2]), np.float32) if attrs else None
    sizes = n.const(np.array([1, 1, factor, factor]), np.float32)
    y = n.op("Resize", x, roi, sizes, attrs=ResizeAttrs(mode, **attrs))
    zero = n.const(np.zeros(np.shape(scale)), INT8)
    z = n.op("QuantizeLinear", y, n.const(np.array(scale), np.float32), zero, attrs=QuantizeAttrs(INT8, axis=1))
    return n.done(z, n.op("Tanh", y)) if read else n.done(z)


def test_a_repeated_image_is_quantized_before() -> None:
    graph = enlarged()
    moved = graph.copy()
    assert [f.rule for f in MOVE(moved, PassContext()).fired] == ["quantize_before_resize"]
    verify(moved)
    assert moved.of_kind("Resize")[0].outputs[0].type.dtype == INT8
    same_integers(graph, moved)


def test_other_resized_images_are_quantized_after() -> None:
    check_untouched(MOVE, enlarged(0.5))
    check_untouched(MOVE, enlarged(mode="linear"))
    check_untouched(MOVE, enlarged(coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=3.0))
    check_refused(MOVE, enlarged(read=True), because="has another reader")
    check_refused(MOVE, enlarged(scale=[0.05, 0.06]), because="it has a scale per channel")


def rearranged(
    kind: str = "Attention", *, turned: bool = True, dtype: Any = np.float16, scale: Any = 0.05, read: str = ""
) -> Graph:
    """The result of ``kind`` becomes rows, which are quantized. ``turned``: by a Transpose before the Reshape. ``read``: which
    value has another reader."""
    n = Net(dtype)
    operands = [n.input(2, 3, 5, 4, name=name) for name in ("qkv" if kind == "Attention" else "q")]
    y = n.op(kind, *operands, *([n.random(4)] if kind == "LayerNormalization" else []), **_attributes(kind))
    z = n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3))) if turned else y
    rows = n.op("Reshape", z, n.ints(2, -1, 12))
    zero = n.const(np.zeros(np.shape(scale)), INT8)
    out = n.op("QuantizeLinear", rows, n.const(np.array(scale), dtype), zero, attrs=QuantizeAttrs(INT8, axis=2))
    more = {"source": [y], "moved": [z], "rows": [rows]}.get(read, [])
    return n.done(out, *(n.op("Tanh", value) for value in more))


def _attributes(kind: str) -> dict[str, Any]:
    return {"attrs": AttentionAttrs()} if kind == "Attention" else {}


@pytest.mark.parametrize("kind", ["Attention", "LayerNormalization"])
@pytest.mark.parametrize("read", ["", "source"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_result_is_quantized_before_it_is_moved(kind: str, turned: bool, read: str) -> None:
    graph = rearranged(kind, turned=turned, read=read)
    moved = graph.copy()
    assert [f.rule for f in MOVE(moved, PassContext()).fired] == ["quantize_before_moves"]
    verify(moved)
    assert MOVE(moved, PassContext()).changes == 0
    (rounds,) = moved.of_kind("QuantizeLinear")
    assert moved.op(rounds.inputs[0]).kind == kind  # type: ignore[arg-type]
    assert moved.kinds() == graph.kinds()
    same_integers(graph, moved)


@pytest.mark.parametrize("kind", ["GlobalAveragePool", "Conv", "MatMul"])
@pytest.mark.parametrize("data", [False, True])
def test_sums_of_integers_are_rounded_before_they_are_moved(kind: str, data: bool) -> None:
    """``data``: whether they are sums of 8-bit data. Means of an image are rows in TFLite networks before they are rounded."""
    n = QNet()
    x = n.input(2, 8, 6, 6)
    x = n.fake(x, 0.05) if data else x
    y = n.op(kind, x) if kind == "GlobalAveragePool" else n.qconv(x, 8) if kind == "Conv" else n.qmatmul(x, 8)
    moved = n.done(n.q(n.op("Reshape", y, n.ints(2, 1, -1)), 0.02, 3))
    graph = moved.copy()
    assert MOVE(moved, PassContext()).changes == data
    verify(moved)
    rounds = moved.of_kind("QuantizeLinear")[-1]
    assert moved.op(rounds.inputs[0]).kind == (kind if data else "Reshape")  # type: ignore[arg-type]
    same_integers(graph, moved)


@pytest.mark.parametrize(("kind", "dtype"), [("Relu", np.float16), ("LayerNormalization", np.float32)])
def test_other_results_are_quantized_where_they_are_transposed(kind: str, dtype: Any) -> None:
    graph = rearranged(kind, dtype=dtype)
    moved = graph.copy()
    assert [f.rule for f in MOVE(moved, PassContext()).fired] == ["quantize_before_moves"]
    verify(moved)
    assert MOVE(moved, PassContext()).changes == 0
    (rounds,) = moved.of_kind("QuantizeLinear")
    assert moved.op(rounds.inputs[0]).kind == "Transpose"  # type: ignore[arg-type]
    same_integers(graph, moved)


def test_results_that_are_quantized_after_they_are_moved() -> None:
    check_untouched(MOVE, rearranged("Relu", turned=False))
    check_untouched(MOVE, rearranged("LayerNormalization", turned=False, dtype=np.float32))
    for read in ("moved", "rows"):
        check_refused(MOVE, rearranged(read=read), because="its float operand has another reader")
    check_refused(MOVE, rearranged(scale=[0.05] * 12), because="it has a scale per channel")


def test_other_integers_are_interpolated_as_they_are() -> None:
    def resized(mode: str, dtype: Any) -> Graph:
        n = Net()
        x = n.op("Cast", n.input(1, 2, 5, 6), attrs=CastAttrs(dtype))
        return n.done(n.op("Resize", x, None, n.const(np.array([1, 1, 2, 2]), np.float32), attrs=ResizeAttrs(mode)))

    check_refused(MOVE, resized("linear", INT32), because="it interpolates int32, which fp32 cannot represent exactly")
    check_untouched(MOVE, resized("nearest", INT8))


def split(scale: Any = 0.05, second: float = 0.02, used: str = "", kind: str = "QuantizeLinear") -> Graph:
    """A Split of dequantized integers. Its parts are quantized with the same scale, and with ``second``."""
    n = Net()
    x = q(n, n.input(3, 8))
    whole = dq(n, x, scale, None if np.ndim(scale) else 0, axis=0)
    a, b = n.op("Split", whole, n.ints(5, 3), attrs=SplitAttrs(1), outputs=2)
    found = [q(n, a), q(n, b, second)] if kind == "QuantizeLinear" else [q(n, a), n.op(kind, b)]
    if used == "whole":
        found.append(n.op("Relu", whole))
    if used == "part":
        found.append(n.op("Relu", a))
    return n.done(*found)


@pytest.mark.parametrize("used", ["", "whole"])
def test_a_split_takes_integers(used: str) -> None:
    after, _ = check_pass(MOVE, split(used=used), changes=1, rules={"split_integers": 1}, promoted_changes=0)
    assert [o.type.dtype for o in after.of_kind("Split")[0].outputs] == [INT8, INT8]
    assert len(after.of_kind("QuantizeLinear")) == 2  # the input's, and that of the part with another scale
    same_integers(split(used=used), after)


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (split(used="part"), "a part of Split_.* is read as a float"),
        (split(kind="Relu"), "a part of Split_.* is read as a float"),
        (split([0.05, 0.02, 0.03]), "it has a scale per channel"),
    ],
)
def test_a_split_of_floats(graph: Graph, because: str) -> None:
    check_refused(MOVE, graph, because=because, rule="split_integers")


def rescaled(
    factor: float = 0.125, *, outer: float = 0.005, zeros: tuple[int, int] = (3, 3), kind: str = "Mul", read: str = "",
    swap: bool = False,
) -> Graph:  # fmt: skip
    """A product that is rounded before and after it is scaled. ``read``: which value has another reader."""
    n = QNet()
    first = n.q(n.op("MatMul", n.input(4, 6), n.input(6, 5, name="b")), 0.04, zeros[0])
    back = n.dq(first, 0.04, zeros[0])
    other = n.const(np.float32(factor), np.float32)
    scaled = n.op(kind, *((other, back) if swap else (back, other)))
    more = {"first": [first], "back": [back], "scaled": [scaled]}.get(read, [])
    return n.done(n.q(scaled, outer, zeros[1]), *(n.op("Identity", v) for v in more))


@pytest.mark.parametrize(
    "options",
    [{}, {"swap": True}, {"kind": "Div", "factor": 8.0}, {"outer": 0.005000001}],
)
def test_a_value_is_rounded_once_around_its_scale(options: dict[str, Any]) -> None:
    graph = rescaled(**options)
    once = graph.copy()
    assert [f.rule for f in CANONICAL(once, PassContext()).fired] == ["rescaled_rounding"]
    verify(once)
    assert CANONICAL(once, PassContext()).changes == 0
    assert once.kinds() == {"MatMul": 1, "Mul": 1, "QuantizeLinear": 1}
    same_integers(graph, once)


def test_a_factor_may_be_stored_as_an_integer() -> None:
    n = QNet()
    x = n.fake(n.op("MatMul", n.input(4, 6), n.input(6, 5, name="b")), 0.04)
    factor = n.op("DequantizeLinear", n.const(np.int8(127), np.int8), n.const(np.float32(0.125 / 127), np.float32))
    once = n.done(n.q(n.op("Mul", x, factor), 0.005))
    assert CANONICAL(once, PassContext()).changes == 1
    assert once.kinds() == {"MatMul": 1, "Mul": 1, "QuantizeLinear": 1}


def test_other_scaled_values_are_rounded_twice() -> None:
    same = "its scale is not the one before it, times the factor between"
    check_refused(CANONICAL, rescaled(outer=0.006), because=same)
    check_untouched(CANONICAL, rescaled(zeros=(3, 4)))
    check_untouched(CANONICAL, rescaled(-0.125))
    check_untouched(CANONICAL, rescaled(0.005 * 0.04, kind="Div", swap=True))
    for read in ("first", "back", "scaled"):
        check_refused(CANONICAL, rescaled(read=read), because="other operators read what is rounded before it")


# ---------------------------------------------------------------- bounds between two roundings of one scale


def bounded(
    kind: str = "Relu", *, dtypes: tuple[Any, Any] = (INT8, INT8), zeros: tuple[int, int] = (0, 0),
    scales: tuple[float, float] = (0.02, 0.02), read: str = "", computed: bool = False,
) -> Graph:  # fmt: skip
    n = Net()
    first = q(n, n.input(4, 64), scales[0], zeros[0], dtypes[0])
    x = dq(n, first, scales[0], zeros[0])
    bounds = [] if kind == "Relu" else [n.const(-0.7), n.input(name="most") if computed else n.const(1.113)]
    y = n.op(kind, x, *bounds)
    out = q(n, y, scales[1], zeros[1], dtypes[1])
    more = {"first": [x], "bounded": [y]}.get(read, [])
    return n.done(out, *(n.op("Tanh", v) for v in more))


@pytest.mark.parametrize("kind", ["Relu", "Clip"])
@pytest.mark.parametrize(
    ("dtypes", "zeros"),
    [((INT8, INT8), (0, 0)), ((UINT8, UINT8), (7, 7)), ((UINT8, INT8), (100, 0)), ((INT8, INT8), (-9, -5))],
)
def test_a_bound_keeps_the_order(kind: str, dtypes: tuple[Any, Any], zeros: tuple[int, int]) -> None:
    graph = bounded(kind, dtypes=dtypes, zeros=zeros)
    done = graph.copy()
    inner, outer = ((0 if t == UINT8 else -128) - z for t, z in zip(dtypes, zeros, strict=True))
    fires = inner <= (max(0, outer) if kind == "Relu" else outer) and inner + 255 >= outer + 255
    assert [f.rule for f in CANONICAL(done, PassContext()).fired] == (["clipped_rounding"] if fires else [])
    verify(done)
    assert len(done.of_kind("QuantizeLinear")) == 2 - fires
    for seed in range(3):
        feeds = random_feeds(graph, seed)
        (want,), (got,) = (evaluate(g, feeds).values() for g in (graph, done))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"dtypes": (INT8, UINT8)}, "the first rounding has a smaller range"),
        ({"read": "first"}, "other operators read"),
        ({"read": "bounded"}, "other operators read"),
    ],
)
def test_bounds_between_roundings_that_stay(options: dict[str, Any], because: str) -> None:
    check_refused(CANONICAL, bounded(**options), because=because)


@pytest.mark.parametrize("options", [{"scales": (0.02, 0.03)}, {"kind": "Clip", "computed": True}])
def test_other_bounds(options: dict[str, Any]) -> None:
    check_untouched(CANONICAL, bounded(**options))


def guarded(n: Net, scores: Value, kept: str = "rounded", *, after: bool = False) -> Graph:
    """where(isnan(p), 0, p) of a softmax p, with a rounding between, as ONNX Runtime's quantizer leaves it. ``after``: the rounded
    weights are tested."""
    p = n.op("Softmax", scores, attrs=SoftmaxAttrs(-1))
    rounded = dq(n, q(n, p, 1 / 255, 0, UINT8), 1 / 255)
    other = {"rounded": rounded, "row": n.random(8)}[kept]
    return n.done(n.op("Where", n.op("IsNaN", rounded if after else p), n.const(0.0), other))


@pytest.mark.parametrize("after_rounding", [False, True])
def test_rounded_weights_and_those_of_rounded_scores_are_never_nan(after_rounding: bool) -> None:
    n = Net()
    scores = n.input(4, 8) if after_rounding else dq(n, q(n, n.input(4, 8)))
    after, _ = check_pass(CANONICAL, guarded(n, scores, after=after_rounding), changes=1)
    (last,) = (after.op(v) for op in after.of_kind("Output") for v in op.inputs if v is not None)
    assert last.kind == "DequantizeLinear"
    assert not after.of_kind("IsNaN", "Where")


def test_weights_that_may_be_nan_stay_guarded() -> None:
    n = Net()
    check_refused(CANONICAL, guarded(n, n.input(4, 8)), because="may be NaN")
    n = Net()
    infinite = dq(n, q(n, n.input(4, 8)), 1e37)
    check_refused(CANONICAL, guarded(n, infinite), because="may be NaN")
    n = Net()
    check_refused(CANONICAL, guarded(n, dq(n, q(n, n.input(4, 8))), "row"), because="it broadcasts what it keeps")
