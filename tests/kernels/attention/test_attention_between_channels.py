"""Attention between channels as a tactic: the operators that it fuses, its refusals, and the meanings of its launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_not_taken, check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LpNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.program import Program
from optdnn.types import FP64

COSINE = LpNormAttrs(-1, 2, 1e-12)


def between_channels(
    *, heads: int = 2, size: int = 16, tokens: int = 20, norm: Any = COSINE, of_keys: Any = "", factors: Any = None,
    shown: bool = False, sinks: bool = False, **attention: Any,
) -> Graph:  # fmt: skip
    """XCiT's attention: q, k, v from one projection, tokens transposed to the last axis, q and k normalized over tokens."""
    n = Net()
    x = n.input(2, tokens, 24)
    joint = n.op("MatMul", x, n.random(24, 3 * heads * size))
    parts = n.op("Reshape", joint, n.ints(2, tokens, 3, heads, size))
    turned = n.op("Transpose", parts, attrs=TransposeAttrs((2, 0, 3, 4, 1)))
    split = n.op("Split", turned, n.ints(1, 1, 1), attrs=SplitAttrs(0), outputs=3)
    q, k, v = (n.op("Squeeze", part, n.ints(0)) for part in split)
    results: list[Value] = []
    if norm is not None:
        q = n.op("LpNormalization", q, attrs=norm)
        results += [q] if shown else []
    of_keys = norm if of_keys == "" else of_keys
    if of_keys is not None:
        k = n.op("LpNormalization", k, attrs=of_keys)
    if factors is not None:
        q = n.op("Mul", q, np.asarray(factors, np.float32))
    more = [*[None] * 4, n.random(heads)] if sinks else []
    y = n.op("Attention", q, k, v, *more, attrs=AttentionAttrs(**{"scale": 1.0, **attention}))
    back = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 3, 1, 2))), n.ints(2, tokens, heads * size))
    return n.done(n.op("MatMul", back, n.random(heads * size, 24)), *results)


def row(program: Program) -> dict[str, Any]:
    (found,) = (t for t in program.meta["tactics"] if t["kind"] == "Attention")
    return found


FACTORS = np.array([3.0, 7.0]).reshape(1, 2, 1, 1)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
@pytest.mark.parametrize(
    "options",
    [{}, {"factors": FACTORS}, {"norm": None}, {"norm": None, "scale": None}, {"norm": None, "factors": FACTORS}, {"size": 22}, {"size": 15}],
)  # fmt: skip
def test_one_launch(options: dict[str, Any], target: str) -> None:
    program = check_simulated(between_channels(**options), "bf16" if "size" in options else "fp16", target=target)
    assert row(program)["tactic"] == "attention_channels"
    assert kinds(program).count("ChannelAttention") == 1
    assert kinds(program).count("Pointwise") == 1  # the cast of the network's input
    assert not {"LpNormalization", "Mul"} & set(kinds(program))
    if options.get("size", 16) % 8 == 0:
        assert len(program.steps) == 4  # the cast and both products: no transposition is copied


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({}, "fp16"),
        ({"factors": FACTORS, "size": 22}, "bf16"),
        ({"norm": None, "scale": None}, "fp16"),
        ({"heads": 1, "size": 96}, "fp16"),
    ],
)
def test_many_tokens_take_two_launches(options: dict[str, Any], precision: str) -> None:
    program = check_simulated(between_channels(tokens=3000, **options), precision, target="cuda:sm_90a")
    assert row(program)["tactic"] == "attention_channels"
    found = kinds(program)
    assert "ChannelAttention" not in found
    assert found.index("ChannelResults") == found.index("ChannelSums") + 1
    assert not {"LpNormalization", "Mul", "MaskedSoftmax"} & set(found)


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({"norm": LpNormAttrs(-1, 1)}, 2),
        ({"norm": LpNormAttrs(2, 2)}, 2),
        ({"of_keys": None}, 1),
        ({"shown": True}, 2),
        ({"factors": np.linspace(1, 2, 16).reshape(16, 1)}, 2),
    ],
)
def test_other_forms_are_computed_separately(options: dict[str, Any], apart: int) -> None:
    program = check_simulated(between_channels(**options), "fp16", target="cuda:sm_90a")
    assert kinds(program).count("LpNormalization") == apart


@pytest.mark.parametrize(
    ("options", "precision", "reason"),
    [
        ({}, "fp32", "it is for 16-bit floats"),
        ({"size": 136}, "fp16", "heads of 136 channels"),
        ({"is_causal": True, "tokens": 16}, "fp16", "its scores have a mask"),
        ({"softcap": 2.0}, "fp16", "a mask or a softcap"),
        ({"left_window_size": 3}, "fp16", "a window"),
        ({"sinks": True}, "fp16", "its softmax has sinks"),
        ({"softmax_precision": FP64}, "fp16", "its softmax is fp32"),
    ],
)
def test_refusals(options: dict[str, Any], precision: str, reason: str) -> None:
    program = check_simulated(between_channels(**options), precision, target="cuda:sm_90a")
    found = [r["reason"] for r in row(program)["refused"] if r["tactic"] == "attention_channels"]
    assert found
    assert reason in found[0]


def test_attention_between_tokens_is_none_of_its_own() -> None:
    n = Net()
    q, k, v = (n.input(1, 2, 32, 16, name=name) for name in "qkv")
    program = check_simulated(n.done(n.op("Attention", q, k, v, attrs=AttentionAttrs())), "fp16", target="cuda:sm_90a")
    found = {r["tactic"]: r["reason"] for r in row(program)["refused"]}
    assert "not contiguous" in found["attention_channels"]


def test_a_result_of_the_network_keeps_its_order() -> None:
    n = Net(np.float16)
    parts = n.op("Reshape", n.input(2, 20, 96), n.ints(2, 20, 3, 2, 16))
    turned = n.op("Transpose", parts, attrs=TransposeAttrs((2, 0, 3, 4, 1)))
    split = n.op("Split", turned, n.ints(1, 1, 1), attrs=SplitAttrs(0), outputs=3)
    y = n.op("Attention", *(n.op("Squeeze", part, n.ints(0)) for part in split), attrs=AttentionAttrs())
    because = "its result is wanted in another order"
    check_not_taken(n.done(y), "attention_channels", because, no_cubins=True, io_dtype="fp16")
