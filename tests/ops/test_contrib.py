"""ONNX Runtime's own operators against ONNX Runtime; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contribnode import F, check, one
from onenode import normal

from optdnn.errors import OptdnnError, ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate

# ---------------------------------------------------------------- products and activations


@pytest.mark.parametrize(("ta", "tb"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_fused_matmul(ta: int, tb: int) -> None:
    a, b = normal(2, 4, 5), normal(2, 5, 3, seed=1)
    operands = [a.swapaxes(1, 2) if ta else a, b.swapaxes(1, 2) if tb else b]
    check("FusedMatMul", [np.ascontiguousarray(x) for x in operands], transA=ta, transB=tb, alpha=0.5)


def test_gelus() -> None:
    assert check("BiasGelu", [normal(2, 3, 8), normal(8, seed=1)]).kinds() == {"Add": 1, "Gelu": 1}
    check("FastGelu", [normal(2, 3, 8), normal(8, seed=1)])
    check("FastGelu", [normal(2, 3, 8)])
    check("QuickGelu", [normal(2, 3, 8)], alpha=1.5)
    check("Gelu", [normal(2, 3, 8)])


@pytest.mark.parametrize(
    ("activation", "params"),
    [
        ("Relu", None),
        ("Tanh", None),
        ("Sigmoid", None),
        ("LeakyRelu", [0.2]),
        ("Clip", [-0.5, 0.5]),
        ("HardSigmoid", [0.3, 0.4]),
    ],
)
def test_fused_convolution(activation: str, params: list[float] | None) -> None:
    attrs: dict[str, Any] = {"activation": activation, "pads": [1, 1, 1, 1]}
    attrs |= {} if params is None else {"activation_params": params}
    x, w, b = normal(1, 3, 6, 6), normal(4, 3, 3, 3, seed=1), normal(4, seed=2)
    check("FusedConv", [x, w, b], **attrs)
    check("FusedConv", [x, w, b, normal(1, 4, 6, 6, seed=3)], **attrs)


def test_fused_gemm() -> None:
    attrs = {"activation": "LeakyRelu", "activation_alpha": 0.2, "transB": 1}
    check("FusedGemm", [normal(3, 4), normal(5, 4, seed=1), normal(5, seed=2)], **attrs)


# ---------------------------------------------------------------- normalization


def test_simplified_layer_normalization_in_either_domain() -> None:
    assert check(
        "SimplifiedLayerNormalization", [normal(2, 3, 8), normal(8, seed=1)], domain="", epsilon=1e-3
    ).kinds() == {"RMSNormalization": 1}


@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [("y",), ("y", "", "", "total")])
def test_skip_layer_normalization(beta: bool, bias: bool, outputs: tuple[str, ...]) -> None:
    x, skip, gamma = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(8, seed=2)
    more = [normal(8, seed=3) if beta else None, normal(8, seed=4) if bias else None]
    check("SkipLayerNormalization", [x, skip, gamma, *more], n=outputs, fed=2, epsilon=1e-3)
    if not beta:
        check("SkipSimplifiedLayerNormalization", [x, skip, gamma, more[1]], n=outputs, fed=2, epsilon=1e-3)


@pytest.mark.parametrize("kind", ["", "Simplified"])
def test_statistics_of_skip_layer_normalization(kind: str) -> None:
    """onnxscript's fusions name these outputs; ONNX Runtime's own kernel leaves them empty."""
    x, skip, gamma = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(8, seed=2)
    names = ("y", "mean", "inverse", "total")
    model, feeds = one(f"Skip{kind}LayerNormalization", [x, skip, gamma], n=names, fed=2, epsilon=1e-3)
    got, total = evaluate(import_model(model), feeds), x + skip
    mean = total.mean(-1, keepdims=True)
    apart = total if kind else total - mean
    inverse = 1 / np.sqrt((apart**2).mean(-1, keepdims=True) + 1e-3)
    for name, want in zip(names, (apart * inverse * gamma, mean, inverse, total), strict=True):
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- refusals


PACKED = [normal(2, 16), np.zeros((1, 1, 8), np.uint8), np.ones(1, F)]


BLOCKS = {"K": 16, "N": 1, "bits": 4, "block_size": 16}


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "error", "message"),
    [
        ("FusedConv", [normal(1, 1, 3, 3), normal(1, 1, 1, 1)], {"activation": "Elu"}, UnsupportedError, "activation Elu"),
        ("Attention", [normal(1, 2, 4), normal(4, 13)], {"num_heads": 2}, ShapeError, "do not make query"),
        ("Attention", [normal(1, 2, 4), normal(4, 12)], {}, ShapeError, "num_heads"),
        ("MultiHeadAttention", [normal(1, 2, 4)], {"num_heads": 2}, ShapeError, "packed query, key and value must have 5"),
        ("GroupQueryAttention", [normal(1, 2, 9), None, None, None, None, np.array([1], np.int32), np.array(2, np.int32)],
         {"num_heads": 2, "kv_num_heads": 1}, ShapeError, "does not hold 2 heads of queries"),
        ("GroupQueryAttention", [normal(1, 2, 4), normal(1, 2, 4), normal(1, 2, 4), None, None, np.zeros(1, np.int32), np.int32(2)],
         {"num_heads": 1, "kv_num_heads": 1, "sliding_window_cache": 1, "local_window_size": 4}, ShapeError, "needs past_key"),
        ("GroupQueryAttention",
         [*[normal(1, 2, 4)] * 3, *[normal(1, 1, 3, 4)] * 2, np.zeros(1, np.int32), np.int32(2)],
         {"num_heads": 1, "kv_num_heads": 1, "sliding_window_cache": 1, "local_window_size": 4}, ShapeError,
         "a cache of 3 positions for a window of 4"),
        ("GroupQueryAttention", [normal(1, 2, 4)], {"num_heads": 1, "kv_num_heads": 1, "k_quant_type": "PER_TENSOR"},
         UnsupportedError, "k_quant_type=PER_TENSOR"),
        ("RotaryEmbedding", [normal(1, 2, 4)], {}, ShapeError, "needs operand 1"),
        ("SkipLayerNormalization", [normal(1, 2, 4), normal(1, 2, 4)], {}, ShapeError, "needs operand 2"),
        ("QLinearConcat", [F(1), np.uint8(0), np.zeros(3, np.uint8)], {"axis": 0}, ShapeError, "1 operands after"),
        ("MatMulNBits", [normal(2, 16), np.zeros((1, 1, 6), np.uint8), np.ones(1, F)],
         {"K": 16, "N": 1, "bits": 3, "block_size": 16}, UnsupportedError, "3 bits"),
        ("MatMulNBits", [*PACKED, None, np.arange(16, dtype=np.int32)], BLOCKS, UnsupportedError,
         "n: .*g_idx whose blocks do not have 16 numbers each"),
        ("MatMulNBits", [*PACKED, None, np.zeros(8, np.int32)], BLOCKS, ShapeError,
         "n.*: .*it must name the block of each of 16 numbers"),
        ("MatMulNBits", [PACKED[0], np.zeros((1, 1, 9), np.uint8), PACKED[2]], BLOCKS, ShapeError,
         r"n.*: MatMulNBits weights of 4 bits uint8\[1, 1, 9\] must hold \[1, 8\]"),
        ("MatMulNBits", [*PACKED[:2], np.ones(2, F)], BLOCKS, ShapeError, r"n.*: .*scales fp32\[2\] must hold \[1, 1\]"),
        ("MatMulNBits", [*PACKED, np.ones(2, np.uint8)], BLOCKS, ShapeError, r"n.*: .*packed zero points uint8\[2\] must hold"),
        ("MatMulNBits", [*PACKED, np.ones(1, np.int32)], BLOCKS, ShapeError, "n.*: .*zero points are int32"),
        ("MatMulNBits", PACKED, {**BLOCKS, "block_size": 24}, ShapeError, "n.*: .*a block must be a power of two"),
        ("MatMulNBits", PACKED, {**BLOCKS, "block_size": 8}, ShapeError, "n.*: .*and at least 16"),
        ("GatherBlockQuantized", [PACKED[1][0], np.zeros(1, np.int64), np.ones((1, 2), F)], {"block_size": 16}, ShapeError,
         "n.*: .*do not fit data"),
        ("GatherBlockQuantized", [PACKED[1][0], np.zeros(1, np.int64), np.ones((1, 1), F)],
         {"gather_axis": 1}, UnsupportedError, "axes other than the first"),
        ("GroupQueryAttention", [normal(1, 2, 4)], {"num_heads": 1, "kv_num_heads": 1}, ShapeError, "needs query, seqlens_k"),
        ("SparseAttention", [normal(1, 2, 4)], {}, UnsupportedError, "unknown"),
    ],
)  # fmt: skip
def test_refusals(op: str, operands: list[Any], attrs: dict[str, Any], error: type[OptdnnError], message: str) -> None:
    m, _ = one(op, operands, **attrs)
    with pytest.raises(error, match=message):
        import_model(m)
