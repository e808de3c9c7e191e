"""Quantized operators against ONNX Runtime and exact integer arithmetic: rounding, saturation, axes, blocks, refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, integers, normal, op_flops, run

from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ir.evaluate import promote
from optdnn.ir.export_onnx import export_model
from optdnn.ops.base import EXACT, Unsupported
from optdnn.types import DTYPES, FP16, FP32, FP64, Array

F = np.float32
E4M3, E5M2 = DTYPES["fp8_e4m3"], DTYPES["fp8_e5m2"]


def case(op: str, inputs: Any, *args: Any, **more: Any) -> Case:
    return Case(op, [None if x is None else np.asarray(x) for x in inputs], *args, **more)


def result(given: Case) -> Array:
    return run(import_case(given), given.fed)[0]


# ---------------------------------------------------------------- QuantizeLinear and DequantizeLinear


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_halves_go_to_even_and_larger_numbers_saturate(dtype: Any) -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 1e9, -1e9, np.inf, -np.inf], F)
    given = case("QuantizeLinear", [x, F(1), np.array(3, dtype)], opset=21)
    info = np.iinfo(dtype)
    whole = np.array([-2, -2, 0, 0, 2, 2]) + 3
    expected = [*np.clip(whole, info.min, info.max), info.max, info.min, info.max, info.min]
    np.testing.assert_array_equal(result(given), np.array(expected, dtype))
    check_export(case("QuantizeLinear", [x[:8], *given.inputs[1:]], opset=21))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize(("opset", "axis"), [(10, None), (13, 0), (13, -1), (19, 1), (21, 2)])
def test_per_tensor_and_per_axis(dtype: Any, opset: int, axis: int | None) -> None:
    x = normal(4, 3, 5) * F(40)
    n = 1 if axis is None else x.shape[axis]
    scale = np.random.default_rng(1).uniform(0.1, 0.9, () if axis is None else n).astype(F)
    zero = np.asarray(integers(dtype, *scale.shape, seed=2))
    attrs = {} if axis is None else {"axis": axis}
    quantized = case("QuantizeLinear", [x, scale, zero], attrs, opset)
    graph = check_case(quantized, symbolic={0: (0,)}, tol=EXACT)
    assert axis is None or graph.of_kind("QuantizeLinear")[0].attrs.axis == axis % 3
    back = case("DequantizeLinear", [result(quantized), scale, zero], attrs, opset)
    check_case(back, symbolic={0: (0,)})
    for given in (quantized, back):
        check_export(given)


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks(axis: int) -> None:
    x = normal(6, 10) * F(40)
    shape = [6, 10]
    shape[axis] = -(-shape[axis] // 4)
    scale = np.random.default_rng(1).uniform(0.1, 0.9, shape).astype(F)
    zero = integers(np.int8, *shape, seed=2)
    attrs = {"axis": axis, "block_size": 4}
    quantized = case("QuantizeLinear", [x, scale, zero], attrs, 21)
    check_case(quantized, symbolic={0: (1 - axis,), 1: (1 - axis,), 2: (1 - axis,)})
    back = case("DequantizeLinear", [result(quantized), scale, zero], attrs, 21)
    check_case(back)
    check_export(quantized)


def test_output_type_without_a_zero_point() -> None:
    x = normal(3, 4) * F(100)
    given = case("QuantizeLinear", [x, F(0.5)], {"output_dtype": 3}, 21)
    np.testing.assert_array_equal(result(given), np.clip(np.rint(x / F(0.5)), -128, 127).astype(np.int8))
    (node,) = check_export(given).graph.node
    assert {a.name for a in node.attribute} == {"output_dtype"}
    assert result(case("QuantizeLinear", [x, F(0.5)], opset=13)).dtype == np.uint8


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("saturate", [0, 1])
def test_fp8(dtype: Any, saturate: int) -> None:
    x = np.array([0.0, 0.3, -7.7, 100, 1e5, -1e9, np.inf, np.nan], F)
    given = case("QuantizeLinear", [x, F(0.5), np.zeros((), dtype)], {"saturate": saturate}, 19)
    got = result(given)
    assert got.dtype == dtype
    top = float(ml_dtypes.finfo(dtype).max)
    wide = np.clip(x * 2, -top, top) if saturate else x * 2
    np.testing.assert_array_equal(got.astype(F), wide.astype(dtype).astype(F))
    assert np.isfinite(got.astype(F)[4]) == bool(saturate)
    back = case("DequantizeLinear", [got, np.asarray(0.25, FP16), np.zeros((), dtype)], opset=19)
    np.testing.assert_array_equal(result(back), (got.astype(F) * F(0.25)).astype(FP16))


def test_the_quotient_is_rounded_to_the_precision_asked_for() -> None:
    x = np.linspace(0, 60, 500, dtype=F).astype(FP16)
    scale = np.asarray(0.3, FP16)
    plain = case("QuantizeLinear", [x, scale, np.array(0, np.uint8)], opset=23)
    wide = case("QuantizeLinear", plain.inputs, {"precision": 1}, 23)
    np.testing.assert_array_equal(result(plain), np.rint(x / scale).astype(np.uint8))
    np.testing.assert_array_equal(result(wide), np.rint(x.astype(F) / F(scale)).astype(np.uint8))
    assert (result(plain) != result(wide)).any()
    with pytest.raises(UnsupportedError, match="precision"):
        export_model(import_case(wide))


def test_dequantized_type() -> None:
    x, scale = integers(np.int8, 3, 4), F(0.1)
    given = case("DequantizeLinear", [x, scale], {"output_dtype": 10}, 23)
    np.testing.assert_array_equal(result(given), (x.astype(F) * scale).astype(FP16))
    assert [n.op_type for n in check_export(given).graph.node] == ["DequantizeLinear", "Cast"]
    x32 = np.array([2**31 - 1, -(2**31)], np.int32)
    np.testing.assert_array_equal(result(case("DequantizeLinear", [x32, scale], opset=13)), x32.astype(F) * scale)


def test_promoted_to_float64() -> None:
    given = case("QuantizeLinear", [normal(3, 4), F(0.1), np.array(3, np.int8)], opset=21)
    graph = promote(import_case(given))
    (y,) = run(graph, {k: v.astype(FP64) if v.dtype == FP32 else v for k, v in given.fed.items()})
    np.testing.assert_array_equal(y, result(given))


@pytest.mark.parametrize("x", [normal(3, 4), np.array([1.0, 2, 3], F), np.array([-3.0, -1], F), np.zeros(4, F)])
def test_dynamic_quantization(x: Array) -> None:
    given = case("DynamicQuantizeLinear", [x], opset=11, outputs=3)
    check_case(given)
    check_export(given)


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "message"),
    [
        ("QuantizeLinear", [normal(3, 4), np.ones(3, F)], {"axis": 1}, "does not fit axis 1"),
        ("QuantizeLinear", [normal(3, 4), np.ones(3, F)], {"axis": 2}, "axis 2 is out of range"),
        ("QuantizeLinear", [normal(3, 4), np.ones((3, 4), F)], {}, "which only blocks do"),
        ("QuantizeLinear", [normal(3, 4), np.ones((3, 3), F)], {"block_size": 2}, "in blocks of 2"),
        ("QuantizeLinear", [normal(3, 4), np.ones(4, F), np.zeros(3, np.int8)], {}, "shape of the scale"),
        ("QuantizeLinear", [normal(3, 4), F(1), np.int8(0)], {"output_dtype": 2}, "not the type of its zero point"),
        ("QuantizeLinear", [integers(np.int8, 3), F(1)], {}, "QuantizeLinear of int8"),
        ("QuantizeLinear", [normal(3, 4), F(1)], {"block_size": -1}, "block_size is -1"),
        ("DequantizeLinear", [integers(np.int8, 3), F(1), np.uint8(0)], {}, "zero point is uint8"),
        ("DequantizeLinear", [integers(np.int8, 3), np.int8(1)], {}, "must be floating-point"),
        ("DequantizeLinear", [np.ones(3, np.float32), np.float32(1)], {}, "its operand must hold integers"),
        ("DynamicQuantizeLinear", [integers(np.int8, 3)], {}, "must be floating-point"),
    ],
)
def test_scales_that_contradict(op: str, operands: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(case(op, [np.asarray(x) for x in operands], attrs, 21))


def test_types_that_are_not_quantized_to() -> None:
    with pytest.raises(Unsupported, match="QuantizeLinear to int32"):
        import_case(case("QuantizeLinear", [normal(3), F(1)], {"output_dtype": 6}, 21))


# ---------------------------------------------------------------- products


def weights(dtype: Any, *shape: int) -> Any:
    """Random weights; signed ones have seven bits, since ONNX Runtime's sums of larger ones saturate without VNNI."""
    w = integers(dtype, *shape, seed=1)
    return w // 2 if dtype == np.int8 else w


