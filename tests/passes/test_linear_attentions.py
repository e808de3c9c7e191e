"""linear_attentions: linear attention becomes products, token by token or in chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated
from support.sweep import all_pairs

from optdnn.ir.graph import Graph
from optdnn.ops.linear_attention import DELTA, GATED, LinearAttentionAttrs
from optdnn.passes.linear_attentions import CHUNK, FEW, MOST_CHUNKS, MOST_STEPS, LinearAttentions

RULES = ["linear", "gated", "delta", "gated_delta"]


def net(
    rule: str = "gated_delta",
    tokens: Any = 1,
    *,
    heads: tuple[int, int] = (2, 2),
    past: bool = True,
    features: bool = False,
    dtype: Any = np.float64,
) -> Graph:
    """Attention with decays below 0, rates between 0 and 1, and short keys. ``heads``: of queries and keys, and of values."""
    n = Net(dtype)
    few, more = heads
    q, v = n.input(2, tokens, few * 8), n.input(2, tokens, more * 4, name="v")
    k = n.op("Mul", n.op("Tanh", n.input(2, tokens, few * 8, name="k")), 0.3)
    width = more * (8 if features else 1)
    decay = n.op("Neg", n.op("Softplus", n.input(2, tokens, width, name="g"))) if rule in GATED else None
    rate = n.op("Sigmoid", n.input(2, tokens, more, name="b")) if rule in DELTA else None
    state = n.input(2, more, 8, 4, name="s") if past else None
    attrs = LinearAttentionAttrs(few, more, 0.5, rule)
    return n.done(*n.op("LinearAttention", q, k, v, state, decay, rate, attrs=attrs, outputs=2))


@all_pairs(
    {
        "rule": RULES,
        "tokens": [1, FEW, FEW + 1, CHUNK, CHUNK + 1],
        "heads": [(2, 2), (2, 4)],
        "past": [True, False],
    }
)
def test_attention_becomes_products(rule: str, tokens: int, heads: tuple[int, int], past: bool) -> None:
    before = net(rule, tokens, heads=heads, past=past)
    after, _ = check_pass(LinearAttentions(), before, changes=1, rules={"linear_attention": 1}, seeds=(1, 2))
    assert not after.of_kind("LinearAttention")


def test_a_decode_step_has_two_products() -> None:
    after, _ = check_pass(LinearAttentions(), net(), changes=1)
    kinds = after.kinds()
    assert kinds["MatMul"] == 2  # what the state knows of the key, and the output
    assert "CumSum" not in kinds


@pytest.mark.parametrize(("tokens", "chunks"), [(CHUNK, 1), (CHUNK + 1, 2), (3 * CHUNK, 3)])
def test_products_of_chunks(tokens: int, chunks: int) -> None:
    """Ten products invert a triangle of 64 rows; four more prepare all chunks, and each chunk has four."""
    after, _ = check_pass(LinearAttentions(), net(tokens=tokens), changes=1, seeds=(1, 2))
    assert after.kinds()["MatMul"] == 10 + 4 + 4 * chunks
    assert after.kinds().get("Pad", 0) == (5 if tokens % CHUNK else 0)


@pytest.mark.parametrize("tokens", [1, FEW + 1])
def test_decays_of_features_are_computed_token_by_token(tokens: int) -> None:
    after, _ = check_pass(LinearAttentions(), net("gated", tokens, features=True), changes=1)
    assert after.kinds()["MatMul"] == tokens


def test_16_bit_floats_are_computed_in_fp32() -> None:
    graph = net(dtype=np.float16)
    after, _ = check_pass(LinearAttentions(), graph, changes=1)
    assert {after.type(op.value).dtype for op in after.of_kind("MatMul")} == {np.dtype(np.float32)}


def test_refusals() -> None:
    check_refused(LinearAttentions(), net(heads=(4, 2)), because="4 query heads share 2 states")
    check_refused(
        LinearAttentions(), net(tokens=MOST_STEPS + 1, features=True), because="each feature has its own decay"
    )
    check_refused(LinearAttentions(), net(tokens=CHUNK * MOST_CHUNKS + 1), because="tokens, more than")
    check_refused(LinearAttentions(), net(tokens=0), because="a size is 0")


def test_unknown_numbers_of_tokens_wait_for_their_plan() -> None:
    n = Net()
    length = n.graph.fresh_symbol("tokens")
    q, k, v = (n.input(2, length, 16, name=name) for name in "qkv")
    attrs = LinearAttentionAttrs(2, 2, 1.0, "linear")
    check_untouched(LinearAttentions(), n.done(*n.op("LinearAttention", q, k, v, attrs=attrs, outputs=2)))


@pytest.mark.parametrize("tokens", [1, 70])
def test_programs(tokens: int) -> None:
    program = check_simulated(net(tokens=tokens, heads=(2, 4), dtype=np.float32))
    assert all(step.executor == "cuda" for step in program.steps)
