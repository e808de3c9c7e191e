"""Operators of com.microsoft on quantized tensors and packed weights, compared with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contribnode import F, check, one
from onenode import integers, normal, onnxruntime_run

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ops.packed_layout import PackedMatMulAttrs

# ---------------------------------------------------------------- quantized


def q(dtype: Any, *shape: int, seed: int = 0) -> list[Any]:
    return [
        integers(dtype, *shape, seed=seed),
        F(0.03 + seed / 100),
        np.asarray(integers(dtype, seed=seed + 1)) // dtype(4),
    ]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_operators_between_quantized_tensors(dtype: Any) -> None:
    y = [F(0.05), dtype(7)]
    check("QLinearAdd", [*q(dtype, 2, 3, 4), *q(dtype, 3, 4, seed=1), *y], quanta=1)
    check("QLinearMul", [*q(dtype, 2, 3, 4), *q(dtype, 3, 4, seed=1), *y], quanta=1)
    check("QLinearSigmoid", [*q(dtype, 2, 3, 4), F(1 / 256), dtype(0)], quanta=1)
    check("QLinearLeakyRelu", [*q(dtype, 2, 3, 4), *y], quanta=1, alpha=0.2)
    check("QLinearGlobalAveragePool", [*q(dtype, 2, 3, 4, 5), *y], quanta=1)
    check("QLinearAveragePool", [*q(dtype, 2, 3, 4, 5), *y], quanta=1, kernel_shape=[2, 2], strides=[1, 2])
    check("QLinearConcat", [*y, *q(dtype, 2, 3), *q(dtype, 2, 4, seed=1)], quanta=1, axis=1, fed=0)


@pytest.mark.parametrize("axis", [-1, 1])
def test_quantized_softmax(axis: int) -> None:
    x = [integers(np.uint8, 2, 3, 8), F(0.05), np.uint8(120)]
    check("QLinearSoftmax", [*x, F(1 / 256), np.uint8(0)], quanta=1, axis=axis, opset=13)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("trans_b", [0, 1])
def test_quantized_gemm(trans_b: int, columns: bool) -> None:
    a = [integers(np.uint8, 3, 6), F(0.04), np.uint8(100)]
    scale = np.random.default_rng(2).uniform(0.01, 0.03, 5).astype(F) if columns else F(0.02)
    small = (
        integers(np.int8, *((5, 6) if trans_b else (6, 5)), seed=1) // 2
    )  # ONNX Runtime's sums of larger ones may saturate
    b = [small, scale, np.zeros(np.shape(scale), np.int8)]
    bias = np.random.default_rng(5).integers(-3000, 3000, 5).astype(np.int32)
    check("QGemm", [*a, *b, bias, F(0.3), np.uint8(128)], quanta=1, transB=trans_b)
    check("QGemm", [*a, *b, bias], transB=trans_b)


def test_quantize_and_dequantize() -> None:
    check("QuantizeLinear", [normal(3, 4) * F(20), F(0.2), np.uint8(9)])
    check("DequantizeLinear", [integers(np.uint8, 3, 4), F(0.2), np.uint8(9)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_integer_products_of_floats(bias: bool, columns: bool) -> None:
    scale = np.random.default_rng(2).uniform(0.01, 0.1, 5 if columns else ()).astype(F)
    zero = integers(np.uint8, *scale.shape, seed=3)
    b, extra = integers(np.uint8, 6, 5, seed=1), normal(5, seed=4) if bias else None
    check("DynamicQuantizeMatMul", [normal(4, 6), b, scale, zero, extra], tol=1e-4)
    a = integers(np.uint8, 4, 6)
    check("MatMulIntegerToFloat", [a, b, F(0.05), scale, np.uint8(8), zero, extra], tol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["", "packed", "floats"])
@pytest.mark.parametrize(("k", "block"), [(64, 16), (80, 32), (300, 256)])
def test_weights_of_few_bits(bits: int, zeros: str, k: int, block: int) -> None:
    n, blocks = 5, -(-k // block)
    rng = np.random.default_rng(2)
    packed = integers(np.uint8, n, blocks, block * bits // 8, seed=1)
    scales = rng.uniform(-0.1, 0.1, n * blocks if zeros else (n, blocks)).astype(F)
    zero = {
        "": None,
        "packed": integers(np.uint8, n * (-(-blocks * bits // 8)), seed=3),
        "floats": rng.integers(0, 2 << (bits - 1), (n, blocks)).astype(F),
    }[zeros]
    operands = [normal(3, k), packed, scales, zero, None, normal(n, seed=5)]
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    if (bits, zeros) == (8, "floats"):  # ONNX Runtime has no kernel for it
        m, _ = one("MatMulNBits", operands, **attrs)
        assert import_model(m).of_kind("PackedMatMul")
        return
    graph = check("MatMulNBits", operands, tol=1e-3, **attrs)
    assert graph.of_kind("PackedMatMul")[0].attrs == PackedMatMulAttrs(f"uint{bits}", k, block)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("k", "block", "zeros"), [(64, 16, False), (80, 32, False), (80, 32, True)])
def test_weights_in_the_order_of_activations(bits: int, k: int, block: int, zeros: bool) -> None:
    """Each number of K names its block. ONNX Runtime ignores zero points beside g_idx, so the expected values are computed here."""
    rng, n, blocks = np.random.default_rng(2), 5, -(-k // block)
    groups = rng.permutation(np.arange(k) // block).astype(np.int32)
    numbers = rng.integers(0, 1 << bits, (n, blocks * block))
    zero = rng.integers(0, 1 << bits, (n, blocks)) if zeros else np.full((n, blocks), 1 << (bits - 1))
    scales, x = rng.uniform(-0.1, 0.1, (n, blocks)).astype(F), normal(3, k)
    given = zero.astype(F) if zeros else None  # as floats
    packed = _bytes(numbers, bits).reshape(n, blocks, -1)
    operands = [x, packed, scales, given, groups]
    m, feeds = one("MatMulNBits", operands, K=k, N=n, bits=bits, block_size=block)
    graph = import_model(m)
    assert graph.kinds()["Gather"] == 1
    (got,) = evaluate(graph, feeds).values()
    weights = (numbers[:, :k] - zero[:, groups]) * scales[:, groups]
    np.testing.assert_allclose(got, x @ weights.T.astype(F), rtol=0, atol=1e-4)


def _bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits as bytes, the first one in the lowest bits."""
    parts = numbers.reshape(-1, 8 // bits) << (np.arange(8 // bits) * bits)
    return parts.sum(-1).astype(np.uint8)


def test_blocks_that_lie_in_order_need_no_gather() -> None:
    operands = [normal(3, 64), integers(np.uint8, 5, 2, 16, seed=1), np.full((5, 2), 0.05, F), None]
    groups = (np.arange(64) // 32).astype(np.int32)
    graph = check("MatMulNBits", [*operands, groups], K=64, N=5, bits=4, block_size=32, tol=1e-3)
    assert "Gather" not in graph.kinds()


@pytest.mark.parametrize(("level", "rounded"), [(0, False), (1, False), (3, False), (4, True)])
def test_an_accuracy_level_lets_rows_be_rounded(level: int, rounded: bool) -> None:
    operands = [normal(3, 64), integers(np.uint8, 5, 2, 16, seed=1), np.full((5, 2), 0.05, F)]
    attrs = {"K": 64, "N": 5, "bits": 4, "block_size": 32, "accuracy_level": level}
    graph = check("MatMulNBits", operands, tol=0.02, **attrs)
    assert graph.of_kind("PackedMatMul")[0].attrs.rounded_rows is rounded


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "block"), [(64, 16), (80, 32)])
def test_rows_of_a_packed_table(bits: int, zeros: bool, k: int, block: int) -> None:
    rows, blocks = 9, -(-k // block)
    table = integers(np.uint8, rows, k * bits // 8, seed=1)
    scales = np.random.default_rng(2).uniform(-0.1, 0.1, (rows, blocks)).astype(F)
    zero = integers(np.uint8, rows, -(-blocks * bits // 8), seed=3) if zeros else None
    m, _ = one("GatherBlockQuantized", [np.array([[8, 0, 3]]), table, scales, zero], bits=bits, block_size=block)
    node = m.graph.node[0]
    node.input[0], node.input[1] = node.input[1], node.input[0]
    feeds = {"x0": np.array([[8, 0, 3]])}
    (actual,) = evaluate(import_model(m), feeds).values()
    np.testing.assert_allclose(actual, onnxruntime_run(m, feeds)[0], rtol=1e-6)


@pytest.mark.parametrize("zeros", [False, True])
def test_rows_of_a_table_of_narrow_integers(zeros: bool) -> None:
    """One element per number, with zero points of the same type, 0 by default."""
    table, zero = (integers(np.int8, 5, n, seed=n) % 16 - 8 for n in (32, 2))
    scales = np.random.default_rng(2).uniform(-0.1, 0.1, (5, 2)).astype(F)
    more = [zero.astype(ml_dtypes.int4)] if zeros else []
    m, _ = one("GatherBlockQuantized", [np.array([4, 0]), table.astype(ml_dtypes.int4), scales, *more], block_size=16)
    node = m.graph.node[0]
    node.input[0], node.input[1] = node.input[1], node.input[0]
    (actual,) = evaluate(import_model(m), {"x0": np.array([4, 0])}).values()
    wide = [np.repeat(x, 16, axis=1) for x in (zero if zeros else 0 * zero, scales)]
    np.testing.assert_allclose(actual, ((table - wide[0]) * wide[1])[[4, 0]], rtol=1e-6)