@pytest.mark.parametrize(("a", "b"), [((4, 6), (6, 5)), ((2, 4, 6), (6, 5)), ((2, 3, 4, 6), (3, 6, 5))])
@pytest.mark.parametrize("types", [(np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)])
def test_matmul_integer(a: Any, b: Any, types: Any) -> None:
    x, w = integers(types[0], *a), weights(types[1], *b)
    zeros = [np.asarray(integers(types[0], seed=2)), np.asarray(integers(types[1], seed=3))]
    exact = np.matmul(x.astype(np.int64) - int(zeros[0]), w.astype(np.int64) - int(zeros[1]))
    given = case("MatMulInteger", [x, w, *zeros], opset=10)
    check_case(given, [exact.astype(np.int32)], symbolic={0: (-2,)})
    check_case(case("MatMulInteger", [x, w], opset=10), [np.matmul(x.astype(np.int32), w.astype(np.int32))])
    if types[0] == np.uint8:
        check_export(given)


def test_matmul_integer_per_row_and_column() -> None:
    x, w = integers(np.uint8, 4, 6), weights(np.int8, 6, 5)
    rows, columns = integers(np.uint8, 4, seed=2), integers(np.int8, 5, seed=3)
    exact = (x.astype(np.int32) - rows[:, None]) @ (w.astype(np.int32) - columns)
    check_case(case("MatMulInteger", [x, w, rows, columns], opset=10), [exact])


