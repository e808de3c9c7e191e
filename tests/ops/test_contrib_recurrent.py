"""Operators around recurrent layers that onnxruntime-genai's builder writes, compared with ONNX Runtime, or with a formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contribnode import check, holds, one
from onenode import normal

from optdnn.errors import OptdnnError
from optdnn.importers.onnx import import_model
from optdnn.ops.linear_attention import DELTA, GATED
from optdnn.types import Array


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def refused(because: str, op: str, operands: list[Any], n: int = 1, **attrs: Any) -> None:
    with pytest.raises(OptdnnError, match=because):
        import_model(one(op, operands, n=n, **attrs)[0])


# ---------------------------------------------------------------- causal convolution


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize(("bias", "past"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("length", [1, 5])
def test_causal_convolution(length: int, bias: bool, past: bool, activation: str, dilation: int) -> None:
    operands = [normal(2, 6, length), normal(6, 1, 4, seed=1), normal(6, seed=2) if bias else None]
    operands += [normal(2, 6, 3 * dilation, seed=3)] if past else []
    more = {} if dilation == 1 else {"dilation": dilation}
    check("CausalConvWithState", operands, n=2, activation=activation, **more)


def test_causal_convolution_of_channels_last() -> None:
    operands = [normal(2, 5, 6), normal(6, 1, 3, seed=1), None, normal(2, 2, 6, seed=3)]
    check("CausalConvWithState", operands, n=2, activation="swish", channels_last=1)


def test_causal_convolution_of_one_tap_keeps_nothing() -> None:
    x, w = normal(2, 6, 5), normal(6, 1, 1, seed=1)
    holds("CausalConvWithState", [x, w], x * w[:, 0], np.zeros((2, 6, 0), x.dtype), activation="none")


@pytest.mark.parametrize(
    ("attrs", "because"),
    [
        ({"ndim": 2}, "ndim=2"),
        ({"activation": "gelu"}, "the activation gelu"),
        ({"state_window": 2}, "state_window=2"),
    ],
)
def test_causal_convolutions_that_are_refused(attrs: dict[str, Any], because: str) -> None:
    refused(because, "CausalConvWithState", [normal(2, 6, 5), normal(6, 1, 3)], 2, **attrs)


# ---------------------------------------------------------------- linear attention


def attention_operands(
    rule: str, heads: tuple[int, int, int], length: int, past: bool, wide: bool = False
) -> list[Any]:
    """``heads``: of query, key, value. ``wide``: a decay per feature of the key."""
    hq, hk, hv = heads
    key = normal(2, length, hk, 8, seed=1)
    key /= np.sqrt((key**2).sum(-1, keepdims=True))
    return [
        normal(2, length, hq * 8),
        key.reshape(2, length, hk * 8),
        normal(2, length, hv * 4, seed=2),
        normal(2, hv, 8, 4, seed=3) if past else None,
        -np.abs(normal(2, length, hv * (8 if wide else 1), seed=4)) if rule in GATED else None,
        sigmoid(normal(2, length, hv, seed=5)) if rule in DELTA else None,
    ]


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(("length", "past"), [(1, True), (5, True), (5, False)])
@pytest.mark.parametrize("heads", [(2, 2, 2), (2, 2, 4), (4, 2, 2)])
def test_linear_attention(rule: str, length: int, past: bool, heads: tuple[int, int, int]) -> None:
    operands = attention_operands(rule, heads, length, past)
    check("LinearAttention", operands, n=2, q_num_heads=heads[0], kv_num_heads=heads[2], update_rule=rule)


@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_linear_attention_with_a_decay_per_feature_and_a_scale(rule: str) -> None:
    operands = attention_operands(rule, (2, 2, 2), 4, True, wide=True)
    check("LinearAttention", operands, n=2, q_num_heads=2, kv_num_heads=2, update_rule=rule, scale=0.5)


@pytest.mark.parametrize(
    ("change", "attrs", "because"),
    [
        ({}, {"state_window": 2}, "state_window=2"),
        ({}, {"update_rule": "other"}, "update_rule='other'"),
        ({}, {"q_num_heads": 3}, "3 heads do not divide"),
        ({4: None}, {}, "no operand decay"),
        ({5: None}, {}, "no operand beta"),
        ({4: normal(2, 5, 3)}, {}, "its width must be one of"),
        ({3: normal(2, 2, 8, 5)}, {}, "past_state"),
        ({1: normal(2, 5, 24)}, {}, "2 query heads, 2 value heads"),
    ],
)
def test_linear_attention_that_is_refused(change: dict[int, Any], attrs: dict[str, Any], because: str) -> None:
    operands = attention_operands("gated_delta", (2, 2, 2), 5, True)
    for slot, value in change.items():
        operands[slot] = value
    refused(because, "LinearAttention", operands, 2, **{"q_num_heads": 2, "kv_num_heads": 2, **attrs})


# ---------------------------------------------------------------- gates and norms


def test_gate_of_linear_attention() -> None:
    a, b, bias, factor = normal(2, 5, 4), normal(2, 5, 4, seed=1), normal(4, seed=2), -np.abs(normal(4, seed=3))
    decay = factor * np.log1p(np.exp(a + bias))
    holds("LinearAttentionGate", [a, bias, factor, b], decay, sigmoid(b))
    holds("LinearAttentionGate", [a, bias, factor], decay)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm(groups: int, activation: str) -> None:
    x, gate, scale = normal(2, 5, groups * 8), normal(2, 5, groups * 8, seed=1), normal(8, seed=2)
    parts = x.reshape(2, 5, groups, 8)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-6) * scale
    due = parts.reshape(x.shape) * (gate if activation == "silu" else 1) * sigmoid(gate)
    holds("GatedRMSNorm", [x, scale, gate], due, activation=activation)
    refused("the activation relu", "GatedRMSNorm", [x, scale, gate], activation="relu")


def test_gated_addition() -> None:
    x, y, gate = normal(2, 5, 8), normal(2, 5, 8, seed=1), normal(2, 5, 1, seed=2)
    holds("GatedAdd", [x, y, gate], x + y * gate)
    refused("the operand gate_weight", "GatedAdd", [x, y, normal(2, 5, 3), normal(3, 1)])


# ---------------------------------------------------------------- three positions


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("layout", "sections"), [(0, [2, 1, 1]), (1, [2, 1, 1]), (0, [4, 0, 0])])
def test_rotary_embedding_of_three_positions(layout: int, sections: list[int], flat: bool) -> None:
    x = normal(2, 5, 3 * 16) if flat else normal(2, 3, 5, 16)
    ids = np.random.default_rng(1).integers(0, 9, (3, 2, 5))
    operands = [x, ids, normal(9, 4, seed=2), normal(9, 4, seed=3)]
    more = {"mrope_section": sections, "mrope_layout": layout, "rotary_embedding_dim": 8, "num_heads": 3}
    check("MRotaryEmbedding", operands, fed=2, **more)


def test_rotary_embedding_of_three_positions_that_is_refused() -> None:
    operands = [normal(2, 5, 24), np.zeros((3, 2, 5), np.int64), normal(9, 4), normal(9, 4)]
    for attrs, because in (
        ({"mrope_section": [2, 1, 2]}, "for 4 pairs"),
        ({"mrope_section": [2, 1, 1], "scale": 2.0}, "scale=2.0"),
        ({"mrope_section": [2, 1, 1], "is_packed_batching": 1}, "is_packed_batching=1"),
    ):
        refused(because, "MRotaryEmbedding", operands, num_heads=3, **attrs)
