"""Operators that ONNX Runtime's tools fuse and quantize, compared with ONNX Runtime, or with a formula if it has no CPU kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contribnode import F, check, holds, one
from onenode import integers, normal

from optdnn.errors import OptdnnError, ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.types import Array


def ids(high: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


def half(weights: Array) -> Array:
    """8-bit weights of half the range. On processors without VNNI, ONNX Runtime's sums of products with larger ones saturate."""
    return weights // 2


def gelu(x: Array) -> Array:
    from math import erf

    return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2))).astype(F)


# ---------------------------------------------------------------- transformers


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_embeddings(segments: bool, mask: bool) -> None:
    kept = (np.arange(5) < np.array([[3], [5]])).astype(np.int32)
    operands = [
        ids(9, 2, 5),
        ids(2, 2, 5, seed=1) if segments else None,
        normal(9, 8),
        normal(7, 8, seed=1),
        normal(2, 8, seed=2) if segments else None,
        normal(8, seed=3),
        normal(8, seed=4),
        *([kept] if mask else []),
    ]
    check("EmbedLayerNormalization", operands, n=2, fed=1 + segments, epsilon=1e-5)


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_quantized_embeddings(segments: bool, mask: bool) -> None:
    """As ONNX Runtime quantizes a BERT that its optimizer wrote."""
    kept = (np.arange(5) < np.array([[3], [5]])).astype(np.int32)
    tables = [integers(np.uint8, *shape, seed=k) for k, shape in enumerate([(9, 8), (7, 8), (2, 8), (8,), (8,)])]
    scales = [np.array(0.01 * (k + 1), F) for k in range(5)]
    zeros = [np.array(120 + k, np.uint8) for k in range(5)]
    if not segments:
        tables[2] = scales[2] = zeros[2] = None  # type: ignore[call-overload]
    operands = [
        ids(9, 2, 5),
        ids(2, 2, 5, seed=1) if segments else None,
        *tables,
        kept if mask else None,
        *scales,
        *zeros,
    ]
    check("QEmbedLayerNormalization", operands, n=2, fed=1 + segments, epsilon=1e-5)


def test_embeddings_at_given_positions_and_their_sum() -> None:
    operands = [
        ids(9, 2, 5),
        None,
        normal(9, 8),
        normal(7, 8, seed=1),
        None,
        normal(8, seed=3),
        normal(8, seed=4),
        None,
    ]
    check("EmbedLayerNormalization", [*operands, ids(7, 2, 5, seed=5)], n=("y", "", "sum"))


@pytest.mark.parametrize("causal", [0, 1])
def test_attention_after_former_keys(causal: int) -> None:
    operands = [normal(2, 3, 8), normal(8, 24, seed=1), normal(24, seed=2), None, normal(2, 2, 2, 4, 4, seed=3)]
    check("Attention", operands, n=2, num_heads=2, unidirectional=causal)


def test_attention_returns_its_keys() -> None:
    check("Attention", [normal(2, 3, 8), normal(8, 24, seed=1), normal(24, seed=2)], n=2, num_heads=2)


def test_attention_with_a_mask_of_rows() -> None:
    mask = np.tril(np.ones((2, 3, 3), np.int32))
    check("Attention", [normal(2, 3, 8), normal(8, 24, seed=1), normal(24, seed=2), mask], num_heads=2)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("columns", [True, False])
def test_attention_of_quantized_operands(mask: bool, columns: bool) -> None:
    count = 24 if columns else 1
    scales = np.full(count, 0.01, F) * (1 + np.arange(count, dtype=F) / 24)
    zeros = np.zeros(count, np.int8)
    x, w = integers(np.uint8, 2, 3, 8), half(integers(np.int8, 8, 24, seed=1))
    kept = np.array([2, 3], np.int32) if mask else None
    check(
        "QAttention", [x, w, normal(24), F(0.02), scales.squeeze(), kept, np.uint8(120), zeros.squeeze()], num_heads=2
    )


