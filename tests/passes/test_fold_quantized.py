"""fold_quantized: an operator between DQ and Q becomes one operator on 8-bit numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.quantized_nets import QNet, folded, within

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.fused import PointwiseAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.types import DTYPES, FP16


def chain(
    n: QNet, layer: Callable[[Value], Value], *shape: int, dtype: Any = np.int8, zero: int | None = None
) -> Graph:
    x = n.fake(n.input(*shape), 0.03, zero, dtype)
    return n.done(n.fake(layer(x), 0.04))


def test_a_convolution_between_dq_and_q() -> None:
    n = QNet()
    graph, report = folded(chain(n, lambda x: n.qconv(x, 16), 2, 16, 9, 7))
    assert graph.kinds() == {"Pointwise": 2, "QuantizedConv": 1}
    (conv,) = graph.of_kind("QuantizedConv")
    assert conv.attrs.stages == (("bias",),)
    assert conv.outputs[0].type.dtype == np.int8
    assert {"Conv_4", "QuantizeLinear_5"} <= conv.src
    assert report.changes == 3  # the product, and one conversion at each border
    within(n.graph, graph, 0.0401)


def stage_cases() -> dict[str, tuple[Any, ...]]:
    return {
        "Relu": (Stage("Relu", (-1,)),),
        "residual": (Stage("Add", (-1, 3)), Stage("Relu", (-2,))),
        "Sigmoid": (Stage("Sigmoid", (-1,)),),
    }


@pytest.mark.parametrize("name", stage_cases())
def test_stages_run_in_the_epilogue(name: str) -> None:
    n = QNet()
    x = n.input(2, 16, 9, 7)
    second = [n.fake(n.input(2, 16, 9, 7, name="r"), 0.02)] if name == "residual" else []
    y = n.qconv(n.fake(x, 0.03), 16, epilogue=stage_cases()[name], more=second)
    scale = 0.008 if name == "Sigmoid" else 0.04
    graph, _ = folded(n.done(n.fake(y, scale)))
    (conv,) = graph.of_kind("QuantizedConv")
    if name == "Relu":
        assert (conv.attrs.stages, conv.attrs.low) == ((("bias",),), 0.0)
    if name == "residual":
        assert conv.attrs.stages == (("bias",), ("add",))
        assert conv.attrs.residual_scale == float(
            np.float32(np.float64(np.float32(0.02)) / np.float64(np.float32(0.04)))
        )
        assert graph.type(conv.inputs[3]).dtype == np.int8
    if name == "Sigmoid":
        assert [s[0] for s in conv.attrs.stages] == ["bias", "sigmoid", "mul_const"]
    within(n.graph, graph, scale * 1.001)


def test_a_residual_that_is_not_quantized_is_added_after_it() -> None:
    n = QNet()
    x = n.fake(n.input(2, 16, 9, 7), 0.03)
    y = n.qconv(x, 16, epilogue=(Stage("Add", (-1, 3)),), more=[n.input(2, 16, 9, 7, name="r")])
    graph, _ = folded(n.done(n.fake(y, 0.04)))
    (conv,) = graph.of_kind("QuantizedConv")
    assert conv.outputs[0].type.dtype == np.float32
    assert graph.kinds()["Pointwise"] == 2
    within(n.graph, graph, 0.0401)


def test_a_result_that_is_not_quantized_stays_a_float() -> None:
    n = QNet()
    x = n.fake(n.input(2, 16, 9, 7), 0.03)
    graph, _ = folded(n.done(n.qconv(x, 16)))
    (conv,) = graph.of_kind("QuantizedConv")
    assert conv.outputs[0].type.dtype == np.float32
    within(n.graph, graph, 1e-4)


@pytest.mark.parametrize("layer", ["gemm", "gemm, not transposed", "matmul"])
def test_matrix_products(layer: str) -> None:
    n = QNet()
    made: dict[str, Callable[[Value], Value]] = {
        "gemm": lambda x: n.qgemm(x, 24, alpha=0.5), "gemm, not transposed": lambda x: n.qgemm(x, 24, trans_b=False),
        "matmul": lambda x: n.qmatmul(x, 24),
    }  # fmt: skip
    shape = (3, 5, 32) if layer == "matmul" else (5, 32)
    graph, _ = folded(chain(n, made[layer], *shape))
    assert graph.kinds()["QuantizedMatMul"] == 1
    within(n.graph, graph, 0.0401)


def test_uint8_and_zero_points() -> None:
    n = QNet()
    x = n.fake(n.input(2, 16, 9, 7), 0.03, 0, np.uint8)
    graph, _ = folded(n.done(n.fake(n.qconv(x, 16), 0.04, 117, np.uint8)))
    (conv,) = graph.of_kind("QuantizedConv")
    assert (conv.attrs.zero, conv.attrs.low, conv.attrs.high) == (117, -117.0, 138.0)
    within(n.graph, graph, 0.0401)


@pytest.mark.parametrize(("channels", "group"), [(16, 16), (16, 4), (24, 24), (24, 3)])
def test_groups_are_folded(channels: int, group: int) -> None:
    n = QNet()
    graph, report = folded(
        chain(n, lambda x: n.qconv(x, 2 * channels, group=group), 2, channels, 9, 7, dtype=np.uint8, zero=90)
    )
    assert graph.of_kind("QuantizedConv")[0].attrs.group == group
    assert not report.refused
    within(n.graph, graph, 0.0401)


def test_groups_of_fp8_are_folded() -> None:
    n, e4m3 = QNet(), DTYPES["fp8_e4m3"]
    graph, _ = folded(chain(n, lambda x: n.qconv(x, 16, group=4, dtype=e4m3), 2, 16, 9, 7, dtype=e4m3))
    assert graph.of_kind("QuantizedConv")[0].attrs.group == 4
    within(n.graph, graph, 0.0401)


@pytest.mark.parametrize("layer", ["3x3", "1x1", "depthwise", "groups", "gemm", "gemm, not transposed", "matmul"])
@pytest.mark.parametrize(("dtype", "zero"), [(np.uint8, 100), (np.int8, -37)])
def test_a_zero_point_of_the_operand_is_part_of_the_bias(layer: str, dtype: Any, zero: int) -> None:
    n = QNet()
    made: dict[str, Callable[[Value], Value]] = {
        "3x3": lambda x: n.qconv(x, 16), "1x1": lambda x: n.qconv(x, 16, 1), "depthwise": lambda x: n.qconv(x, 16, group=16),
        "groups": lambda x: n.qconv(x, 32, group=4),
        "gemm": lambda x: n.qgemm(x, 24, alpha=0.5), "gemm, not transposed": lambda x: n.qgemm(x, 24, trans_b=False),
        "matmul": lambda x: n.qmatmul(x, 24),
    }  # fmt: skip
    shape = {"matmul": (3, 5, 32), "gemm": (5, 32), "gemm, not transposed": (5, 32)}.get(layer, (2, 16, 9, 7))
    graph, _ = folded(chain(n, made[layer], *shape, dtype=dtype, zero=zero))
    (product,) = graph.of_kind("QuantizedConv", "QuantizedMatMul")
    if product.kind == "QuantizedConv":
        assert product.attrs.input_zero == (0 if layer == "1x1" else zero)  # where nothing is padded, nothing is needed
    within(n.graph, graph, 0.0401)


def test_weights_around_128_are_int8() -> None:
    n = QNet()
    w = n.rng.integers(0, 256, (16, 16, 3, 3)).astype(np.uint8)
    operands = [n.const(w, np.uint8), n.const(np.float32(0.002), np.float32), n.const(np.uint8(128), np.uint8)]
    weights = n.op("DequantizeLinear", *operands, attrs=DequantizeAttrs(0))
    x = n.fake(n.input(2, 16, 9, 7), 0.03)
    conv = n.op("Conv", x, weights, attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1), 1))
    graph, _ = folded(n.done(n.fake(conv, 0.04)))
    assert graph.kinds()["QuantizedConv"] == 1
    within(n.graph, graph, 0.0401)


@pytest.mark.parametrize(("code", "zero"), [("int4", -3), ("uint4", 9), ("int2", 0), ("uint2", 1)])
def test_weights_of_fewer_bits_are_int8(code: str, zero: int) -> None:
    n, dtype = QNet(), DTYPES[code]
    bits = int(code[-1])
    low = 0 if code[0] == "u" else -(1 << bits - 1)
    w = n.rng.integers(low, low + (1 << bits), (16, 16, 3, 3)).astype(dtype)
    scale = n.const(n.rng.uniform(0.05, 0.1, 16).astype(np.float32), np.float32)
    zeros = n.const(np.full(16, zero).astype(dtype), dtype)
    weights = n.op("DequantizeLinear", n.const(w, dtype), scale, zeros, attrs=DequantizeAttrs(0))
    x = n.fake(n.input(2, 16, 9, 7), 0.03)
    conv = n.op("Conv", x, weights, attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1), 1))
    graph, _ = folded(n.done(n.fake(conv, 0.4)))
    (product,) = graph.of_kind("QuantizedConv")
    stored = graph.constant_value(product.inputs[1])
    assert stored is not None
    assert stored.dtype == np.int8
    assert (stored == w.astype(np.int8) - zero).all()
    within(n.graph, graph, 0.401)


def test_a_global_mean_of_integers() -> None:
    n = QNet()
    graph, _ = folded(chain(n, lambda x: n.op("GlobalAveragePool", x), 3, 16, 7, 7))
    assert graph.kinds()["QuantizedMean"] == 1
    within(n.graph, graph, 0.0401)


def test_an_addition_becomes_one_pointwise_of_integers() -> None:
    n = QNet()
    a, b = n.fake(n.input(2, 16, 8, 8), 0.03), n.fake(n.input(2, 16, 8, 8, name="b"), 0.05, 7)
    stored = n.graph.op(a).inputs[0]
    graph, _ = folded(n.done(n.q(n.op("Add", a, b), 0.06), stored))
    first, last = sorted(graph.of_kind("Pointwise"), key=lambda op: len(op.attrs.epilogue))
    assert first.value in last.inputs  # only values without other readers are rounded in the launch of the sum
    assert sorted(s.kind for s in last.attrs.epilogue) == sorted(
        [
            "Cast",
            "Mul",
            "Div",
            "Round",
            "Add",
            "Clip",
            "Cast",
            "Cast",
            "Sub",
            "Mul",
            "Add",
            "Div",
            "Round",
            "Clip",
            "Cast",
        ]
    )
    within(n.graph, graph, 0.0)


@pytest.mark.parametrize("start", [np.int32, np.float32])
def test_casts_to_fp16_between_stages_of_fp32(start: Any) -> None:
    """The quantizer is in fp32: a Cast of integers gives fp32 at once, one of floats rounds and is widened."""
    n = QNet(dtype=FP16)
    x = n.input(4, 33, dtype=start)
    stages = (Stage("Cast", (-1,), CastAttrs(FP16)), Stage("Mul", (-2, 1)))
    y = n.op("Pointwise", x, n.const(np.float32(0.3), FP16), attrs=PointwiseAttrs(epilogue=stages))
    graph, _ = folded(n.done(n.q(y, 0.06)))
    (made,) = graph.of_kind("Pointwise")
    casts = [s.attrs.to.name for s in made.attrs.epilogue if s.kind == "Cast"]
    widened = [] if start == np.int32 else ["float16"]
    assert casts == ["float32", *widened, "float32", "int8"]  # the first is of the factor
    numbers = np.random.default_rng(0).integers(-99, 99, (4, 33)).astype(start) + start(start == np.float32) / start(3)
    want, got = (np.concatenate(list(evaluate(g, {"x": numbers.astype(start)}).values())) for g in (n.graph, graph))
    assert np.abs(want.astype(int) - got.astype(int)).max() <= 1
    assert len(np.unique(want)) > 20


def test_a_gelu_of_quantized_operators_is_one_pointwise() -> None:
    """ONNX Runtime rounds after the erf, the addition and each product of a written-out GELU."""
    n = QNet()

    def fake(x: Value, scale: float, zero: int) -> Value:
        return n.fake(x, scale, zero, np.uint8)

    x = fake(n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 16), 0.03, 120)
    y = fake(n.op("Erf", n.op("Div", x, n.const(np.float32(np.sqrt(2))))), 0.01, 128)
    y = fake(n.op("Mul", x, fake(n.op("Add", y, n.const(np.float32(1))), 0.01, 0)), 0.06, 10)
    y = fake(n.op("Mul", y, n.const(np.float32(0.5))), 0.03, 10)
    graph, _ = folded(n.done(n.fake(n.qconv(y, 8), 0.03)))
    (gelu,) = (op for op in graph.of_kind("Pointwise") if any(s.kind == "Erf" for s in op.attrs.epilogue))
    stages = [s.kind for s in gelu.attrs.epilogue]
    assert (stages.count("FakeQuantize"), stages.count("Round"), len(stages)) == (3, 1, 16)
    assert {graph.type(v).dtype.name for v in (gelu.inputs[0], gelu.value) if v is not None} == {"uint8"}
    within(n.graph, graph, 0.031)


def test_other_targets_keep_q_and_dq() -> None:
    n = QNet()
    graph = chain(n, lambda x: n.qconv(x, 16), 2, 16, 9, 7)
    for target in ("cpu", "cuda:sm_70", ""):
        assert FoldQuantized()(graph, PassContext(target=target)).changes == 0


def test_fp8_conversions_are_stages_and_residuals_are_read_as_they_were() -> None:
    e4m3, n = DTYPES["fp8_e4m3"], QNet()
    x = n.op("Relu", n.input(4, 32))
    q = n.op("QuantizeLinear", x, n.const(np.float32(0.02), np.float32), attrs=QuantizeAttrs(e4m3, 0))
    dq = n.op("DequantizeLinear", q, n.const(np.float32(0.02), np.float32), attrs=DequantizeAttrs(0))
    w = n.const(n.rng.standard_normal((32, 32)).astype(e4m3), e4m3)
    wd = n.op("DequantizeLinear", w, n.const(np.float32(0.2), np.float32), attrs=DequantizeAttrs(0))
    y = n.op("MatMul", dq, wd, dq, attrs=MatMulAttrs(epilogue=(Stage("Add", (-1, 2)),)))
    graph, _ = folded(n.done(y))
    assert graph.kinds() == {"Relu": 1, "Pointwise": 1, "QuantizedMatMul": 1}
    (product,) = graph.of_kind("QuantizedMatMul")
    assert graph.op(product.inputs[3]).kind == "Relu"
    assert [s.kind for s in graph.of_kind("Pointwise")[0].attrs.epilogue] == ["Div", "Clip", "Cast"]
    within(n.graph, graph, 0.161)  # half of an e4m3 step of the residual


def test_a_constant_bias_of_an_operator_of_floats_is_a_constant() -> None:
    """The weights' zero point keeps the convolution in floats; ONNX Runtime stores its bias in 32 bits."""
    n = QNet()
    x = n.fake(n.input(2, 16, 8, 8), 0.03)
    stored = [
        n.const(n.rng.integers(0, 255, (8, 16, 3, 3)).astype(np.uint8), np.uint8),
        n.const(np.array(3, np.uint8), np.uint8),
    ]
    w = n.op("DequantizeLinear", stored[0], n.const(np.float32(0.001), np.float32), stored[1], attrs=DequantizeAttrs(0))
    whole = n.const(n.rng.integers(-900, 900, 8).astype(np.int32), np.int32)
    b = n.op("DequantizeLinear", whole, n.const(np.float32(0.002), np.float32), attrs=DequantizeAttrs(0))
    y = n.op("Conv", x, w, b, attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1)))
    graph, _ = folded(n.done(n.fake(y, 0.04)))
    (conv,) = graph.of_kind("Conv")
    assert all(graph.constant_value(v) is not None for v in conv.inputs[1:])
    assert graph.kinds() == {"FakeQuantize": 1, "Conv": 1}
    assert [s.kind for s in conv.attrs.epilogue] == ["FakeQuantize"]
    within(n.graph, graph, 0.0401)


