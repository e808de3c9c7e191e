"""A causal mask beside another bias of the scores: it becomes an attribute, and the other bias remains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.net import Net

from optdnn.ir.evaluate import evaluate, promote
from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_attention import FuseAttention
from optdnn.passes.support import attention_mask
from optdnn.passes.support.precision_report import PrecisionLog

B, H, S = 2, 3, 10
FUTURE = np.triu(np.ones((S, S)), 1)
SLOPES = 0.5 ** np.arange(1.0, H + 1).reshape(H, 1, 1)
DISTANCES = -np.abs(np.arange(S)[:, None] - np.arange(S))
Biases = Callable[[Net], list[Value]]


def future(n: Net, fill: float = -np.inf) -> Value:
    return n.const(np.where(FUTURE, fill, 0.0))


def alibi(n: Net) -> Value:
    """A number for each key."""
    return n.const(SLOPES * np.arange(S))


def attention(biases: Biases) -> Graph:
    n = Net()
    q, k, v = (n.input(B, H, S, 4, name=name) for name in "qkv")
    scores = n.op("MatMul", q, n.transposed(k, 0, 1, 3, 2))
    for bias in biases(n):
        scores = n.op("Add", scores, bias)
    return n.done(n.op("MatMul", n.op("Softmax", scores), v))


def fused(biases: Biases) -> tuple[Graph, np.ndarray | None]:
    """The fused graph, and its constant mask. Its results are those of the graph before, in float64."""
    graph = attention(biases)
    exact = promote(graph)
    FuseAttention()(graph)
    assert set(graph.kinds()) == {"Attention"}
    feeds = {x: np.random.default_rng(3).standard_normal((B, H, S, 4)) for x in "qkv"}
    (want,), (got,) = evaluate(exact, feeds).values(), evaluate(promote(graph), feeds).values()
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)  # the mask itself is fp32
    before = graph.kinds()
    FuseAttention()(graph)
    assert graph.kinds() == before
    (op,) = graph.of_kind("Attention")
    return graph, graph.constant_value(op.input(3))


SPLIT: dict[str, tuple[Biases, tuple[int, ...]]] = {
    "numbers of keys": (lambda n: [alibi(n), future(n)], (1, H, 1, S)),
    "the mask first": (lambda n: [future(n, -3e38), alibi(n)], (1, H, 1, S)),
    "three": (lambda n: [alibi(n), future(n), n.const(SLOPES * DISTANCES)], (1, H, S, S)),
    "numbers of pairs": (lambda n: [n.const(SLOPES * DISTANCES), future(n)], (1, H, S, S)),
    "one sum of both": (lambda n: [n.const(np.where(FUTURE, -1e9, SLOPES * DISTANCES))], (1, H, S, S)),
}


@pytest.mark.parametrize("name", SPLIT)
def test_the_future_is_an_attribute(name: str) -> None:
    biases, shape = SPLIT[name]
    graph, mask = fused(biases)
    assert graph.of_kind("Attention")[0].attrs.is_causal
    assert mask is not None
    assert mask.shape == shape
    assert np.abs(mask).max() < 10, "what is hidden is not in the mask"


def test_a_window_beside_a_bias() -> None:
    near = (DISTANCES > -3) & (FUTURE == 0)
    graph, mask = fused(lambda n: [alibi(n), n.const(np.where(near, 0.0, -np.inf))])
    attrs = graph.of_kind("Attention")[0].attrs
    assert (attrs.is_causal, attrs.left_window_size) == (True, 2)
    assert mask is not None
    assert mask.shape == (1, H, 1, S)


TOGETHER: dict[str, Biases] = {
    "a bias that hides too": lambda n: [n.const(np.where(np.arange(S) == 4, -1e9, 0.0)), future(n)],
    "a bias that is too large": lambda n: [n.const(np.arange(S) * 1e4), future(n, -1e9)],
    "large numbers in the sum": lambda n: [n.const(np.where(FUTURE, -1e9, -2e4 * (np.arange(S) > 5)))],
    "no window": lambda n: [alibi(n), n.const(np.where(np.eye(S)[::-1], -np.inf, 0.0))],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_other_sums_stay_one_mask(name: str) -> None:
    graph, mask = fused(TOGETHER[name])
    assert not graph.of_kind("Attention")[0].attrs.is_causal
    assert mask is not None
    assert (mask <= -9e8).any()


def test_a_computed_bias_is_added_with_the_mask() -> None:
    graph = attention(lambda n: [n.input(B, 1, 1, S, name="m"), future(n)])
    FuseAttention()(graph)
    assert not graph.of_kind("Attention")[0].attrs.is_causal, "the input might hide all earlier keys"


def steep(n: Net) -> list[Value]:
    return [n.const(100 * SLOPES * np.arange(S)), future(n)]


def test_large_numbers_of_keys_are_seen_from_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest keys, which have the largest weights, get the smallest numbers. That takes a row for each query."""
    _, mask = fused(steep)
    assert mask is not None
    assert mask.shape == (1, H, S, S)
    assert np.array_equal(np.diagonal(mask, axis1=2, axis2=3), np.zeros((1, H, S)))
    assert np.abs(np.diagonal(mask, -1, axis1=2, axis2=3)).max() == 50.0
    monkeypatch.setattr(attention_mask, "CENTERED", H * S * S - 1)
    _, mask = fused(steep)
    assert mask is not None
    assert mask.shape == (1, H, 1, S)


def test_a_mask_that_has_a_row_for_each_query_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mask, "CENTERED", 0)
    _, mask = fused(lambda n: [n.const(100 * SLOPES * np.arange(S) + np.arange(S)[:, None]), future(n)])
    assert mask is not None
    assert np.array_equal(np.diagonal(mask, axis1=2, axis2=3), np.zeros((1, H, S)))


def assigned(biases: Biases, precision: str = "fp16") -> tuple[Op, dict[str, str]]:
    graph, log = fused(biases)[0], PrecisionLog()
    AssignPrecision()(graph, PassContext("cuda:sm_90a", precision, precision_log=log))
    (op,) = graph.of_kind("Attention")
    return op, log.refused


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_numbers_of_keys_that_16_bits_round_too_much(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mask, "CENTERED", 0)
    op, refused = assigned(steep, precision)
    assert op.outputs[0].type.dtype == np.float32
    assert op.attrs.factors == ("" if precision == "fp32" else "tf32"), "rounding 16-bit queries to tf32 loses nothing"
    why = "numbers of its mask reach 450, which 16 bits round too much"
    assert refused == ({} if precision == "fp32" else {op.outputs[0].name: why})


SMALL: dict[str, Biases] = {
    "small numbers": lambda n: [alibi(n), future(n)],
    "seen from each query": steep,
    "without weight": lambda n: [n.const(-100.0 * (np.arange(S) > 4) - 0.5 * np.arange(S)[:, None])],
}


@pytest.mark.parametrize("name", SMALL)
def test_other_masks_are_rounded(name: str) -> None:
    op, refused = assigned(SMALL[name])
    assert op.outputs[0].type.dtype == np.float16
    assert refused == {}