@pytest.mark.parametrize("both", [0, 1])
def test_relative_positions(both: int) -> None:
    """The formula of T5."""
    table, rows, keys = normal(32, 3), 40, 50
    apart = np.arange(keys) - np.arange(rows)[:, None]
    half = 16 if both else 32
    first = (apart > 0) * half if both else np.zeros_like(apart)
    far = np.abs(apart) if both else np.maximum(-apart, 0)
    exact = half // 2
    share = np.log(np.maximum(far, 1).astype(F) / F(exact)) / F(np.log(20 / exact))
    large = np.minimum(exact + (share * F(half - exact)).astype(int), half - 1)
    want = table[first + np.where(far < exact, far, large)].transpose(2, 0, 1)[None]
    lengths = [np.array([rows]), np.array([keys])]
    holds("RelativePositionBias", [table, *lengths], want, max_distance=20, is_bidirectional=both)
    holds("RelativePositionBias", [table, *lengths], want, fed=3, max_distance=20, is_bidirectional=both)


def test_biases_beside_activations() -> None:
    x, bias, skip = normal(2, 3, 8), normal(8, seed=1), normal(2, 3, 8, seed=2)
    holds("BiasAdd", [x, bias, skip], x + bias + skip, fed=3)
    holds("BiasDropout", [x, bias, skip], x + bias + skip, fed=3)
    left, right = np.split(x + bias, 2, axis=-1)
    holds("BiasSplitGelu", [x, bias], left * gelu(right))
    w, b = normal(8, 4, seed=3), normal(4, seed=4)
    y = x @ w + b
    holds("GemmFastGelu", [x, w, b], 0.5 * y * (1 + np.tanh(0.7978845608 * (y + 0.044715 * y**3))))


