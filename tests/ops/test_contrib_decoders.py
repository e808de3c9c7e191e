"""ONNX Runtime's attention of decoders, gated biases of positions, and products with 4-bit codebooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contribnode import F, check, one
from onenode import integers, normal, onnxruntime_run

from optdnn.errors import OptdnnError, ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate


def test_decoder_attention_over_the_keys_of_an_encoder() -> None:
    q, keys = normal(2, 1, 8), [normal(2, 4, 7, 2, seed=1), normal(2, 4, 7, 2, seed=2)]
    keep = np.array([[1] * 7, [1, 1, 1, 0, 0, 0, 0]], np.int32)
    check("DecoderMaskedMultiHeadAttention", [q, *keys, keep], fed=3, num_heads=4)


def test_decoder_attention_over_a_cache_that_grows() -> None:
    """ONNX Runtime has no such kernel for the CPU; its MultiHeadAttention computes the same."""
    new, past = [normal(2, 1, 8, seed=i) for i in range(3)], [normal(2, 4, 7, 2, seed=4), normal(2, 4, 7, 2, seed=5)]
    own = normal(24, seed=5)
    operands = [*new, None, None, *past, np.array([7], np.int32), None, None, own]
    m, feeds = one("DecoderMaskedMultiHeadAttention", operands, n=3, fed=5, num_heads=4)
    got = evaluate(import_model(m), feeds).values()
    m, feeds = one("MultiHeadAttention", [*new, own, None, None, *past], n=3, fed=3, num_heads=4)
    for a, b in zip(got, onnxruntime_run(m, feeds), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_decoder_attention_over_a_shared_buffer(bias: bool) -> None:
    """The same as a cache of three positions that grows, and the new ones written after them."""
    q, k, v = (normal(2, 1, 8, seed=i) for i in range(3))
    past, held = [normal(2, 4, 6, 2, seed=4), normal(2, 4, 6, 2, seed=5)], np.array([3], np.int32)
    own = normal(24, seed=6) if bias else None
    operands = [q, k, v, None, None, *past, held, None, None, own]
    m, feeds = one("DecoderMaskedMultiHeadAttention", operands, n=3, fed=6, num_heads=4, past_present_share_buffer=1)
    y, *present = evaluate(import_model(m), feeds).values()
    grown = [q, k, v, own, None, None, *(p[:, :, :3] for p in past)]
    m, feeds = one("MultiHeadAttention", grown, n=3, fed=3, num_heads=4)
    want, *tokens = onnxruntime_run(m, feeds)
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5)
    for got, token, before in zip(present, tokens, past, strict=True):
        np.testing.assert_allclose(got[:, :, :4], token, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(got[:, :, 4:], before[:, :, 4:])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (12, 40)])
def test_products_of_4_bit_numbers(kind: int, n: int, k: int) -> None:
    blocks = -(-n * k // 32)
    operands = [normal(3, k), integers(np.uint8, n * k // 2, seed=1), np.abs(normal(blocks, seed=2))]
    check("MatMulBnb4", operands, tol=1e-4, N=n, K=k, block_size=32, quant_type=kind)


def test_a_gated_bias_of_positions() -> None:
    x, own, positions = normal(2, 5, 8), normal(8, seed=1), normal(1, 2, 5, 5, seed=2)
    weight, bias, eco = normal(4, 8, seed=3), normal(8, seed=4), normal(1, 2, 1, 1, seed=5)
    m, feeds = one("GatedRelativePositionBias", [x, own, positions, weight, bias, eco], num_heads=2)
    (got,) = evaluate(import_model(m), feeds).values()
    q = (x + own).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)
    sums = (q @ weight + bias).reshape(2, 2, 5, 2, 4).sum(-1)
    a, b = np.split(1 / (1 + np.exp(-sums)), 2, axis=-1)
    np.testing.assert_allclose(got, (a * (b * eco - 1) + 2) * positions, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "error", "message"),
    [
        ("DecoderMaskedMultiHeadAttention", [*[normal(1, 1, 4)] * 3, None, None, *[normal(1, 2, 3, 2)] * 2, np.array([1], np.int32),
         None, np.zeros((1, 1, 3), np.int32)], {"num_heads": 2}, UnsupportedError, "cache_indirection"),
        ("DecoderMaskedMultiHeadAttention", [*[normal(1, 1, 4)] * 3, None, None, *[normal(1, 2, 3, 2)] * 2],
         {"num_heads": 2, "past_present_share_buffer": 1}, ShapeError, "past_sequence_length"),
        ("DecoderMaskedMultiHeadAttention",
         [*[normal(1, 1, 4)] * 3, None, None, *[normal(1, 2, 3, 2)] * 2, np.array([1], np.int32)],
         {"num_heads": 2, "past_present_share_buffer": 1, "output_qk": 1, "n": 4}, UnsupportedError, "the output qk"),
        ("MatMulBnb4", [normal(1, 4), np.zeros(8, np.uint8), np.ones(1, F)], {"K": 4, "N": 4, "block_size": 16, "quant_type": 2},
         UnsupportedError, "quant_type=2"),
        ("MatMulBnb4", [normal(1, 4), np.zeros(8, np.uint8), np.ones(1, F)],
         {"K": 4, "N": 4, "block_size": 16, "quant_type": 1, "transB": 0}, UnsupportedError, "transB=0"),
        ("MatMulBnb4", [normal(1, 4), np.zeros(8, np.uint8), np.ones(1, F)], {"K": 0, "N": 4, "block_size": 16, "quant_type": 1},
         ShapeError, "all must be positive"),
        ("MatMulBnb4", [normal(1, 4), np.zeros(8, np.uint8), np.ones(1, F)],
         {"K": 4, "N": 4, "block_size": 16, "quant_type": 1, "fed": 2}, UnsupportedError, "not constant"),
        ("MatMulBnb4", [normal(1, 4), np.zeros(8, np.int8), np.ones(1, F)], {"K": 4, "N": 4, "block_size": 16, "quant_type": 1},
         ShapeError, "packed weights are uint8"),
        ("GatedRelativePositionBias", [normal(1, 3, 4), normal(4), normal(1, 2, 3, 3), normal(2, 3), normal(3), normal(1, 2, 1, 1)],
         {"num_heads": 2}, ShapeError, "do not make two gates"),
    ],
)  # fmt: skip
def test_refusals_of_decoders_and_codes(
    op: str, operands: list[Any], attrs: dict[str, Any], error: type[OptdnnError], message: str
) -> None:
    m, _ = one(op, operands, **attrs)
    with pytest.raises(error, match=message):
        import_model(m)