@pytest.mark.parametrize("types", [(np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)])
@pytest.mark.parametrize("columns", [False, True])
def test_qlinear_matmul(types: Any, columns: bool) -> None:
    x, w = integers(types[0], 7, 16), weights(types[1], 16, 5)
    scale = np.random.default_rng(4).uniform(0.01, 0.05, 5 if columns else ()).astype(F)
    zero = integers(types[1], 5, seed=6) if columns else np.asarray(integers(types[1], seed=6))
    y = [F(0.7), np.asarray(integers(types[0], seed=7))]
    operands = [x, F(0.02), np.asarray(integers(types[0], seed=5)), w, scale, zero, *y]
    given = case("QLinearMatMul", [np.asarray(v) for v in operands], opset=10, constants=(3, 4, 5))
    check_case(given)
    check_export(given)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("attrs", [{}, {"pads": [1, 1, 1, 1], "strides": [2, 1]}, {"auto_pad": "SAME_UPPER"}])
def test_conv_integer(group: int, attrs: dict[str, Any]) -> None:
    x, w = integers(np.uint8, 2, 4, 7, 8), integers(np.uint8, 6, 4 // group, 3, 3, seed=1)
    given = case("ConvInteger", [x, w, np.array(7, np.uint8), np.array(9, np.uint8)], {"group": group, **attrs}, 10)
    check_case(given, symbolic={0: (0, 2)})
    check_export(given)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("types", [(np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)])
@pytest.mark.parametrize("bias", [False, True])
def test_qlinear_conv(per_channel: bool, types: Any, bias: bool) -> None:
    x, w = integers(types[0], 2, 4, 7, 8), weights(types[1], 6, 2, 3, 3)
    n = (6,) if per_channel else ()
    scale = np.random.default_rng(4).uniform(0.01, 0.05, n).astype(F)
    zero = np.zeros(n, types[1]) if types[1] == np.int8 else np.full(n, 7, types[1])
    operands: list[Any] = [x, F(0.02), np.array(5, types[0]), w, scale, zero, F(0.3), np.array(11, types[0])]
    operands += [integers(np.int32, 6, seed=8) // 2**18] if bias else []
    attrs = {"group": 2, "pads": [1, 0, 1, 0]}
    given = case("QLinearConv", [np.asarray(v) for v in operands], attrs, 10, constants=(3, 4, 5))
    check_case(given, symbolic={0: (0, 2)})
    check_export(given)


def test_sums_beyond_24_bits_are_exact() -> None:
    x, w = np.full((1, 30000), 255, np.uint8), np.full((30000, 1), 255, np.uint8)
    w[-1] = 254
    assert result(case("MatMulInteger", [x, w], opset=10)).item() == 30000 * 255 * 255 - 255


def test_costs() -> None:
    x, w = integers(np.uint8, 2, 4, 7, 8), integers(np.uint8, 6, 4, 3, 3)
    graph = import_case(case("ConvInteger", [x, w], opset=10))
    assert op_flops(graph, graph.of_kind("ConvInteger")[0]) == 2 * (2 * 6 * 5 * 6) * 36
    graph = import_case(case("MatMulInteger", [integers(np.int8, 4, 6), integers(np.int8, 6, 5)], opset=10))
    assert op_flops(graph, graph.of_kind("MatMulInteger")[0]) == 2 * 4 * 5 * 6


U8 = integers(np.uint8, 1, 4, 5, 5)
W8 = integers(np.int8, 6, 4, 3, 3)


@pytest.mark.parametrize(
    ("op", "operands", "message"),
    [
        ("MatMulInteger", [normal(3, 4), integers(np.int8, 4, 2)], "operand 0 is fp32"),
        ("MatMulInteger", [U8[0, 0], integers(np.int8, 4, 2)], "inner sizes differ"),
        ("MatMulInteger", [U8[0, 0], integers(np.int8, 5, 2), np.int8(0)], "not of the type of its operand"),
        ("MatMulInteger", [U8[0, 0], integers(np.int8, 5, 2), None, np.zeros(3, np.int8)], "zero point of B"),
        ("ConvInteger", [U8, W8, np.zeros(2, np.uint8)], "must be one number"),
        ("ConvInteger", [U8, W8, None, np.zeros(4, np.int8)], "zero point of the weights"),
        ("ConvInteger", [U8, W8[:, :3]], "input has 4 channels"),
        ("QLinearConv", [U8, F(1), np.uint8(0), W8, F(1), np.int8(0), F(1), np.uint8(0), normal(6)], "must be int32"),
        (
            "QLinearConv",
            [U8, F(1), np.uint8(0), W8, np.ones(3, F), np.int8(0), F(1), np.uint8(0)],
            "weights float32|scale or",
        ),
        (
            "QLinearMatMul",
            [U8, F(1), np.uint8(0), W8, F(1), np.int8(0), np.ones(2, F), np.uint8(0)],
            "differ|one number",
        ),
    ],
)
def test_products_that_contradict(op: str, operands: list[Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(case(op, [None if v is None else np.asarray(v) for v in operands], opset=10))