@pytest.mark.parametrize(("ta", "tb"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_products_of_operands_whose_batch_lies_inside(ta: int, tb: int) -> None:
    a, b = normal(*((5, 2, 4) if ta else (4, 2, 5))), normal(*((3, 2, 5) if tb else (5, 2, 3)), seed=1)
    check("FusedMatMul", [a, b], transA=ta, transB=tb, transBatchA=1, transBatchB=1, alpha=0.5)
    plain = [normal(2, *((5, 4) if ta else (4, 5))), normal(2, *((3, 5) if tb else (5, 3)), seed=1)]
    check("TransposeMatMul", plain, transA=ta, transB=tb)


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
def test_distances(metric: str) -> None:
    check("CDist", [normal(4, 6), normal(5, 6, seed=1)], fed=2, metric=metric)


def test_operators_of_older_exporters() -> None:
    check("ExpandDims", [normal(2, 3), np.array(1, np.int32)])
    check("Trilu", [normal(4, 5), np.array(1)], upper=0)
    check("Range", [np.array(1), np.array(5)], fed=0)
    check("Range", [np.array(1, F), np.array(3, F), np.array(0.5, F)], fed=0)
    for pads in ([-1, 0, 0, 2], [[1, 0, 0, 2]]):
        check("Pad", [normal(2, 3), np.array(pads), F(2)], mode="constant")
    a, b = normal(3, 4, 2), normal(3, 4, 2, seed=1)
    z, w = (x[..., 0] + 1j * x[..., 1] for x in (a, b))
    for name, y in (("ComplexMul", z * w), ("ComplexMulConj", z * w.conj())):
        holds(name, [a, b], np.stack([y.real, y.imag], -1), fed=2)


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_dynamically_quantized_lstm(columns: bool, direction: str) -> None:
    """ONNX Runtime also rounds the operands of products, so results differ by a few steps."""
    d = 1 + (direction == "bidirectional")
    scale = np.full((d, 16) if columns else d, 0.004, F)
    zero = np.zeros(scale.shape, np.int8)
    w, r = half(integers(np.int8, d, 6, 16)), half(integers(np.int8, d, 4, 16, seed=1))
    operands = [normal(5, 2, 6), w, r, normal(d, 32), None, None, None, None, scale, zero, scale, zero]
    check("DynamicQuantizeLSTM", operands, n=3, tol=0.03, hidden_size=4, direction=direction)


# ---------------------------------------------------------------- images


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("activation", [0, 1])
def test_group_norm(last: int, activation: int) -> None:
    x, gamma, beta, bias = normal(2, 6, 3, 5), normal(6, seed=1), normal(6, seed=2), normal(6, seed=3)
    turn = (0, 2, 3, 1) if last else (0, 1, 2, 3)

    def norm(x: Array) -> Array:
        g = x.reshape(2, 3, -1)
        y = ((g - g.mean(-1, keepdims=True)) / np.sqrt(g.var(-1, keepdims=True) + 1e-5)).reshape(x.shape)
        y = y * gamma[:, None, None] + beta[:, None, None]
        return (y / (1 + np.exp(-y)) if activation else y).transpose(turn)

    more = {"groups": 3, "activation": activation, "channels_last": last}
    holds("GroupNorm", [x.transpose(turn), gamma, beta], norm(x), **more)
    row = normal(2, 6, seed=4)
    total = x + row[:, :, None, None]
    holds("SkipGroupNorm", [x.transpose(turn), gamma, beta, row], norm(total), **more)
    total = x + x + bias[:, None, None]
    operands = [x.transpose(turn), gamma, beta, x.transpose(turn), bias]
    holds("SkipGroupNorm", operands, norm(total), total.transpose(turn), **more)


def test_group_norm_of_halves_beside_parameters_of_floats() -> None:
    x, gamma, beta = normal(1, 3, 2, 4).astype(np.float16), normal(4, seed=1), normal(4, seed=2)
    g = x.astype(F).reshape(1, -1, 2, 2)
    y = (g - g.mean((1, 3), keepdims=True)) / np.sqrt(g.var((1, 3), keepdims=True) + 1e-5)
    want = (y.reshape(x.shape) * gamma + beta).astype(np.float16)
    m, feeds = one("GroupNorm", [x, gamma, beta], groups=2)
    (got,) = evaluate(import_model(m), feeds).values()
    assert got.dtype == np.float16
    np.testing.assert_allclose(got.astype(F), want.astype(F), rtol=2e-3, atol=2e-3)


def test_convolutions_of_channels_on_the_last_axis() -> None:
    x, w, b = normal(2, 4, 7, 6), normal(8, 2, 3, 3, seed=1), normal(8, seed=2)
    attrs = {"group": 2, "pads": [1, 1, 1, 1], "strides": [2, 2], "kernel_shape": [3, 3]}
    m, feeds = one("Conv", [x, w, b], domain="", **attrs)
    (y,) = evaluate(import_model(m), feeds).values()
    last = (0, 2, 3, 1)
    holds("NhwcConv", [x.transpose(last), w.transpose(last), b], y.transpose(last), **attrs)
    z = normal(*y.shape, seed=3)
    want = np.maximum(y + z, 0).transpose(last)
    holds("NhwcFusedConv", [x.transpose(last), w, b, z.transpose(last)], want, activation="Relu", **attrs)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_quantized_images_of_channels_on_the_last_axis(dtype: Any) -> None:
    x = integers(dtype, 2, 6, 5, 4)
    scale, zero = F(0.02), dtype(3)
    check("NhwcMaxPool", [x], kernel_shape=[2, 2], strides=[2, 1], pads=[0, 0, 1, 1])
    pooled = [x, scale, zero, F(0.03), dtype(1)]
    check("QLinearGlobalAveragePool", pooled, quanta=1, channels_last=1)
    check("QLinearAveragePool", pooled, quanta=1, channels_last=1, kernel_shape=[2, 3])
    w = half(integers(np.int8, 8, 4, 3, 3, seed=1))
    weights = [w, np.full(8, 0.01, F), np.zeros(8, np.int8)]
    bias = integers(np.int16, 8, seed=2).astype(np.int32)
    for last in (0, 1):
        first = np.ascontiguousarray(x if last else x.transpose(0, 3, 1, 2))
        operands = [first, scale, zero, *weights, F(0.5), dtype(2), bias]
        check("QLinearConv", operands, quanta=1, channels_last=last, pads=[1, 0, 1, 2])


def test_quantized_choices_and_means() -> None:
    x, y, flags = integers(np.uint8, 2, 6), integers(np.uint8, 2, 6, seed=1), np.arange(12).reshape(2, 6) % 3 > 0
    check(
        "QLinearWhere",
        [flags, x, F(0.02), np.uint8(3), y, F(0.03), np.uint8(9), F(0.025), np.uint8(5)],
        fed=2,
        quanta=1,
    )
    floats = (x.astype(F) - 3) * F(0.02)
    want = np.clip(np.rint(floats.mean(1, keepdims=True) / F(0.01)) + 100, 0, 255)
    holds("QLinearReduceMean", [x, F(0.02), np.uint8(3), F(0.01), np.uint8(100)], want, axes=[1])


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_samples_of_a_grid(mode: str) -> None:
    check("GridSample", [normal(2, 3, 5, 4), np.tanh(normal(2, 6, 3, 2, seed=1))], fed=2, mode=mode, align_corners=1)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "error", "message"),
    [
        ("BiasSplitGelu", [normal(2, 3), normal(3)], {}, ShapeError, "must be an even number"),
        ("BiasDropout", [normal(2, 3), normal(3), None, None, np.array(True)], {}, UnsupportedError, "of training"),
        ("EmbedLayerNormalization", [ids(3, 4), None, *[normal(3, 4)] * 2, None, *[normal(4)] * 2], {}, ShapeError, "input_ids"),
        ("CDist", [normal(2, 3, 1), normal(2, 3)], {}, ShapeError, "CDist operands"),
        ("CDist", [normal(2, 3), normal(2, 3)], {"metric": "cosine"}, UnsupportedError, "metric='cosine'"),
        ("GroupNorm", [normal(1, 2, 2, 4), normal(4), normal(4)], {"groups": 2, "activation": 2}, UnsupportedError, "activation=2"),
        ("GridSample", [normal(1, 1, 2, 2, 2), normal(1, 2, 2, 2, 3)], {}, ShapeError, "GridSample images"),
        ("QLinearReduceMean", [integers(np.uint8, 2, 2), F(1), None, F(1)], {}, ShapeError, "needs axes"),
        ("QAttention", [integers(np.uint8, 1, 2, 4), integers(np.int8, 4, 13), normal(13), F(1), F(1)], {"num_heads": 2},
         ShapeError, "do not make query"),
        ("Attention", [normal(1, 2, 4), normal(4, 12), None, None, normal(2, 1, 2, 2)], {"num_heads": 2}, ShapeError, "past of"),
        ("Attention", [normal(1, 2, 4), normal(4, 12), None, np.array([2, 0, 2], np.int32)], {"num_heads": 2}, UnsupportedError,
         "more than the bounds of each sequence"),
        ("RelativePositionBias", [normal(1, 2), np.array([3]), np.array([3])], {"max_distance": 8}, UnsupportedError, "1 buckets"),
        ("RelativePositionBias", [normal(8, 2), np.array([3]), np.array([3])], {"max_distance": 4}, UnsupportedError, "up to 4"),
    ],
)  # fmt: skip
def test_refusals(op: str, operands: list[Any], attrs: dict[str, Any], error: type[OptdnnError], message: str) -> None:
    m, _ = one(op, operands, **attrs)
    with pytest.raises(error, match=message):
        import_model(m)


def test_operands_that_must_be_known() -> None:
    m, _ = one("ExpandDims", [normal(2, 3), np.array(1, np.int32)], fed=2)
    with pytest.raises(UnsupportedError, match="not constant"):
        import_model(m)
    m, _ = one("BiasDropout", [normal(2, 3), normal(3)], n=2)
    with pytest.raises(UnsupportedError, match="output mask"):
        import_model(m)