def test_a_norm_keeps_the_quantization_of_its_result() -> None:
    """Its own launch stores 8 bits; a product of floats rounds in its epilogue."""
    n = QNet()
    x = n.op("Softmax", n.input(2, 16, 8, 8))
    graph, _ = folded(n.done(n.op("Relu", n.fake(x, 0.04))))
    assert [op.outputs[0].type.dtype.name for op in graph.of_kind("Pointwise")] == ["int8", "float32"]
    n = QNet()
    x = n.op("MatMul", n.input(2, 16, 8), n.input(2, 8, 16, name="b"))
    graph, _ = folded(n.done(n.op("Relu", n.fake(x, 0.04))))
    assert graph.kinds() == {"MatMul": 1, "Relu": 1}


@pytest.mark.parametrize("seen", [False, True])
def test_a_chain_behind_a_product_is_one_pointwise(seen: bool) -> None:
    """Neither a product nor a Reshape between (``seen``) can compute what follows the product's own rounding."""
    n = QNet()
    x = n.fake(n.input(2, 9, 16), 0.03)
    y = n.q(n.qmatmul(x, 24), 0.04)
    y = n.dq(n.op("Reshape", y, n.ints(2, 3, 3, 24)) if seen else y, 0.04)
    shape = (2, 3, 3, 24) if seen else (2, 9, 24)
    y = n.fake(n.op("Mul", y, n.random(24)), 0.05)
    y = n.fake(n.op("Add", y, n.fake(n.input(*shape, name="b"), 0.03)), 0.06)
    graph, _ = folded(n.done(y))
    assert len(graph.of_kind("QuantizedMatMul")) == 1
    assert [op.outputs[0].type.dtype.name for op in graph.of_kind("Pointwise")].count("int8") == 1
    assert len(graph.of_kind("Pointwise")) == 2  # the input's rounding, and all after the product
    within(n.graph, graph, 0.0601)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, DTYPES["fp8_e4m3"]])
def test_heads_that_are_rounded_for_no_kernel_are_rounded_in_one_launch(dtype: Any) -> None:
    """ModelOpt rounds the queries and keys of attention. Their products have no kernel for 8 bits, and a Transpose cannot round."""
    n = QNet()
    zero = 3 if np.dtype(dtype).kind in "iu" else 0
    q, k = (
        n.fake(
            n.op("Transpose", n.op("Softmax", n.input(2, 6, 8, name=name)), attrs=TransposeAttrs(perm)),
            0.01,
            zero,
            dtype,
        )
        for name, perm in (("q", (1, 0, 2)), ("k", (1, 2, 0)))
    )
    graph, _ = folded(n.done(n.op("MatMul", q, k, attrs=MatMulAttrs())))
    rounded = graph.of_kind("FakeQuantize" if zero else "Pointwise")
    assert [op.outputs[0].type.dtype.name for op in rounded] == ["float32", "float32"]
    within(n.graph, graph, 1e-6)
